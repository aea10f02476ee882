"""The tape: how every statically known weight lies in HBM as rows of 128 words, block after block, in order of use.

A block's shape depends on matrix, format and sharding only. Two layouts: 'panels' (128 output columns on lanes, K down the
rows) and 'lanes' (K on lanes, columns down the rows), the second for widths that are no multiple of 128.
"""
from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from mkgen.errors import MkgenError
from mkgen.plan.section import PUSHED, Section, depth_unit, tile_cycles
from mkgen.plan.shard import round_up
from mkgen.spec.formats import FORMATS
from mkgen.spec.model import MOST_UNROLL
from mkgen.targets import Target

LANES = 128
ROW_BYTES = 512
COPY_CYCLES = 20                         # of a chunk: its wait, its refill, what is stored
FETCH = 0.25                             # cycles that a bundle of new code is taken to cost: an assumption, nothing is published
MOST_CYCLES = 2048                       # the code of a matrix is no longer, for the same reason, unless one block is


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
    turn: int = 1                        # blocks that a turn of its loop multiplies with in straight-line code

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

    def loops(self, filled: int) -> Iterator[tuple[int, int, int, int]]:
        """(first block, turns, blocks a turn, refills a turn) of the loops over its blocks, of which the first `filled` refill their
        slots: the turns that refill all, the one that refills some, those that refill none; last, the blocks that are left."""
        whole = self.blocks // self.turn
        full, some = divmod(min(filled, whole * self.turn), self.turn)
        part = full + (some > 0)
        for first, last, refills in (0, full, self.turn), (full, part, some), (part, whole, 0):
            if first < last:
                yield first * self.turn, last - first, self.turn, refills
        if left := self.blocks % self.turn:
            yield whole * self.turn, 1, left, max(0, filled - whole * self.turn)


def divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def seconds(m: Matrix, target: Target, rows: int, terms: int) -> tuple[float, float, float]:
    """(copying, multiplying, fetching the code of) the matrix. Copying: bytes and a descriptor a block. A turn of the loop pushes its
    tiles into the MXUs, issues its copies, and waits for its last product; its code is as long as it takes to push."""
    deep, wide = (side // 2 for side in target.mxu_shape)                       # half a tile takes half the time
    tiles = -(-m.block_k // deep) * -(-m.block_n // wide) / 4
    if m.layout == "lanes":                                                     # 16 columns a push, which the MXU turns: twice the cycles
        tiles = -(-m.block_k // deep) / 2 * -(-m.block_n // 16) / 8
    each = target.mxu_push_cycles[PUSHED["bf16"]] if m.format == "bf16" else tile_cycles(m.format, m.group, rows, terms, target)
    push = tiles / target.mxus_per_core * each
    copy = m.blocks * (m.block_rows * ROW_BYTES / target.hbm_bytes_per_s + target.dma_descriptor_s)
    compute = m.blocks * (push + COPY_CYCLES) + -(-m.blocks // m.turn) * target.mxu_drain_cycles
    return copy, compute / target.clock_hz, FETCH * push * (m.turn + m.blocks % m.turn) / target.clock_hz


def plan_matrix(name: str, parts: tuple[Part, ...], k: int, whole: bool, slot_rows: int, target: Target, fmt: str = "bf16",
                group: int = 0, rows: int = 8, terms: int = 1, unroll: int = 1, once: bool = False) -> tuple[Matrix, str]:
    """The layout, block shape and blocks a turn that take least time in all, then fewest bytes, then least time on the MXU; and why,
    in a line.

    k, widths: the rank's own. rows, terms: of the left operand, which decide what a block of groups costs. The shape is chosen for
    any schedule; a turn takes no more than `unroll` blocks. Products with scales of groups go block by block. once: a step runs
    this code once, so of equal time the shortest is taken: all of it has to be compiled and fetched for one run."""
    n = sum(p.width for p in parts)
    found: list[tuple[tuple[float, int, float], Matrix]] = []

    def offer(layout: str, k_padded: int, n_padded: int, block_k: int, block_n: int) -> None:
        one = Matrix(name, parts, layout, k, n, k_padded, n_padded, block_k, block_n, whole, fmt, group)
        if one.block_rows > slot_rows or one.block_rows % 8:
            return
        for turn in range(1, 1 + (1 if group else min(one.blocks, MOST_UNROLL))):
            m = replace(one, turn=turn)
            copy, compute, fetch = seconds(m, target, rows, terms)
            if turn == 1 or fetch * target.clock_hz <= FETCH * MOST_CYCLES:
                found.append(((round(max(copy, compute) * 1e9), m.rows, compute + fetch), m))

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
    shape = replace(found[0][1], turn=1)                    # for any number: packed weights do not depend on the schedule
    fit = [f for f in found if f[1].turn <= unroll]
    turns = [f for f in fit if replace(f[1], turn=1) == shape]
    best = min(turns, key=lambda f: (f[0][:2], f[1].turn)) if once else turns[0]
    return best[1], reason([best, *(f for f in fit if f is not best)], lambda m: seconds(m, target, rows, terms))


def reason(found: list[tuple[tuple[float, int, float], Matrix]], seconds: Callable[[Matrix], tuple[float, float, float]]) -> str:
    """The choice in a line: its time, what bounds it, and the best of another layout, block shape or number of blocks a turn."""
    def told(m: Matrix) -> str:
        stored, turn = "" if m.format == "bf16" else f"{m.format}, ", f" {m.turn} a turn," if m.turn > 1 else ""
        copy, compute, _ = seconds(m)
        bound = f"HBM, MXU {compute * 1e6:.2f}" if copy >= compute else f"MXU, HBM {copy * 1e6:.2f}"
        return f"{stored}{m.layout}, {m.blocks} x [{m.block_k}, {m.block_n}],{turn} {max(copy, compute) * 1e6:.2f} us ({bound})"

    m = found[0][1]
    wasted = 1 - m.true_bytes / (m.rows * ROW_BYTES)
    waste = f"; {100 * wasted:.0f} % of its bytes are padding" if m.format != "bf16" and wasted > 0.05 else ""
    return f"{told(m)}{waste}" + (f"; next: {told(found[1][1])}" if len(found) > 1 else "")


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
