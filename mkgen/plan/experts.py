"""The expert image: one routed expert of a rank (gate, up, down, and their scales) as one run of u32 rows."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.shard import round_up
from mkgen.plan.tape import LANES, ROW_BYTES

BLOCK_WEIGHTS = 3 * 2 ** 20            # enough to hide the drain of a dot behind the next one, little enough code
GROUP = 32                               # K rows that share one scale
CODES = {"bf16": (2, 16, 1), "mxfp4": (8, GROUP, GROUP)}    # values a word; K is padded to; a rank's share is a multiple of


@dataclass(frozen=True)
class Section:
    """One matrix [k, 128 panels] of the expert: its codes from row `at`, its scales (if any) from row `scales_at`."""
    at: int
    k: int
    panels: int
    panel_rows: int
    scales_at: int
    scale_rows: int                      # a panel

    @property
    def wide(self) -> int:
        """Panels in one basic block: the most that divide evenly and hold at most BLOCK_WEIGHTS."""
        most = max(1, BLOCK_WEIGHTS // (self.k * LANES))
        return max(n for n in range(1, self.panels + 1) if self.panels % n == 0 and n <= most)


@dataclass(frozen=True)
class ExpertImage:
    """gate | up [k, 2 width_padded], then down [width_k, out_padded]; sections padded to 8 rows.

    u32[layers * local_experts, rows, 128] a rank: expert e of layer l on ranks of its group is l * local_experts + e - first."""
    format: str
    layers: int
    experts: int
    local_experts: int                   # room on a rank: the last ranks may have no expert for it
    tensor_parallel: int
    k: int
    whole_width: int                     # hidden width of the expert
    width: int                           # of it, room on a rank
    out: int
    up: Section
    down: Section
    rows: int
    weights: tuple[str, str, str]        # gate, up, down

    @property
    def width_padded(self) -> int:
        return round_up(self.width, LANES)

    @property
    def bytes(self) -> int:
        return self.layers * self.local_experts * self.rows * ROW_BYTES

    @property
    def true_bytes(self) -> int:
        """Of one expert: codes and scales, no padding; the mean over the ranks that share it."""
        weights = (self.k * 2 + self.out) * self.whole_width // self.tensor_parallel
        return weights * 2 if self.format == "bf16" else weights // 2 + weights // GROUP


def plan_experts(fmt: str, layers: int, experts: int, expert_parallel: int, tensor_parallel: int, k: int, width: int, out: int,
                 weights: tuple[str, str, str]) -> ExpertImage:
    """The image of a kind of routed experts; k, out: whole widths; width: the whole hidden width of one expert."""
    per_word, unit, share = CODES[fmt]
    local = width if tensor_parallel == 1 else round_up(-(-width // tensor_parallel), share)     # no group lies on two ranks
    row = 0
    sections = []
    for depth, panels in ((round_up(k, unit), 2 * round_up(local, LANES) // LANES), (round_up(local, unit), round_up(out, LANES) // LANES)):
        at, row = row, round_up(row + panels * depth // per_word, 8)
        scale_rows, scales_at = 0, row
        if fmt == "mxfp4":
            scale_rows = -(-depth // (4 * GROUP))
            row = round_up(row + panels * scale_rows, 8)
        sections.append(Section(at, depth, panels, depth // per_word, scales_at, scale_rows))
    return ExpertImage(fmt, layers, experts, -(-experts // expert_parallel), tensor_parallel, k, width, local, out, *sections,
                       row, weights)
