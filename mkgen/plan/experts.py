"""The expert image: one routed expert of a rank (gate, up, down, and their scales) as one run of u32 rows."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.errors import MkgenError
from mkgen.plan.section import DEPTH, Section, stored_group
from mkgen.plan.shard import round_up
from mkgen.plan.tape import LANES, ROW_BYTES
from mkgen.spec.formats import FORMATS

SHARE = 32                               # K of codes in sections: 4 or 8 whole u32 rows
STRAIGHT_WEIGHTS = 8 * 2 ** 20          # of an expert whose dots may all be one basic block: some four thousand bundles
OPERAND = "experts"                      # of the kernel; with the kind's name behind it, where there are several


@dataclass(frozen=True)
class ExpertImage:
    """gate | up [k / fold, 2 width_padded] (up alone, where experts are not gated), then down [width_k, out_padded], then their biases as
    rows of 128 f32, a row a panel; sections padded to 8 rows. joint: gate's columns end where up's begin, [k / fold, fold 2 width].

    An expert that is too large for a slot is cut along its hidden width into `pieces`, each an expert of its own whose outputs add up.

    One image a kind of routed experts: u32[layers * local_experts * pieces, rows, 128] a rank; piece p of expert e of the kind's l-th
    layer on ranks of its group is (l * local_experts + e - first) * pieces + p."""
    name: str                            # of the operand
    kind: str                            # the sub-layer that runs them
    format: str
    layers: int
    experts: int
    local_experts: int                   # room on a rank: the last ranks may have no expert for it
    tensor_parallel: int
    k: int
    whole_width: int                     # hidden width of the expert
    width: int                           # of it, room in a piece on a rank
    out: int
    up: Section
    down: Section
    rows: int
    weights: tuple[str, ...]             # gate (if gated), up, down
    biases: tuple[str, ...] = ()         # of the same, if they have any
    bias_at: int = 0
    pieces: int = 1
    fold: int = 1                        # parts of K that lie side by side in a panel's columns, of gate and up; see `folds`
    joint: bool = False                  # these parts are of gate and up together; see `joins`

    @property
    def width_padded(self) -> int:
        """Columns of each of gate and up, with those of all parts of K."""
        return round_up(self.fold * self.width, LANES)

    @property
    def suffix(self) -> str:
        """Behind the names of what belongs to this kind only; empty where there is no other."""
        return self.name.removeprefix(OPERAND)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the rank's array."""
        return (self.layers * self.local_experts * self.pieces, self.rows, LANES)

    @property
    def gated(self) -> bool:
        return len(self.weights) == 3

    @property
    def bytes(self) -> int:
        return self.layers * self.local_experts * self.expert_bytes

    @property
    def expert_bytes(self) -> int:
        """Of one expert of a rank, all pieces, with padding."""
        return self.pieces * self.rows * ROW_BYTES

    @property
    def straight(self) -> bool:
        """Are all its products one basic block? The compiler keeps the order of dots, and hides a drain behind the next of them."""
        return (self.up.panels * self.up.k + self.down.panels * self.down.k) * LANES <= STRAIGHT_WEIGHTS

    @property
    def up_runs(self) -> str:
        """Source text of the panels of gate and up in the order of their dots: those that make a whole left operand of down together,
        so that phi of the first runs while the next are multiplied. A loop's number of panels a trip where the code would be too long.

        A dot over all of K adds up in the MXU that has its columns, 256 of them: gate goes through one and up through the other.
        Where groups have scales a dot is no deeper than the MXU, and either takes the next."""
        if not self.straight:
            return str(self.up.wide)
        if self.joint:
            return f"(range({self.up.panels}),)"
        inner = self.width_padded // LANES
        most = inner if self.fold > 1 else DEPTH // LANES
        parts = [range(at, min(at + most, inner)) for at in range(0, inner, most)]
        matrices = range(0, self.up.panels, inner)
        if self.up.group:
            runs = [[first + p for first in matrices for p in part] for part in parts]
        elif self.gated:
            runs = [[first + p for p in part] for part in parts for first in matrices]
        else:
            runs = [[p] for p in range(inner)]
        return str(tuple(map(tuple, runs)))

    @property
    def down_runs(self) -> str:
        return f"(range({self.down.panels}),)" if self.straight else str(self.down.wide)

    def slot(self, index: int, expert: int, piece: int) -> int:
        """Where a piece of `expert` of the kind's index-th layer lies in the array of the ranks that hold it."""
        return (index * self.local_experts + expert % self.local_experts) * self.pieces + piece

    @property
    def true_bytes(self) -> int:
        """Of one expert: codes, scales and biases, no padding; the mean over the ranks that share it."""
        inner = len(self.weights) - 1
        width, f = self.whole_width, FORMATS[self.format]
        weights = inner * f.true_bytes(self.k, width) + f.true_bytes(width, self.out)
        biases = 4 * (inner * width + self.out) if self.biases else 0
        return (weights + biases) // self.tensor_parallel

    def place(self, which: int) -> tuple[Section, int, int]:
        """Where the which-th of `weights` lies: its section, its first column there, its columns with those of all parts of K."""
        inner = len(self.weights) - 1
        if which == inner:
            return self.down, 0, self.down.panels * LANES
        return self.up, which * self.beside, self.fold * self.up.span if self.joint else self.beside

    @property
    def beside(self) -> int:
        """Columns from gate to up, in one part of K where they are joint."""
        return self.width if self.joint else self.width_padded

    @property
    def step(self) -> int:
        """Columns from one part of K to the next."""
        return self.up.span if self.joint else self.width

    def bias_row(self, which: int) -> int:
        """The row where the which-th bias begins: one row for each panel of its matrix."""
        section, first, _ = self.place(which)
        return self.bias_at + first // LANES + (self.up.panels if section is self.down else 0)


