"""Runs alone, as `python -m mkgen.prove.worker_compile JOB RESULT`: one row variant through the TPU compiler.

JOB and RESULT are JSON files. The compiler can abort the whole process, so nothing else lives in it; a Python error is
written to RESULT as {"error": text}. The environment (see `compile.worker_environment`) is set by the parent, because
libtpu reads it once.
"""
from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path


def compile_job(job: dict) -> dict:
    """job: directory and package of the generated module, rows, topology, ranks -> seconds and bytes."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    sys.path.insert(0, job["directory"])
    module = importlib.import_module(job["package"])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"])
    mesh = Mesh(np.array(topology.devices[:job["ranks"]]), ("tp",))
    step = module.make_decode_step(mesh, job["rows"])
    # without set_mesh, lowering asks the process's own devices (CPU) which TPU they are
    with jax.set_mesh(mesh):
        began, cpu = time.perf_counter(), time.process_time()
        lowered = step.lower()
        lowered_at = time.perf_counter()
        compiled = lowered.compile()
        ended, cpu = time.perf_counter(), time.process_time() - cpu
    memory = compiled.memory_analysis()
    return {"lower_seconds": lowered_at - began, "compile_seconds": ended - began, "cpu_seconds": cpu,
            "argument_bytes": memory.argument_size_in_bytes, "temporary_bytes": memory.temp_size_in_bytes,
            "code_bytes": memory.generated_code_size_in_bytes}


def main(job: str, result: str) -> None:
    try:
        out = compile_job(json.loads(Path(job).read_text(encoding="utf-8")))
    except Exception as error:
        out = {"error": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(out), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
