"""A sequence's states between their two forms: the logical arrays of the reference, and each rank's arrays in
HBM.

Logical: [layers of the kind, rows, (context,) *shape], float32. On a rank: as `plan.buffers` says, heads shared
out, tokens two to a word, features in blocks of 128. What no active token has written is NaN there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from ml_dtypes import bfloat16

from mkgen.graph.ir import Op
from mkgen.graph.ops.gqa_attention import KvGroups
from mkgen.graph.ops.recurrence import SUBLANES, side_by_side
from mkgen.plan.plan import Plan
from mkgen.plan.shard import local_units, unit_range
from mkgen.plan.tape import LANES

NAN_WORD = 0xFFFFFFFF  # two bf16 NaNs


@dataclass(frozen=True)
class Layout:
    """Of one state. `local`: which of the last axes' logical features a rank holds, as an index array for each
    place (-1: none).
    """

    name: str
    op: Op
    shape: tuple[int, ...]  # of the rank's array, [layers, ...]
    positional: bool
    local: Callable[[int], np.ndarray]  # rank -> flat logical feature of each local feature


def layouts(plan: Plan, rows: int) -> list[Layout]:
    """All states of the plan, for a variant of `rows` rows; `name` is the graph's."""
    out = []
    for sub in plan.graph.sublayers():
        for op in sub.ops:
            for s in op.states():
                shape = tuple(plan.buffers[plan.states[s.name]].dims(rows))
                out.append(Layout(s.name, op, shape, s.positional, _LOCAL[op.kind](op, plan.mesh.ranks)))
    return out


