"""How a matrix, or a block of one, lies in u32 rows of 128 lanes: codes, then what scales them; and how it is multiplied.

Each part is stored panel after panel (128 columns on the lanes, K down the rows), padded to 8 rows as a whole:
codes [k bits / 32 rows a panel], scales [one a group of K], zero points [likewise, signed bytes], a scale a column [1 row].
"""
from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from mkgen.plan.shard import round_up
from mkgen.spec.formats import FORMATS, SCALE_BYTES, ZERO_BYTES, Format
from mkgen.targets import Target

LANES, SUBLANES, WORD = 128, 8, 4
DEPTH = 256                              # K of one block-diagonal dot: the depth of the MXU
LEAST_GROUP = 16                         # finer groups would take more rows of the left operand than the MXU hides
BLOCK_WEIGHTS = 3 * 2 ** 20              # enough to hide the drain of a dot behind the next one, little enough code
PUSHED = {"bf16": "bf16", "int8": "int8", "e4m3": "fp8", "int4": "int4", "e2m1": "fp4"}      # a target's name of a code


@dataclass(frozen=True)
class Section:
    """One matrix [k, 128 panels], its codes from row `at`. group: weights along K that a scale serves as stored here (finer
    than the format's own, where a rank's share of K cuts a group); 0: a scale a column, or none. parts: of K, which lie side by side,
    `span` columns each; k is that of a part."""
    format: str
    group: int
    at: int
    k: int
    panels: int
    parts: int = 1
    span: int = 0

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    @property
    def per_word(self) -> int:
        return 8 * WORD // self.kind.bits

    @property
    def panel_rows(self) -> int:
        """u32 rows of a panel's codes."""
        return self.k // self.per_word

    @property
    def groups(self) -> int:
        return -(-self.k // self.group) if self.group else 0

    @property
    def scale_rows(self) -> int:
        """u32 rows of a panel's scales."""
        return -(-self.groups * SCALE_BYTES[self.kind.scale] // WORD) if self.group else 0

    @property
    def zero_rows(self) -> int:
        return -(-self.groups * ZERO_BYTES // WORD) if self.kind.zero else 0

    @property
    def column_rows(self) -> int:
        """u32 rows of a panel's scale a column; a scale of the whole tensor is one."""
        return int(self.kind.column or self.kind.tensor_scale)

    @property
    def scales_at(self) -> int:
        return round_up(self.at + self.panels * self.panel_rows, SUBLANES)

    @property
    def zeros_at(self) -> int:
        return round_up(self.scales_at + self.panels * self.scale_rows, SUBLANES)

    @property
    def columns_at(self) -> int:
        return round_up(self.zeros_at + self.panels * self.zero_rows, SUBLANES)

    @property
    def end(self) -> int:
        return round_up(self.columns_at + self.panels * self.column_rows, SUBLANES)

    @property
    def wide(self) -> int:
        """Panels in one basic block: the most that divide evenly and hold at most BLOCK_WEIGHTS."""
        most = max(1, BLOCK_WEIGHTS // (self.k * LANES))
        return max(n for n in range(1, self.panels + 1) if self.panels % n == 0 and n <= most)


def depth_unit(fmt: str) -> int:
    """K of a panel on the tape is a multiple of this: whole tiles of 8 u32 rows."""
    return SUBLANES * 8 * WORD // FORMATS[fmt].bits


def stored_group(fmt: str, starts: list[int]) -> int:
    """The group that a rank stores, where the ranks' shares of K begin at `starts`: the format's own, or a divisor."""
    own = FORMATS[fmt].group
    return gcd(own, *starts) if own else 0


# -- the ways to multiply by groups ----------------------------------------------------------------------------------
#
# Scales of groups are taken out of the dot by a block-diagonal left operand: a row keeps one group of K, so a dot over DEPTH
# gives each group's sum by itself. Rows stand group after group (every group has the 8 padded rows of the batch), or row after
# row (only true rows are multiplied, and scales meet sums without a broadcast). Past some rows the left operand takes longer
# than the weights: then codes times scales become bf16 first, where that is exact.

ROWS_PADDED = 8
WIDENED = ("nvfp4",)                     # e2m1 x e4m3 has 6 significant bits; widening mxfp4 gains nothing that was measured


def few_rows(fmt: str, group: int, terms: int) -> int:
    """The most decode rows that are multiplied row after row. terms: bf16 terms of an activation.

    From benchmarks/formats.py: up to 32 expanded rows a 256-deep tile both orders cost the same, and the group-wise one is
    simpler; else row-wise costs its own rows, group-wise 8 rows, widening as much as 96 expanded rows."""
    groups = DEPTH // group if group else 0
    if groups < 8:                       # a group's rows would not fill sublanes
        return 0
    if fmt in WIDENED:
        return min(ROWS_PADDED, 96 // (groups * terms))
    if FORMATS[fmt].zero:
        return ROWS_PADDED               # the sums of x enter without a broadcast
    return 4 if terms == 1 else 6


def expert_rows(fmt: str, group: int, terms: int, lone: bool) -> int:
    """`few_rows` of an expert. lone: one that one row chose is multiplied for that row alone; then all rows are few, if that takes an
    MXU no longer than a push of bf16, so that a row's numbers are the same whether it was alone."""
    few = few_rows(fmt, group, terms)
    return ROWS_PADDED if lone and few and ROWS_PADDED * terms * DEPTH // group <= 128 else few


def widens(fmt: str, group: int) -> bool:
    """Beyond the few rows: are codes times scales made bf16 in front of the dot?"""
    return fmt in WIDENED


def left_rows(fmt: str, group: int, rows: int, terms: int, few: int | None = None) -> int:
    """Rows of the left operand of one dot, for a variant of `rows` decode rows; few: those that go row after row, if not `few_rows`."""
    groups = DEPTH // group
    if rows <= (few_rows(fmt, group, terms) if few is None else few):
        return rows * terms * groups
    return ROWS_PADDED * terms * (1 if widens(fmt, group) else groups)


def tile_cycles(fmt: str, group: int, rows: int, terms: int, target: Target) -> float:
    """Of one MXU tile: its push, or the rows of the left operand, whichever takes longer."""
    code = FORMATS[fmt].code
    if not group:
        return max(target.mxu_push_cycles[PUSHED[code]], -(-ROWS_PADDED * terms // 16) * target.mxu_rows_cycles)
    wide = widens(fmt, group) and rows > few_rows(fmt, group, terms)
    push = target.mxu_push_cycles["bf16" if wide else PUSHED[code]]
    return max(push, -(-left_rows(fmt, group, rows, terms) // 16) * target.mxu_rows_cycles)
