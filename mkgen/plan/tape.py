"""The tape: how every statically known weight lies in HBM as rows of 128 words, block after block, in order of use.

A block's shape depends on matrix, format and sharding only. Two layouts: 'panels' (128 output columns on lanes, K down the
rows) and 'lanes' (K on lanes, columns down the rows), the second for widths that are no multiple of 128.
"""
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from mkgen.errors import MkgenError
from mkgen.plan.section import PUSHED, Section, depth_unit, tile_cycles
from mkgen.plan.shard import round_up
from mkgen.spec.formats import FORMATS
from mkgen.targets import Target

LANES = 128
ROW_BYTES = 512


@dataclass(frozen=True)
class Part:
    """One weight family inside a matrix: its local width (the columns it fills)."""
    weight: str
    width: int


@dataclass(frozen=True)
class Matrix:
    """The rank's [k, n] of one or several families side by side, cut into k_blocks x n_blocks blocks of one shape."""
    name: str
    parts: tuple[Part, ...]
    layout: str                          # panels | lanes
    k: int
    n: int
    k_padded: int
    n_padded: int
    block_k: int
    block_n: int
    whole: bool                          # every rank holds all of it
    format: str = "bf16"
    group: int = 0                       # of K, that share a scale as stored; 0: columns do, or there is none
    at_once: bool = False                # read part by part: its numbers are needed themselves, not only products with it
    over: int = 0                        # neighbours that it is cut over; the other groups of as many hold copies. 0: all ranks

    @property
    def section(self) -> Section:
        """A block of panels, from its first row on."""
        return Section(self.format, self.group, 0, self.block_k, self.block_n // LANES)

    @property
    def code_rows(self) -> int:
        """u32 rows of a block's codes."""
        return self.block_k * self.block_n * FORMATS[self.format].bits // (32 * LANES)

    @property
    def k_blocks(self) -> int:
        return self.k_padded // self.block_k

    @property
    def n_blocks(self) -> int:
        return self.n_padded // self.block_n

    @property
    def blocks(self) -> int:
        return self.k_blocks * self.n_blocks

    @property
    def block_rows(self) -> int:
        """u32 rows of one block, with its scales."""
        if self.layout == "panels":
            return self.section.end
        columns = -(-self.block_n // LANES) if FORMATS[self.format].column else 0
        return round_up(self.code_rows + columns, 8) if columns else self.code_rows

    @property
    def rows(self) -> int:
        return self.blocks * self.block_rows

    @property
    def true_bytes(self) -> int:
        return FORMATS[self.format].true_bytes(self.k, self.n)


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def block_seconds(m: Matrix, target: Target, rows: int, terms: int) -> tuple[float, float]:
    """(copying, computing) one block: bytes and one descriptor; MXU tiles, pushed whole, and the drain of a dot."""
    deep, wide = target.mxu_shape
    tiles = -(-m.block_k // deep) * -(-m.block_n // wide)
    each = target.mxu_push_cycles[PUSHED["bf16"]] if m.format == "bf16" else tile_cycles(m.format, m.group, rows, terms, target)
    cycles = -(-tiles // target.mxus_per_core) * each + target.mxu_drain_cycles
    return m.block_rows * ROW_BYTES / target.hbm_bytes_per_s + target.dma_descriptor_s, cycles / target.clock_hz


def plan_matrix(name: str, parts: tuple[Part, ...], k: int, whole: bool, slot_rows: int, target: Target, fmt: str = "bf16",
                group: int = 0, rows: int = 8, terms: int = 1) -> tuple[Matrix, str]:
    """The layout and block shape whose blocks take least time in all, then fewest bytes, then least time on the MXU; and why, in
    a line.

    k, widths: the rank's own. rows, terms: of the left operand, which decide what a block of groups costs."""
    n = sum(p.width for p in parts)
    found: list[tuple[tuple[float, int, float], Matrix]] = []

    def offer(layout: str, k_padded: int, n_padded: int, block_k: int, block_n: int) -> None:
        m = Matrix(name, parts, layout, k, n, k_padded, n_padded, block_k, block_n, whole, fmt, group)
        if m.block_rows <= slot_rows and m.block_rows % 8 == 0:
            copy, compute = block_seconds(m, target, rows, terms)
            found.append(((round(m.blocks * max(copy, compute) * 1e9), m.rows, m.blocks * compute), m))

    k_whole = round_up(k, depth_unit(fmt))
    # a part of K is read from the activations at a multiple of 128 lanes (of a whole dot of groups), and never beyond their width
    unit = 2 * LANES if group else LANES
    k_cuts = [k_whole] + [k // d for d in divisors(max(k // LANES, 1)) if d > 1 and k % (unit * d) == 0]
    panels = round_up(n, LANES) // LANES
    for extra in range(0, min(max(1, panels // 32), 64) + 1):
        for wide in divisors(panels + extra):
            for block_k in k_cuts:
                offer("panels", k_whole, (panels + extra) * LANES, block_k, wide * LANES)
    if n % LANES and not group:
        k_whole, n_whole = round_up(k, LANES), round_up(n, 256 // FORMATS[fmt].bits)
        for cut in divisors(k // LANES) if k == k_whole else [1]:
            offer("lanes", k_whole, n_whole, k_whole // cut, n_whole)
    if not found:
        raise MkgenError(f"{name}: no block of [{k}, {n}] fits into build.block_kib = {slot_rows // 2}\n"
                         f"  why: a ring slot holds a whole block, at least 128 columns of a part of K\n  fix: raise build.block_kib")
    found.sort(key=lambda f: f[0])
    return found[0][1], reason(found, lambda m: block_seconds(m, target, rows, terms))


def reason(found: list[tuple[tuple[float, int, float], Matrix]], seconds: Callable[[Matrix], tuple[float, float]]) -> str:
    """The choice in a line: its time, what bounds it, and the best of another layout or block shape."""
    def told(cost: tuple[float, int, float], m: Matrix) -> str:
        stored = "" if m.format == "bf16" else f"{m.format}, "
        return f"{stored}{m.layout}, {m.blocks} x [{m.block_k}, {m.block_n}], {cost[0] / 1e3:.2f} us"

    (cost, m), copy = found[0], seconds(found[0][1])
    bound = "HBM" if copy[0] >= copy[1] else "MXU"
    wasted = 1 - m.true_bytes / (m.rows * ROW_BYTES)
    waste = f"; {100 * wasted:.0f} % of its bytes are padding" if m.format != "bf16" and wasted > 0.05 else ""
    return f"{told(cost, m)} ({bound}){waste}" + (f"; next: {told(*found[1])}" if len(found) > 1 else "")


@dataclass(frozen=True)
class Entry:
    """What lies at `row` of a chunk: a block of a matrix (`block` counts n outer, k inner), or a vector's rows."""
    name: str
    row: int
    rows: int
    block: int | None = None


@dataclass(frozen=True)
class Chunk:
    """A run of whole blocks that is copied at once."""
    entries: tuple[Entry, ...]

    @property
    def rows(self) -> int:
        return sum(e.rows for e in self.entries)


@dataclass(frozen=True)
class Vector:
    """A family stored as rows of 128 lanes, each of `lines` rows padded to whole lanes; all padded to 8 u32 rows."""
    name: str
    weights: tuple[str, ...]
    lines: int
    width: int                           # local elements a line
    dtype: str
    whole: bool

    @property
    def lane_rows(self) -> int:
        return self.lines * (-(-self.width // LANES))

    @property
    def rows(self) -> int:
        return round_up(self.lane_rows if self.dtype == "f32" else -(-self.lane_rows // 2), 8)

    @property
    def true_bytes(self) -> int:
        return self.lines * self.width * (4 if self.dtype == "f32" else 2)
