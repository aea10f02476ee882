"""Runs alone, as `python -m mkgen.profile.worker JOB`: each piece of a JSON job through the TPU compiler, which leaves its listings.

Answers on stdout, one JSON line a piece: its name, seconds, and the error if there was one. The compiler can abort the whole
process, so nothing else lives in it; the parent sets the environment (`prove.compile.worker_environment`).
"""
from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

SPARE = 8                                # words of `at`: trips, then a piece's scalars, at last a number that nobody knows
ROOM = (128, 8192)                       # of what `keep` stores


def main(path: str) -> None:
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    topology = topologies.get_topology_desc(platform="tpu", topology_name=job["topology"])
    meshes = {alone: Mesh(np.array(topology.devices[:1 if alone else job["ranks"]]), ("tp",)) for alone in (True, False)}
    kernel: dict = {"__name__": "kernel"}
    exec(compile(job["source"], "kernel.py", "exec"), kernel)
    for piece in job["pieces"]:
        began, mesh = time.perf_counter(), meshes[piece["alone"]]
        try:
            with jax.set_mesh(mesh):
                compile_piece(piece, job, kernel, mesh)
            said = {}
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": piece["name"], "seconds": time.perf_counter() - began, **said}), flush=True)


def keeper(room):
    """keep(*values): stores arrays that a later piece needs, as the compiler would store what is spilled; else it would not make them."""
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas import tpu as pltpu

    def keep(*values):
        at = 0
        for x in jax.tree.leaves(values):
            if not isinstance(x, jax.Array) or type(jax.typeof(x)).__name__ != "ShapedArray" or x.ndim != 2:
                continue
            rows, width = x.shape
            if at + rows > room.shape[0] or width > room.shape[1]:
                raise ValueError(f"no room to keep {rows} x {width} more values beside {at} rows")
            room[at:at + rows, :width] = pltpu.bitcast(x, jnp.float32) if x.dtype.itemsize == 4 else x.astype(jnp.float32)
            at += -(-rows // 8) * 8

    return keep


def stirrer(refs: dict, at, noise):
    """stir(trip): writes a little that is new to every buffer, at a place that the compiler does not know, so that nothing which
    a piece reads stays the same from trip to trip: it would be taken out of the loop."""
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def part(size: int, step: int):
        return pl.ds(pl.multiple_of(at[SPARE - 1] * step, step), step) if size > step else slice(None)

    def stir(trip):
        fresh = noise[...] + trip.astype(jnp.float32)
        for ref in refs.values():
            tile = 32 // ref.dtype.itemsize
            rows, width = min(ref.shape[-2], tile), min(ref.shape[-1], 128)
            x = fresh[:rows, :width] if rows <= 8 else jnp.concatenate([fresh] * (rows // 8))[:, :width]
            x = pltpu.bitcast(x, ref.dtype) if ref.dtype.itemsize == 4 else x.astype(ref.dtype)
            ref[(*[at[SPARE - 1]] * (len(ref.shape) - 2), part(ref.shape[-2], tile), part(ref.shape[-1], 128))] = x

    return stir


def compile_piece(piece: dict, job: dict, kernel: dict, mesh) -> None:
    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import NamedSharding, PartitionSpec as P

    exec(compile(piece["function"], f"{piece['name']}.py", "exec"), kernel)
    run = kernel["piece"]
    places = {n: job["places"][n] for n in piece["uses"]}

    def dtype(name: str):
        return kernel.get(name) or getattr(jnp, name)

    def semaphore(dims: list[int]):
        return pltpu.SemaphoreType.DMA(tuple(dims)) if dims else pltpu.SemaphoreType.DMA

    def shaped(dims, kind: str):
        return jax.ShapeDtypeStruct(tuple(dims), dtype(kind))

    def spaced(space) -> pl.BlockSpec:
        return pl.BlockSpec(memory_space=space)

    spaces = {n: space for n, (space, _, _) in places.items()}
    inputs = [n for n in places if spaces[n] in ("hbm", "table")]
    written = [n for n in places if spaces[n] in ("vmem", "smem")]               # as outputs: what nobody reads would not be written
    local = [n for n in places if spaces[n] == "dma_sem"]
    keeps = [ROOM] if "keep(" in piece["function"] else []

    def body(at, *refs):
        room = refs[len(inputs)] if keeps else None
        noise, *rest = refs[len(inputs) + len(keeps):]
        named = dict(zip((*inputs, *written, *local), (*refs[:len(inputs)], *rest)))
        kernel["keep"], kernel["stir"] = keeper(room), stirrer({n: named[n] for n in written if spaces[n] == "vmem"}, at, noise)
        run(SimpleNamespace(rows=job["rows"], **named), at)

    def on_rank(*arrays):
        params = pltpu.CompilerParams(has_side_effects=True, vmem_limit_bytes=job["vmem"], disable_bounds_checks=True,
                                      collective_id=0 if piece["barrier"] else None)
        return pl.pallas_call(
            body, name=piece["name"], out_shape=[*(shaped(k, "float32") for k in keeps), shaped((8, 128), "float32"), *(shaped(*places[n][1:]) for n in written)],
            in_specs=[spaced(pltpu.SMEM), *(spaced(pltpu.SMEM if spaces[n] == "table" else pltpu.HBM) for n in inputs)],
            out_specs=[spaced(pltpu.VMEM) for _ in (*keeps, "noise")] + [spaced(pltpu.SMEM if spaces[n] == "smem" else pltpu.VMEM) for n in written],
            scratch_shapes=[semaphore(places[n][1]) for n in local], compiler_params=params)(*arrays)

    whole = NamedSharding(mesh, P())
    given = [shaped((SPARE,), "int32"), *(shaped(*places[n][1:]) for n in inputs)]
    given = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=whole) for s in given]
    mapped = jax.shard_map(on_rank, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.jit(mapped, compiler_options={"xla_allow_excess_precision": False}).lower(*given).compile()


if __name__ == "__main__":
    main(*sys.argv[1:])
