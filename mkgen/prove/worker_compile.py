"""Runs alone, as `python -m mkgen.prove.worker_compile JOB RESULT`: one row variant through the TPU compiler.

JOB and RESULT are JSON files. The compiler can abort the whole process, so nothing else lives in it; a Python error is
written to RESULT as {"error": text}. The environment (see `compile.worker_environment`) is set by the parent, because
libtpu reads it once.
"""
from __future__ import annotations

import importlib
import json
import re
import sys
import time
from pathlib import Path

INSTRUCTION = re.compile(r"^ *(?:ROOT )?%\S+ = (\w+\[[\d,]*\])\S* ([\w-]+)\(", re.MULTILINE)     # shape, operation
HANDED_ON = {"parameter", "get-tuple-element", "bitcast"}              # no byte of an array moves
HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "uint32": "u32", "int32": "s32"}


def compile_job(job: dict) -> dict:
    """job: directory and package of the generated module, rows, steps a call, topology, ranks -> seconds, bytes, what XLA moves."""
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    sys.path.insert(0, job["directory"])
    module = importlib.import_module(job["package"])
    topology = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"])
    mesh = Mesh(np.array(topology.devices[:job["ranks"]]), ("tp",))
    step = module.make_decode_step(mesh, job["rows"], steps=job["steps"])
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
            "code_bytes": memory.generated_code_size_in_bytes,
            "moved": moved(compiled.as_text(), {**step.weights, **step.state}, job["ranks"])}


def moved(program: str, arrays: dict, ranks: int) -> list[str]:
    """"operation shape" of all instructions of the optimised program that make an array shaped as a rank's weights or states.

    The kernel reads and writes these where they are, in a loop of steps too: XLA may hand them on, and nothing else.
    ValueError: the program has no parameter of some shape, so its text is not what this was written for."""
    shapes = {f"{HLO_TYPES[a.dtype.name]}[{','.join(map(str, (a.shape[0] // ranks, *a.shape[1:])))}]" for a in arrays.values()}
    found = [(shape, op) for shape, op in INSTRUCTION.findall(program) if shape in shapes]
    if lost := shapes - {shape for shape, op in found if op == "parameter"}:
        raise ValueError(f"the compiled program has no parameter {', '.join(sorted(lost))}")
    return sorted({f"{op} {shape}" for shape, op in found if op not in HANDED_ON})


def main(job: str, result: str) -> None:
    try:
        out = compile_job(json.loads(Path(job).read_text(encoding="utf-8")))
    except Exception as error:
        out = {"error": f"{type(error).__name__}: {error}"}
    Path(result).write_text(json.dumps(out), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
