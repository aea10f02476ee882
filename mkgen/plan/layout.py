"""What decides the bytes of packed weights, and its hash: the layout half of a plan, free of the schedule.

Two plans with one hash read the same tapes, expert images and embedding tables. Chunk boundaries, ring depth, slots,
rows and context are schedule and stay out; so do tensor names, which only say where a checkpoint keeps a role's tensor.
"""
from __future__ import annotations

import hashlib
import json
from dataclasses import asdict

from mkgen.plan.plan import Plan
from mkgen.plan.tape import Chunk, Matrix

VERSION = 1                              # of the packing: raise it when formats.py lays the same facts out differently
HASH_CHARS = 16


def entry_order(chunks: tuple[Chunk, ...]) -> list[list]:
    """What lies on the tape in order, whatever the chunks: [name, first block, blocks]; of a vector [name]."""
    out: list[list] = []
    for e in (e for c in chunks for e in c.entries):
        if e.block is None:
            out.append([e.name])
        elif out and len(out[-1]) == 3 and out[-1][0] == e.name and sum(out[-1][1:]) == e.block:
            out[-1][2] += 1
        else:
            out.append([e.name, e.block, 1])
    return out


def stored(m: Matrix) -> dict:
    """Of a matrix, what decides its bytes: not how many blocks are multiplied at a time."""
    return {key: value for key, value in asdict(m).items() if key != "turn" and (key, value) != ("over", 0)}


def layout_facts(plan: Plan) -> dict:
    """JSON-able facts that decide every byte of tape, expert image and embedding of every rank."""
    model = plan.spec.model
    return {
        "version": VERSION,
        "model": {"hidden": model.hidden, "vocab": model.vocab},
        "mesh": [list(f) for f in plan.mesh.factors],
        "layers": [list(pair) for pair in plan.graph.layers],
        "weights": {n: asdict(w) for n, w in plan.weights.items()},
        "matrices": {n: stored(m) for n, m in plan.matrices.items()},
        "vectors": {n: asdict(v) for n, v in plan.vectors.items()},
        "order": {n: entry_order(r.chunks) for n, r in plan.regions.items()},
        "experts": [known(asdict(image)) for image in plan.experts],
        "embedding": {"rows": plan.embed_rows, "run": -(-model.vocab // plan.mesh.ranks)},
    }


UNFOLDED = {"fold": 1, "joint": False, "parts": 1, "span": 0}         # of no layout that was there before parts of K lay side by side


def known(facts: dict) -> dict:
    """An image's facts, without those that say that it has no parts of K side by side."""
    return {key: known(value) if isinstance(value, dict) else value for key, value in facts.items() if (key, value) not in UNFOLDED.items()}


def layout_hash(plan: Plan) -> str:
    """16 hex digits of the sha256 of `layout_facts`, independent of the order in which the facts were declared."""
    text = json.dumps(layout_facts(plan), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_CHARS]
