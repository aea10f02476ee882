"""Runs alone, as `python -m rival.worker JOB RESULT`: one program through the TPU compiler, in a process of its own.

The compiler can abort the whole process, and reads its flags once: so the parent sets LIBTPU_INIT_ARGS, and finds no RESULT if
the worst happened. JOB: kind (xla or mkgen), spec (the file) and sets, rows, and for xla layers, form, expert_parallel,
masked_write, text (a directory).
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path


def devices(spec):
    from jax.experimental import topologies

    from mkgen.targets import load_target

    name, _ = load_target(spec.build.chip).topology(spec.build.ranks)
    return topologies.get_topology_desc(platform="tpu", topology_name=name).devices[: spec.build.ranks]


def xla(job: dict, spec):
    from compile_depth import cut
    from rival.model import Rival

    rival = Rival(
        cut(spec, job["layers"]),
        job["rows"],
        spec.build.context,
        job["form"],
        job["expert_parallel"],
        masked_write=job["masked_write"],
    )
    mesh = rival.mesh(devices(spec))
    return mesh, lambda: rival.make_step(mesh).lower(*rival.abstract(mesh))


def mkgen(job: dict, spec):
    import importlib

    import numpy as np
    from jax.sharding import Mesh

    from mkgen.emit.module import write_module
    from mkgen.graph.build import build_graph
    from mkgen.plan.planner import make_plan
    from mkgen.targets import load_target

    where = tempfile.mkdtemp(prefix="against-xla-")
    write_module(make_plan(spec, build_graph(spec), load_target(spec.build.chip)), Path(where) / "generated_module")
    sys.path.insert(0, where)
    module = importlib.import_module("generated_module")
    mesh = Mesh(np.array(devices(spec)), ("tp",))
    step = module.make_decode_step(mesh, job["rows"])
    return mesh, step.lower


def compile_job(job: dict) -> dict:
    import jax

    from mkgen.spec.load import load_spec

    spec = load_spec(job["spec"], sets=tuple(job["sets"]))
    mesh, lower = {"xla": xla, "mkgen": mkgen}[job["kind"]](job, spec)
    options = {"xla_dump_to": job["text"], "xla_dump_hlo_as_text": True} if job.get("text") and job["kind"] == "xla" else None
    with jax.set_mesh(mesh):
        began, cpu = time.perf_counter(), time.process_time()
        lowered = lower()
        lowered_at = time.perf_counter()
        compiled = lowered.compile(compiler_options=options)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
    memory = compiled.memory_analysis()
    if job["kind"] == "mkgen":
        Path(job["text"]).mkdir(parents=True, exist_ok=True)
        (Path(job["text"]) / "module.after_codegen.txt").write_text(compiled.as_text())
    return {
        "lower_seconds": lowered_at - began,
        "compile_seconds": ended - lowered_at,
        "cpu_seconds": cpu,
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "code_bytes": memory.generated_code_size_in_bytes,
    }


def main(job: str, result: str) -> None:
    try:
        out = compile_job(json.loads(Path(job).read_text(encoding="utf-8")))
    except Exception as error:
        out = {"error": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(out), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
