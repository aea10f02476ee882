"""Phases of hand-written kernels that are compiled for their cycles: how one is declared, and measured. See phases.py."""
from __future__ import annotations

import os
import tempfile
from pathlib import Path

DUMP = Path(os.environ.get("PHASES_DUMP") or tempfile.mkdtemp(prefix="phases-"))
os.environ.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
    LIBTPU_INIT_ARGS=(
        f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    ),
)

import jax
import jax.numpy as jnp
import numpy as np
from clock import bundles_of
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from mkgen.profile.listing import read_listing
from mkgen.profile.scoreboard import cycles_of_loop

f32, bf16, i8, i4, i32, u32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4, jnp.int32, jnp.uint32
f8, f4 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
MESH = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[:1]), ("x",))
PHASES: dict[str, tuple] = {}  # name -> (what it is, body(trip, refs), shapes of the operands)


def phase(name: str, what: str, *shapes: tuple):
    """Declares a phase; its body gets the number of the trip, which no load may be hoisted past, and its refs."""

    def take(body):
        PHASES[name] = (what, body, shapes)
        return body

    return take


def dot(a, b):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=f32)


def rms(x, eps=1e-5):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def measure(name: str) -> float:
    """Cycles of one trip."""
    _, body, shapes = PHASES[name]

    def kernel(*refs):
        lax.fori_loop(0, 8, lambda i, _: body(i, *refs), None)

    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    # everything is an output: the compiler drops what goes into scratch that nobody reads
    call = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(*s) for s in shapes],
        out_specs=[vmem] * len(shapes),
        name=name,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=63 * 2**20, disable_bounds_checks=True),
    )
    with jax.set_mesh(MESH):
        mapped = jax.shard_map(call, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        jax.jit(mapped).lower().compile()
    return cycles_of_loop(read_listing(bundles_of(DUMP, name))).all