def plan_experts(name: str, kind: str, fmt: str, layers: int, experts: int, expert_parallel: int, tensor_parallel: int, k: int,
                 width: int, out: int, weights: tuple[str, ...], biases: tuple[str, ...] = (), most_bytes: int = 2 ** 40) -> ExpertImage:
    """The image of a kind of routed experts; k, out: whole widths; width: the whole hidden width of one expert; most_bytes: of a piece.

    Of the numbers of pieces that are small enough, up to twice the least one, that which pads least, of equal ones that without `fold`."""
    def image(pieces: int) -> ExpertImage:
        return cut_experts(name, kind, fmt, layers, experts, expert_parallel, tensor_parallel, pieces, k, width, out, weights, biases)

    least = next((p for p in range(1, width + 1) if image(p).rows * ROW_BYTES <= most_bytes), None)
    if least is None:
        size = image(width).rows * ROW_BYTES
        raise MkgenError(f"an expert of {kind} cannot be cut into pieces of build.expert_kib = {most_bytes // 1024}\n  why: 128 columns of its matrices "
                         f"take {-(-size // 1024)} KiB\n  fix: write build.expert_kib: {-(-size // 1024)} or more")
    return image(1) if least == 1 else min(map(image, range(least, 2 * least + 1)), key=lambda i: (i.expert_bytes, i.fold))


def cut_experts(name: str, kind: str, fmt: str, layers: int, experts: int, expert_parallel: int, tensor_parallel: int, pieces: int, k: int,
                width: int, out: int, weights: tuple[str, ...], biases: tuple[str, ...]) -> ExpertImage:
    """The image with that many pieces."""
    f, shares, inner = FORMATS[fmt], tensor_parallel * pieces, len(weights) - 1
    share = min(f.group, SHARE) or 1                     # the width of a piece is a multiple of it: no scale lies in two pieces
    local = width if shares == 1 else round_up(-(-width // shares), share)
    unit = 16 if fmt == "bf16" else SHARE
    joined = 0 if biases else joins(fmt, k, local, inner)
    fold = joined or (1 if biases else folds(fmt, k, local))
    panels = joined * inner * local // LANES or inner * round_up(fold * local, LANES) // LANES
    up = Section(fmt, f.group, 0, round_up(k, unit) // fold, panels, joined or 1, inner * local if joined else 0)
    cut = stored_group(fmt, [part * local for part in range(shares)])
    down = Section(fmt, cut, up.end, round_up(local, unit), round_up(out, LANES) // LANES)
    row = down.end
    bias_at, bias_rows = (row, up.panels + down.panels) if biases else (0, 0)
    return ExpertImage(name, kind, fmt, layers, experts, -(-experts // expert_parallel), tensor_parallel, k, width, local, out,
                       up, down, round_up(row + bias_rows, 8), weights, biases, bias_at, pieces, fold, joined > 0)


def folds(fmt: str, k: int, width: int) -> int:
    """Parts of K that fill up the panels of a matrix [k, width] without scales: 96 columns leave a quarter of a panel empty, a
    quarter of K beside the others none. The left operand has the parts of x in rows of their own, which the MXU takes for free."""
    if FORMATS[fmt].code != "bf16" or width % LANES == 0:
        return 1
    return next((parts for parts in (2, 4) if parts * width % LANES == 0 and k % (parts * LANES) == 0), 1)


def joins(fmt: str, k: int, width: int, matrices: int) -> int:
    """Parts of K with which gate and up [k, width], side by side, fill whole panels, where they have scales of groups and no zero points;
    0: they do not, or each does by itself. A part is whole dots, so that the left operand has those of one part behind those of another."""
    if not FORMATS[fmt].group or FORMATS[fmt].zero or width % LANES == 0:
        return 0
    return next((parts for parts in (1, 2, 4) if parts * matrices * width % LANES == 0 and (parts == 1 or k % (parts * DEPTH) == 0)), 0)
