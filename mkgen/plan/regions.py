"""The region tree: what a plan is made of. Sequence, loop, branch, step, and the starts and waits of transfers.

The emitter prints these nodes in order; the checker walks them. Expressions (trip counts, arguments, predicates) are Python
source over the names that the generated function has in scope: `m` (all refs), `g` (the next chunk of the tape), `layer`,
`index` (how many earlier layers had the same kind) and the variables of enclosing loops.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Union


@dataclass(frozen=True)
class Buffer:
    """A named place. `shape` entries may be 'rows' (real rows of the variant). space: vmem | smem | hbm | dma_sem | barrier."""
    name: str
    shape: tuple[int | str, ...]
    dtype: str
    space: str
    purpose: str
    remote: bool = False                 # written by peers: symmetric and never aliased

    def dims(self, rows: int) -> tuple[int, ...]:
        return tuple(rows if s == "rows" else int(s) for s in self.shape)


@dataclass(frozen=True)
class Transfer:
    """One asynchronous copy, printed as a function of `params`: its start and its wait rebuild the same descriptor."""
    name: str
    params: tuple[str, ...]
    source: str
    target: str
    semaphore: str
    bytes: int
    doc: str
    setup: tuple[str, ...] = ()          # lines before the descriptor
    reads: tuple[str, ...] = ()          # buffers
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """Work: a macro of templates/ops/<template>.py.j2 with its arguments."""
    op: str
    template: str
    macro: str
    args: dict
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Start:
    transfer: str
    args: tuple[str, ...]
    when: str | None = None


@dataclass(frozen=True)
class Wait:
    transfer: str
    args: tuple[str, ...]
    when: str | None = None


@dataclass(frozen=True)
class Advance:
    """The chunk at `g` has been read for the last time: its slot is free, g moves on."""


@dataclass(frozen=True)
class Collective:
    """The start or the finish (`part`) of one round of an exchange: each rank sends a message to every other of its group.

    gather: pieces of all ranks side by side. scatter: this rank's columns of a sum, or its rows. reduce: the whole sum.
    Sources are read when the first round starts, targets are whole when the last one is finished; rounds follow one another."""
    kind: str                            # gather | scatter | reduce
    part: str
    stage: str                           # the group: a name of `Mesh.groups`
    factors: tuple[str, ...]             # mesh factors that its ranks differ in
    sources: tuple[str, ...]             # source text, one a value
    targets: tuple[str, ...]             # refs
    widths: tuple[int, ...]              # columns of each value in one message
    peers: int                           # ranks that each rank sends one message to, and gets one from
    words: int                           # u32 words a row in one message
    round: int = 0
    path: tuple[str, ...] = ("all",)     # the groups of all rounds, in order
    wire: str = "f32"                    # what a sum travels as: f32 | bf16
    over: int = 0                        # scatter: neighbours that it shares a sum out to, before all groups of them add theirs up; 0: all ranks
    beside: int = 0                      # scatter: that many of the values, the last ones, are not shared out: every rank gets the whole sum
    rows: bool = False                   # scatter, gather: a rank's share is its rows, each as one run of columns a rank, one below the other

    @property
    def rounds(self) -> int:
        return len(self.path)

    @property
    def told(self) -> str:
        """Its kind, for listings."""
        return f"{self.kind} of rows" if self.rows else self.kind

    def message_bytes(self, rows: int) -> int:
        return self.words * 4 * rows


@dataclass(frozen=True)
class Loop:
    """`for var in range(first, first + trips)`. trips is a literal, or an expression with `bound` as its largest value."""
    name: str
    var: str
    trips: str
    body: tuple["Node", ...]
    doc: str = ""
    bound: int | None = None
    unroll: bool = False
    carry: str | None = None             # a value carried from trip to trip (the tape's g is carried without being named)
    init: str | None = None
    first: int = 0                       # var starts here


@dataclass(frozen=True)
class Branch:
    """Runs the case whose index `selector` gives; every case advances the tape by its own number of chunks."""
    selector: str
    cases: tuple[tuple[str, "Seq"], ...]


@dataclass(frozen=True)
class Seq:
    nodes: tuple["Node", ...] = field(default_factory=tuple)


Node = Union[Step, Start, Wait, Advance, Collective, Loop, Branch, Seq]


@dataclass(frozen=True)
class Streamed:
    """A loop that does nothing but multiply with blocks of a matrix, a chunk each. step: the first of a turn; first: its block in
    the first turn; refills: of a turn's slots."""
    step: Step
    first: int
    turns: int
    turn: int
    refills: int


def streamed(loop: Loop) -> Streamed | None:
    """Each turn waits for its chunks, then uses them one by one and refills the first slots as it goes; None: it does something else."""
    steps = [n for n in loop.body if isinstance(n, Step)]
    turn, refills = len(steps), sum(isinstance(n, Start) for n in loop.body)
    if not steps or any("number" not in n.args for n in steps):
        return None
    body = [Wait("tape_copy", ("m", f"g + {chunk}" if chunk else "g")) for chunk in range(turn)]
    for chunk, step in enumerate(steps):
        body += [step, *([Start("tape_copy", ("m", "g + RING_DEPTH"))] if chunk < refills else []), Advance()]
    first = int(steps[0].args["number"].rpartition(" ")[2])
    alike = [replace(steps[0], args=steps[0].args | {"number": f"{turn} * i + {first + chunk}"}) for chunk in range(turn)]
    return Streamed(steps[0], first, int(loop.trips), turn, refills) if (list(loop.body), steps) == (body, alike) else None


def walk(node):
    """All nodes below, in order."""
    yield node
    if isinstance(node, Seq):
        for n in node.nodes:
            yield from walk(n)
    elif isinstance(node, Loop):
        for n in node.body:
            yield from walk(n)
    elif isinstance(node, Branch):
        for _, case in node.cases:
            yield from walk(case)


def advances(node) -> int:
    """Chunks of the tape that a region consumes; a loop that consumes any has a literal trip count."""
    if isinstance(node, Advance):
        return 1
    if isinstance(node, Seq):
        return sum(advances(n) for n in node.nodes)
    if isinstance(node, Loop):
        inside = sum(advances(n) for n in node.body)
        return inside * int(node.trips) if inside else 0
    return 0
