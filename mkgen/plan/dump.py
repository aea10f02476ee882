"""A plan as plain data: stable, diffable and complete. What `plan.json` holds, and how it is written."""
from __future__ import annotations

import json
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_args

from mkgen.plan.experts import ExpertImage
from mkgen.plan.figures import figures
from mkgen.plan.layout import layout_facts, layout_hash
from mkgen.plan.padding import paddings
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Buffer, Node, Transfer
from mkgen.plan.runs import as_schedule, fold
from mkgen.plan.tape import ROW_BYTES, Chunk, Matrix

TERSE = (*get_args(Node), Transfer)
LINE = 120                               # columns of a line of plan.json, where a value fits


def plan_dict(plan: Plan) -> dict:
    """JSON-able, in the order of the plan; rows of tape, images and tables are u32 rows of 512 bytes."""
    variants = plan.spec.build.rows
    return {
        "spec": {"model": plain(plan.spec.model), "build": plain(plan.spec.build)},
        "target": plan.target.name,
        "mesh": {"factors": [list(f) for f in plan.mesh.factors], "ranks": plan.mesh.ranks,
                 "stages": [list(s) for s in plan.mesh.stages]},
        "layout_hash": layout_hash(plan),
        "figures": [figures(plan, rows) for rows in variants],
        "padding": {name: {"what": p.what, "units": p.units, "room": p.room, "bytes": p.bytes, "fraction": round(p.fraction, 6)}
                    for name, p in paddings(plan).items()},
        "why": [list(w) for w in plan.why],
        "tape": tape(plan),
        "experts": [expert_image(image) for image in plan.experts],
        "embedding": {"rows": plan.embed_rows, "bytes": plan.embed_rows * ROW_BYTES},
        "vmem": {str(rows): vmem_map(plan, rows) for rows in variants},
        "states": {name: plan.buffers[b].name for name, b in plan.states.items()},
        "buffers": {b.name: buffer(b) for b in plan.buffers.values()},
        "transfers": {t.name: plain(t) for t in plan.transfers.values()},
        "facts": fact_columns(plan),
        "loop_nest": loop_nest(plan),
        "regions": {r.name: {"role": r.role, "doc": r.doc, "body": plain(r.body)} for r in plan.regions.values()},
    }


def plain(value: Any) -> Any:
    """Dataclasses to dicts whose `node` is the type's name, a Matrix to its name, the rest to JSON's own types.

    Fields of the region tree that say nothing (None, False, empty) are left out; a spec keeps all of its."""
    if isinstance(value, Matrix):
        return {"matrix": value.name}
    if isinstance(value, ExpertImage):
        return value.name                # described at the top
    if is_dataclass(value):
        body = {f.name: plain(getattr(value, f.name)) for f in fields(value) if not f.metadata.get("derived")}
        if isinstance(value, TERSE):
            body = {k: v for k, v in body.items() if v or (v == 0 and v is not False)}
        return {"node": type(value).__name__, **body}
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def tape(plan: Plan) -> dict:
    """The tape's layout, and who reads what: each sub-layer's chunks, and the padding of what they hold."""
    facts = layout_facts(plan)
    return {
        "rows": plan.tape_rows, "bytes": plan.tape_rows * ROW_BYTES, "chunks": plan.chunks,
        "ring": {"depth": plan.ring_depth, "slot_rows": plan.slot_rows},
        "weights": facts["weights"],
        "matrices": {n: {**facts["matrices"][n], "rows": m.rows, "bytes": m.rows * ROW_BYTES,
                         "padding_bytes": m.rows * ROW_BYTES - m.true_bytes} for n, m in plan.matrices.items()},
        "vectors": {n: {**facts["vectors"][n], "rows": v.rows, "bytes": v.rows * ROW_BYTES,
                        "padding_bytes": v.rows * ROW_BYTES - v.true_bytes} for n, v in plan.vectors.items()},
        "regions": {r.name: {"rows": r.rows, "bytes": r.rows * ROW_BYTES, "chunks": [chunk(c) for c in r.chunks]}
                    for r in plan.regions.values()},
    }


def chunk(c: Chunk) -> dict:
    """entries: [name, row in the chunk, rows], and the block's index for a matrix."""
    entries = [[e.name, e.row, e.rows, *([] if e.block is None else [e.block])] for e in c.entries]
    return {"rows": c.rows, "entries": entries}


def expert_image(image: ExpertImage) -> dict:
    return {**asdict(image), "bytes": image.bytes, "expert_bytes": image.expert_bytes,
            "expert_padding_bytes": image.expert_bytes - image.true_bytes}


def buffer(b: Buffer) -> dict:
    """All but the name; 'rows' in a shape is the variant's number of rows."""
    return {"shape": list(b.shape), "dtype": b.dtype, "space": b.space, "remote": b.remote, "purpose": b.purpose}


def vmem_map(plan: Plan, rows: int) -> dict:
    """Buffers in order of declaration: [name, offset, tile-padded bytes]; none shares its bytes with another."""
    out, at = [], 0
    for name, size in plan.vmem(rows).items():
        out.append([name, at, size])
        at += size
    return {"bytes": at, "budget": plan.target.vmem_usable_bytes - plan.spec.build.spill_kib * 1024, "buffers": out}


def fact_columns(plan: Plan) -> dict[str, list[int]]:
    """The per-layer table, a column a fact."""
    table = plan.fact_table().reshape(-1, len(plan.fact_names))
    return {name: table[:, i].tolist() for i, name in enumerate(plan.fact_names)}


def loop_nest(plan: Plan) -> dict:
    """One loop over the layers; what each runs, in the notation of the spec."""
    mixer, ffn = (as_schedule(fold(column)) for column in zip(*plan.graph.layers))
    return {"loop": "layer", "trips": len(plan.graph.layers), "mixer": mixer, "ffn": ffn}


def plan_text(plan: Plan) -> str:
    """plan.json: a value that fits a line stands on one, so that a change is a changed line."""
    return written(plan_dict(plan), "") + "\n"


def written(value: Any, pad: str) -> str:
    line = json.dumps(value, ensure_ascii=False)
    if len(pad) + len(line) <= LINE or not isinstance(value, (dict, list)) or not value:
        return line
    inner = pad + "  "
    if isinstance(value, dict):
        items = [f"{json.dumps(k, ensure_ascii=False)}: {written(v, inner)}" for k, v in value.items()]
    elif all(isinstance(v, (int, float, str)) for v in value):
        return line                      # a long row of numbers or words reads better as it is
    else:
        items = [written(v, inner) for v in value]
    body = ",\n".join(inner + item for item in items)
    ends = "{}" if isinstance(value, dict) else "[]"
    return f"{ends[0]}\n{body}\n{pad}{ends[1]}"
