"""Cycles of products by storage format: python benchmarks/formats.py [FORMAT ...] [--shape K,N ...] [--rows R ...]

Takes the functions that a generated kernel multiplies with, puts weights of each format into VMEM, compiles a loop over them for
the chip, and replays the bundles (clock.py). Prints cycles a MiB of codes at 1, 4 and 8 decode rows with bf16 activations, and at
8 rows with float32 ones, whose two terms are 16 rows of the left operand. Below 0.69 cycles a KiB (704 a MiB) the product keeps up with
memory at 3.2 TB/s. `table`: the best of the formulations that were tried before this one was chosen, at the same numbers of rows.
"""
from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

DUMP = Path(tempfile.mkdtemp(prefix="formats-"))
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", LIBTPU_INIT_ARGS=(
    f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"))

import jax
import jax.numpy as jnp
import numpy as np
from clock import bundles_of, cycles
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mkgen.emit.coded import coded, constant
from mkgen.emit.render import render_kernel
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.plan.section import DEPTH, Section, left_rows
from mkgen.spec.formats import FORMATS
from mkgen.spec.load import load_spec
from mkgen.targets import load_target

ROOT = Path(__file__).resolve().parents[1]
SHAPES = (2048, 1024), (4096, 1024)
COLUMNS = (1, "bf16"), (4, "bf16"), (8, "bf16"), (8, "f32")
TABLE = {"bf16": (313, 313, 313, 312), "int8": (626, 626, 626, 625), "fp8": (369, 369, 369, 368), "fp8_block": (369, 369, 369, 368),
         "fp8_g256": (369, 369, 369, 368), "int4_g128": (744, 744, 744, 754), "mxfp4": (760, 786, 809, 1305), "nvfp4": (762, 808, 1325, 1739)}
MESH = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[:1]), ("x",))


def kernel_functions(fmt: str, activations: str) -> tuple[dict, object]:
    """The namespace of a kernel whose streamed matrices have the format, and what its emitter knows of them."""
    spec = load_spec(ROOT / "model_specs" / "qwen3_30b_a3b.yaml")
    formats = {"attention.o": fmt, "experts": "bf16"}
    spec = replace(spec, build=replace(spec.build, formats=formats, activations=activations, rows=(1, 4, 8)))
    plan = make_plan(spec, build_graph(spec), load_target("tpu7x"))
    space = {"__name__": "generated"}
    exec(compile(render_kernel(plan), "kernel.py", "exec"), space)
    return space, coded(plan)


def measure(fmt: str, k: int, n: int, rows: int, activations: str) -> float:
    """Cycles a MiB of codes."""
    space, known = kernel_functions(fmt, activations)
    f, m = FORMATS[fmt], SimpleNamespace(rows=rows)
    section = Section(fmt, f.group, 0, k, n // 128)
    codes = k * n * f.bits // 8
    left = ((-(-k // DEPTH), left_rows(fmt, f.group, rows, known.terms), DEPTH), jnp.bfloat16) if f.group else (
        (8, k), jnp.float32 if activations == "f32" else jnp.bfloat16)

    def grouped(w, x, sums, y, slot):
        s = eval(known.section(section), space)._replace(runs=section.panels)
        space["coded_matmul"](m, w, slot, s, (x, sums) if f.zero else x, space["into"](y, add=True))

    def plain(w, x, _, y, slot):
        m.ring, dtype = w, eval({"bf16": "bf16", "int8": "jnp.int8", "e4m3": "jnp.float8_e4m3fn"}[f.code], space)
        part = space["dot"](x[...], space["panels"](m, slot, 0, k, n, *([dtype] if fmt != "bf16" else [])))
        y[...] += part if fmt == "bf16" else part * space["column_scales"](m, slot, section.columns_at, n)

    def body(w, x, sums, y):
        y[...] = jnp.zeros_like(y)

        def trip(i, _):
            (grouped if f.group else plain)(w, x, sums, y, lax.rem(i, 2))

        lax.fori_loop(0, 8, trip, None)

    space["RING_DEPTH"] = 2
    name = f"{fmt}_{k}_{n}_{rows}_{activations}"
    inputs = [((2, section.end, 128), jnp.uint32), left, ((left[0][0], left[0][1], 128) if f.group else (8, 128), jnp.float32)]
    lower(name, body, inputs, ((8, n), jnp.float32))
    return cycles(bundles_of(DUMP, name)) / (codes / 2 ** 20)


def lower(name: str, body, inputs: list, output: tuple) -> None:
    vmem, whole = pl.BlockSpec(memory_space=pltpu.VMEM), NamedSharding(MESH, PartitionSpec())
    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct(*output), in_specs=[vmem] * len(inputs), out_specs=vmem, name=name,
                          compiler_params=pltpu.CompilerParams(vmem_limit_bytes=60 * 2 ** 20, disable_bounds_checks=True))
    with jax.set_mesh(MESH):
        mapped = jax.shard_map(call, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, d, sharding=whole) for s, d in inputs)).compile()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("formats", nargs="*", default=list(FORMATS))
    asked.add_argument("--shape", nargs="*", type=lambda t: tuple(map(int, t.split(","))), default=SHAPES)
    asked = asked.parse_args()
    print(f"{'cycles a MiB of codes':34}" + "".join(f"{f'{rows} x {act}':>12}" for rows, act in COLUMNS), flush=True)
    for fmt in asked.formats:
        for k, n in asked.shape:
            line = [measure(fmt, k, n, rows, act) for rows, act in COLUMNS]
            print(f"{constant(fmt, FORMATS[fmt].group).lower():22}{f'[{k}, {n}]':>12}" + "".join(f"{c:12.0f}" for c in line), flush=True)
        if fmt in TABLE:
            print(f"{'table':>34}" + "".join(f"{c:12}" for c in TABLE[fmt]), flush=True)


if __name__ == "__main__":
    main()
