"""plan -> the files of a generated module, as text or on disk."""
from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from mkgen.emit.render import environment, render_kernel, tidy
from mkgen.plan.dump import plan_text
from mkgen.plan.figures import figures
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Buffer
from mkgen.plan.runs import as_numbers, as_python, fold


def module_files(plan: Plan) -> dict[str, str]:
    """File name -> text of the whole module, in the order in which one reads it."""
    facts = host_facts(plan)
    env = environment()
    host, init = (tidy(env.get_template(f"{name}.py.j2").render(plan=plan, **facts)) for name in ("host", "init"))
    return {"__init__.py": init, "host.py": host, "kernel.py": render_kernel(plan), "plan.json": plan_text(plan)}


def write_module(plan: Plan, out_dir: str | Path) -> list[Path]:
    """Writes the module into `out_dir` and returns its files.

    Nothing is touched before all of it is written beside the place; then each file is replaced in one step. Files that
    are not ours stay."""
    files, out = module_files(plan), Path(out_dir)
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        for name, text in files.items():
            (scratch / name).write_text(text, encoding="utf-8", newline="\n")
        out.mkdir(exist_ok=True)
        for name in files:
            os.replace(scratch / name, out / name)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [out / name for name in files]


# -- what host.py.j2 prints --------------------------------------------------------------------------------------------

def host_facts(plan: Plan) -> dict:
    """The template's names: shapes of a rank's weights, row axes of the states, the tables as short expressions."""
    layers = plan.graph.layers
    first = figures(plan, plan.spec.build.rows[0])
    return {
        "layout_hash": layout_hash(plan),
        "padding_fraction": first["padding_fraction"],
        "vmem": {rows: figures(plan, rows)["planned_vmem_bytes"] for rows in plan.spec.build.rows},
        "core_bytes": {rows: plan.bytes_per_core(rows) for rows in plan.spec.build.rows},
        "weights": {
            "tape": (plan.tape_rows, 128),
            **{image.name: image.shape for image in plan.experts},
            "embedding": (plan.embed_rows, 128),
        },
        "row_axes": {name: row_axis(plan.buffers[name]) for name in plan.states.values()},
        "kinds": {"mixer": list(plan.graph.mixers), "ffn": list(plan.graph.ffns)},
        "schedule": {role: expression([layer[i] for layer in layers]) for i, role in enumerate(("mixer", "ffn"))},
        "chunk_rows": {r.name: expression([c.rows for c in r.chunks]) for r in plan.regions.values()},
        "fact_columns": {name: as_numbers(list(column)) for name, column in plan.graph.facts.items()},
    }


def row_axis(b: Buffer) -> int:
    """Where a state has its decode rows: the axis 'rows', or the padded rows next to the lanes."""
    return b.shape.index("rows") if "rows" in b.shape else len(b.shape) - 2


def expression(items: list) -> str:
    """A list as a short Python expression."""
    return as_python(fold(items))