def to_kernel(layout: Layout, logical: np.ndarray, written: list[int], rank: int) -> np.ndarray:
    """logical [layers, rows, ...] -> the rank's array, f32 or u32. written: tokens that row has seen (0: all
    NaN).
    """
    local = layout.local(rank)
    layers, rows = logical.shape[:2]
    if not layout.positional:
        x = np.where(local >= 0, logical.reshape(layers, rows, -1)[:, :, local], 0.0)
        for row, count in enumerate(written):
            if count == 0:
                x[:, row] = np.nan
        return _from_rows(layout, x)
    bits = np.full((layers, rows, logical.shape[2], local.size), 0xFFFF, np.uint16)
    values = logical.reshape(layers, rows, logical.shape[2], -1)[..., np.maximum(local, 0)]
    values = np.where(local >= 0, values, 0.0).astype(np.float32).astype(bfloat16).view(np.uint16)
    for row, count in enumerate(written):
        bits[:, row, :count] = values[:, row, :count]
    # [layers, rows, context, blocks 128] -> [layers, rows, blocks, context / 2, 128], even tokens low
    pairs = bits.reshape(layers, rows, -1, 2, local.size // LANES, LANES).transpose(0, 1, 4, 2, 5, 3)
    return np.ascontiguousarray(pairs).view(np.uint32)[..., 0]


def to_logical(layout: Layout, arrays: list[np.ndarray], logical_shape: tuple[int, ...]) -> tuple[np.ndarray, bool]:
    """Each rank's array -> ([layers, rows, ...] float32, whether ranks that hold the same features hold the
    same bits).
    """
    out, same = None, True
    for rank, array in enumerate(arrays):
        local = layout.local(rank)
        if layout.positional:
            halves = np.ascontiguousarray(array)[..., None].view(np.uint16)  # [L, R, blocks, T / 2, 128, 2]
            x = halves.transpose(0, 1, 3, 5, 2, 4).reshape(*array.shape[:2], -1, local.size)
            x = np.ascontiguousarray(x).view(bfloat16).astype(np.float32)
        else:
            x = _to_rows(layout, array, logical_shape[1])
        if out is None:
            flat = (*x.shape[:-1], int(np.prod(logical_shape)) // int(np.prod(x.shape[:-1])))
            out, seen = np.zeros(flat, np.float32), np.zeros(flat[-1], bool)
        held = local >= 0
        at = local[held]
        again = seen[at]
        same &= np.array_equal(out[..., at[again]].view(np.uint32), x[..., held][..., again].view(np.uint32))
        out[..., at] = x[..., held]
        seen[at] = True
    return out.reshape(logical_shape), bool(same)


def _from_rows(layout: Layout, x: np.ndarray) -> np.ndarray:
    """x [layers, rows, local features] -> the rank's own order of axes, rows padded with NaN."""
    if layout.op.kind == "short_conv":  # [layers, taps - 1, 8, width]
        layers, taps, _, width = layout.shape
        out = np.full(layout.shape, np.nan, np.float32)
        out[:, :, : x.shape[1]] = x.reshape(layers, x.shape[1], taps, width).swapaxes(1, 2)
        return out
    return np.ascontiguousarray(x.reshape(layout.shape), np.float32)


def _to_rows(layout: Layout, array: np.ndarray, rows: int) -> np.ndarray:
    if layout.op.kind == "short_conv":
        array = np.ascontiguousarray(array[:, :, :rows].swapaxes(1, 2))
    return array.reshape(array.shape[0], rows, -1)


# -- which features a rank holds -------------------------------------------------------------------------------


def _blocks(width: int) -> int:
    return -(-width // LANES) * LANES


def _gqa(op, ranks: int) -> Callable[[int], np.ndarray]:
    """Run by run of local KV heads: their keys, then their values, padded to whole blocks."""
    heads, kv_heads = (local_units(n, ranks, op.kv_heads) for n in (op.heads, op.kv_heads))
    groups = KvGroups(heads, kv_heads, op.head_dim, op.value_dim)
    lanes, both = groups.lanes(), op.head_dim + op.value_dim

    def local(rank: int) -> np.ndarray:
        first, last = unit_range(op.kv_heads, ranks, rank, op.kv_heads)
        feature = np.full((kv_heads, both), -1)
        feature[: last - first] = np.arange(first * both, last * both).reshape(-1, both)
        out = np.full((lanes.groups, lanes.blocks * LANES), -1)
        for run, own in zip(out, np.split(feature, lanes.groups)):
            line = np.concatenate([own[:, : op.head_dim].reshape(-1), own[:, op.head_dim :].reshape(-1)])
            run[: line.size] = line
        return out.reshape(-1)

    return local


def _mla(op, ranks: int) -> Callable[[int], np.ndarray]:
    """latent | key, whole on every rank."""
    width = op.kv_rank + op.rope_dim
    out = np.full(_blocks(width), -1)
    out[:width] = np.arange(width)
    return lambda rank: out


def _units(units: int, size: int, groups: int, ranks: int, rank: int) -> np.ndarray:
    """Features of a rank's units of `size` features each; -1 in padded ones."""
    first, last = unit_range(units, ranks, rank, groups)
    out = np.full(local_units(units, ranks, groups) * size, -1)
    out[: (last - first) * size] = np.arange(first * size, last * size)
    return out


def _window(op, ranks: int) -> Callable[[int], np.ndarray]:
    """Tap by tap, the local heads of each input side by side."""

    def local(rank: int) -> np.ndarray:
        at, columns = 0, []
        for x in op.xs:
            here = _units(x.units, x.width // x.units, x.groups, ranks, rank)
            columns.append(np.where(here >= 0, at + here, -1))
            at += x.width
        columns = np.concatenate(columns)
        taps = np.arange(op.taps - 1)[:, None]
        return np.where(columns >= 0, taps * at + columns, -1).reshape(-1)

    return local


def _matrix(op, ranks: int) -> Callable[[int], np.ndarray]:
    """Block by block [key, value] of the local heads, value heads side by side, both padded."""
    m = op.mixer
    key_heads = m.key_heads or m.heads
    keys = local_units(key_heads, ranks, key_heads)
    together = side_by_side(keys, local_units(m.heads, ranks, key_heads) // keys * m.value_dim)
    feature = np.arange(m.heads * m.key_dim * m.value_dim).reshape(m.heads, m.key_dim, m.value_dim)

    def local(rank: int) -> np.ndarray:
        mine = _units(m.heads, 1, key_heads, ranks, rank).reshape(keys, -1)
        features = np.where(mine[..., None, None] >= 0, feature[mine], -1)                        # [keys, share, key, value]
        blocks = features.reshape(keys // together, -1, m.key_dim, m.value_dim).swapaxes(1, 2).reshape(keys // together, m.key_dim, -1)
        pads = [(0, -n % to) for n, to in zip(blocks.shape[1:], (SUBLANES, LANES))]
        return np.pad(blocks, ((0, 0), *pads), constant_values=-1).reshape(-1)

    return local


_LOCAL = {"gqa_attention": _gqa, "mla_attention": _mla, "short_conv": _window, "recurrence": _matrix}
