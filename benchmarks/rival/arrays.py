"""The arrays of the rival: their shapes over the mesh, and how logical weights are laid out in them.

A rank's part of several matrices that read the same input lies side by side in one array, so that one product makes them all:
XLA then has one launch where the model's file has five.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

AXES = ("ep", "tp")  # the mesh: experts, and columns of an expert; everything else over both
FP8_MAX = 448.0  # of float8_e4m3fn
BLOCK = 256  # rows of an fp8 weight that share a scale
SUBLANES = 8

Get = Callable[..., np.ndarray]  # (name[, expert]) -> logical weight of the layer, float32


@dataclass(frozen=True)
class Leaf:
    """One array: global shape, sharding, dtype ("act": as the activations), and how it is made of logical weights."""

    shape: tuple[int, ...]
    spec: P
    dtype: str
    make: Callable[[Get], np.ndarray]
    reads: str = "all"  # of a step: all | rows (one a token) | experts (those that are chosen)


def dtype_of(name: str, exact: bool):
    return {"act": jnp.float32 if exact else jnp.bfloat16, "f32": jnp.float32, "fp8": jnp.float8_e4m3fn}[name]


def vector(name: str, width: int) -> Leaf:
    """Whole on every rank, float32."""
    return Leaf((width,), P(), "f32", lambda get: get(name))


def even(w: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    """The rank's run of columns."""
    n = w.shape[-1] // ranks
    return w[..., rank * n : (rank + 1) * n]


def whole(w: np.ndarray, rank: int, ranks: int) -> np.ndarray:
    return w


def shared_heads(heads: int):
    """Columns of `heads` heads; with fewer heads than ranks, neighbours hold the same one."""

    def part(w: np.ndarray, rank: int, ranks: int) -> np.ndarray:
        each, mine = w.shape[-1] // heads, max(1, heads // ranks)
        first = rank * heads // ranks
        return w[..., first * each : (first + mine) * each]

    return part


def fused(k: int, ranks: int, parts: list[tuple[str, int, Callable]], dtype: str = "act", lanes: int = 1) -> Leaf:
    """Columns of several matrices [k, n] (taps: k rows) side by side, rank by rank, each rank's filled up with zeros to whole
    `lanes`; parts: (name, a rank's columns, which)."""
    width = -(-sum(n for _, n, _ in parts) // lanes) * lanes

    def make(get: Get) -> np.ndarray:
        ws = [(get(name).reshape(k, -1), n, which) for name, n, which in parts]
        filled = np.zeros((k, width - sum(n for _, n, _ in ws)), np.float32)
        mine = [m for rank in range(ranks) for m in (*(which(w, rank, ranks) for w, _, which in ws), filled)]
        return np.concatenate(mine, axis=1)

    return Leaf((k, ranks * width), P(None, AXES), dtype, make)


def sharded_vector(name: str, width: int) -> Leaf:
    """One number a channel, shared out as the channels are."""
    return Leaf((width,), P(AXES), "f32", lambda get: get(name))


def row_parallel(name: str, k: int, n: int) -> Leaf:
    return Leaf((k, n), P(AXES, None), "act", lambda get: get(name))


# -- experts -------------------------------------------------------------------------------------------------------------


def block_of(rows: int) -> int:
    """Rows that share a scale: the most that divide what a rank has."""
    return max(n for n in range(1, BLOCK + 1) if rows % n == 0)


def expert_leaves(name: str, experts: int, k: int, f: int, gated: bool, tp: int, fp8: bool, padded: bool) -> dict[str, Leaf]:
    """gate | up of a rank's columns side by side, and down; with fp8, scales a block of rows and column (float32), padded to
    whole tiles of 8 blocks a rank."""
    into = [f"{name}.expert_gate"] * gated + [f"{name}.expert_up"]

    def up(get: Get, e: int) -> np.ndarray:
        ws = [get(n, e) for n in into]
        return np.concatenate([even(w, r, tp) for r in range(tp) for w in ws], axis=1)

    def down(get: Get, e: int) -> np.ndarray:
        return get(f"{name}.expert_down", e)

    leaves = {}
    for role, make, rows, columns, spec, local in (
        ("expert_up", up, k, f * len(into), P("ep", None, "tp"), k),
        ("expert_down", down, f, k, P("ep", "tp", None), f // tp),
    ):
        stack = lambda get, make=make: np.stack([make(get, e) for e in range(experts)])
        if not fp8:
            leaves[role] = Leaf((experts, rows, columns), spec, "act", stack, "experts")
            continue
        block = block_of(local)
        parts = rows // local
        scales = -(-(local // block) // SUBLANES) * SUBLANES if padded else local // block

        def code(get, make=make, block=block):
            return np.stack([to_fp8(make(get, e), block)[0] for e in range(experts)])

        def scale(get, make=make, block=block, parts=parts, scales=scales):
            all_ = np.stack([to_fp8(make(get, e), block)[1] for e in range(experts)]).reshape(
                experts, parts, -1, make(get, 0).shape[1]
            )
            filled = np.pad(all_, ((0, 0), (0, 0), (0, scales - all_.shape[2]), (0, 0)))
            return filled.reshape(experts, parts * scales, -1)

        leaves[role] = Leaf((experts, rows, columns), spec, "fp8", code, "experts")
        leaves[f"{role}_scale"] = Leaf((experts, parts * scales, columns), spec, "f32", scale, "experts")
    return leaves


def to_fp8(w: np.ndarray, block: int) -> tuple[np.ndarray, np.ndarray]:
    """[K, N] -> codes (as float32 values) [K, N] and power-of-two scales [K / block, N]. Exact for MXFP4 whose groups in a
    block lie within seven octaves: e4m3 has as many normal exponents to spare."""
    blocks = w.reshape(-1, block, w.shape[1])
    top = np.maximum(np.abs(blocks).max(1), 1e-30)
    scale = np.exp2(np.ceil(np.log2(top / FP8_MAX))).astype(np.float32)
    return (blocks / scale[:, None]).reshape(w.shape).astype(jnp.float8_e4m3fn), scale
