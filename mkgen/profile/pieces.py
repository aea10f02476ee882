"""Cuts a plan's regions into pieces of work: what a core does between two points where it may have to wait.

A piece is a run of nodes: waits that it begins with, steps, then starts of copies. A loop's body is pieces of its own, an exchange's
start and finish are pieces too. The cut tree keeps the nodes beside their piece, so that `simulate.expand` walks the same tree.
"""
from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Union

from mkgen.emit.printer import ACTIVE, Printer
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Advance, Branch, Collective, Loop, Node, Seq, Start, Step, Streamed, Wait, streamed
from mkgen.profile.pytext import Definitions, indent, names

SCALARS = ("layer", "index", "g")


@dataclass
class Piece:
    """One piece of work. function: its source as `def piece(m, at)`, which runs it at[0] times in a loop; None until it is made."""
    region: str
    op: str
    text: str
    scalars: tuple[str, ...]             # that it may name: SCALARS and the variables of the loops around it
    carry: tuple[str, str] | None = None           # (name, first value) of what its loop hands from trip to trip
    steps: str = ""                      # the text of its steps alone: what later pieces may need the names of
    function: str = ""


@dataclass(frozen=True)
class Run:
    """parts: steps with what follows them; several share the cycles of the piece evenly."""
    waits: tuple[Wait, ...]
    parts: tuple[tuple[tuple[Step, ...], tuple[Start | Advance, ...]], ...]
    piece: Piece

    @property
    def steps(self) -> tuple[Step, ...]:
        return tuple(n for steps, _ in self.parts for n in steps)

    @property
    def tail(self) -> tuple[Start | Advance, ...]:
        return tuple(n for _, tail in self.parts for n in tail)


@dataclass(frozen=True)
class Exchange:
    node: Collective
    piece: Piece


@dataclass(frozen=True)
class Turn:
    """when: a trip does nothing where it is false."""
    loop: Loop
    body: tuple["Item", ...]
    when: str | None = None


@dataclass(frozen=True)
class Fork:
    branch: Branch
    cases: tuple[tuple["Item", ...], ...]


Item = Union[Run, Exchange, Turn, Fork]


@dataclass
class Cutter:
    """Cuts one region; `made`: its pieces in order."""
    printer: Printer
    region: Region
    made: list[Piece] = field(default_factory=list)

    def cut(self) -> tuple[Item, ...]:
        p, r = self.printer, self.region
        p.op, p.sub, p.chunks, p.at = None, r.name, r.chunks, 0
        return self.items(r.body.nodes, SCALARS, None)

    def items(self, nodes: tuple[Node, ...], scalars: tuple[str, ...], carry) -> tuple[Item, ...]:
        out: list[Item] = []
        group: list[Node] = []

        def flush() -> None:
            if group:
                out.append(self.run(tuple(group), scalars, carry))
                group.clear()

        for n in flat(nodes):
            if isinstance(n, (Step, Start, Advance, Wait)):
                if group and (rank(n) < rank(group[-1]) or apart(group[-1], n)):
                    flush()
                group.append(n)
                continue
            flush()
            out.append(self.item(n, scalars, carry))
        flush()
        return tuple(out)

    def item(self, n: Node, scalars: tuple[str, ...], carry) -> Item:
        if isinstance(n, Collective):
            if (n.part, n.round) not in (("start", 0), ("finish", 0)):        # the finish's text goes on with all further rounds
                return Exchange(n, self.made[-1])
            return Exchange(n, self.piece(exchange_op(n), self.printer.exchange(n, 0), "", scalars, carry))
        if isinstance(n, Branch):
            return Fork(n, tuple(self.items(case.nodes, scalars, carry) for _, case in n.cases))
        if isinstance(n, Loop) and (found := streamed(n)):
            return Turn(n, (self.turn(n, found, scalars, carry),))
        if isinstance(n, Loop):
            body, when = active_only(n)
            inner = (n.carry, n.init or "0") if n.carry else carry
            return Turn(n, self.items(body, (*scalars, *([n.var] if n.var not in scalars else [])), inner), when)
        raise TypeError(f"{self.region.name}: no pieces for {n}")

    def run(self, group: tuple[Node, ...], scalars: tuple[str, ...], carry) -> Run:
        waits, steps, tail = (tuple(n for n in group if rank(n) == k) for k in range(3))
        op = ops_of(steps) or next((n.transfer for n in group if isinstance(n, (Start, Wait))), "advance")
        piece = self.piece(op, self.printed(group), self.printed(steps), scalars, carry)
        return Run(waits, ((steps, tail),), piece)

    def turn(self, n: Loop, of: Streamed, scalars: tuple[str, ...], carry) -> Run:
        """A turn over a matrix is one piece: the compiler pushes a chunk's weights while the products of those before come out."""
        waits, rest = n.body[:of.turn], n.body[of.turn:]
        at = [i for i, x in enumerate(rest) if isinstance(x, Step)]
        parts = [((rest[i],), rest[i + 1:end]) for i, end in zip(at, (*at[1:], len(rest)))]
        self.printer.op = of.step.op
        lines = [self.printed(waits), *self.printer.block(n.name, of, 0)]
        for chunk, (_, tail) in enumerate(parts):
            lines += [f"{n.name}({of.first + chunk} + {of.turn} * i, g)", self.printed(tail)]
        piece = self.piece(of.step.op, "\n".join(lines), "", (*scalars, "i"), carry)
        return Run(waits, tuple(parts), piece)

    def printed(self, nodes: tuple[Node, ...]) -> str:
        self.printer.op = next((n.op for n in nodes if isinstance(n, Step)), None)
        return "\n".join(line for n in nodes for line in self.printer.node(n, 0) if not line.startswith("# -- "))

    def piece(self, op: str, text: str, steps: str, scalars: tuple[str, ...], carry) -> Piece:
        found = Piece(self.region.name, op, text, scalars, carry, steps or text)
        self.made.append(found)
        return found


def exchange_op(n: Collective) -> str:
    """`gather of router_logits_whole, latent_in_whole, finish`: what is brought together, and which half of it this is."""
    return f"{n.told} of {', '.join(t.removeprefix('m.') for t in n.targets)}, {n.part}"


def ops_of(steps: tuple[Step, ...]) -> str:
    """The op of a piece's steps; of several, the first and the last: `moe.norm..route`."""
    names = list(dict.fromkeys(s.op for s in steps))
    return names[0] + (f"..{names[-1].rsplit('.', 1)[-1]}" if len(names) > 1 else "") if names else ""


def rank(n: Node) -> int:
    return 0 if isinstance(n, Wait) else 1 if isinstance(n, Step) else 2


def apart(one: Node, other: Node) -> bool:
    """Are they steps of which one may run without the other?"""
    return isinstance(one, Step) and isinstance(other, Step) and one.args.get("when") != other.args.get("when")


def flat(nodes: tuple[Node, ...]):
    for n in nodes:
        if isinstance(n, Seq):
            yield from flat(n.nodes)
        else:
            yield n


def active_only(loop: Loop) -> tuple[tuple[Node, ...], str | None]:
    """A loop over rows whose nodes are all for active rows asks once a row, as the printer writes it."""
    def asked(n: Node):
        return n.args.get("when") if isinstance(n, Step) else getattr(n, "when", None)

    if loop.var != "row" or loop.unroll or {asked(n) for n in loop.body} != {ACTIVE}:
        return loop.body, None
    return tuple(replace(n, args=n.args | {"when": None}) if isinstance(n, Step) else replace(n, when=None) for n in loop.body), ACTIVE


def cut_plan(printer: Printer, plan: Plan, kernel: Definitions) -> tuple[dict[str, tuple[Item, ...]], list[Piece]]:
    """(region -> its items, all pieces with their functions)."""
    items, pieces = {}, []
    for name, region in plan.regions.items():
        cutter = Cutter(printer, region)
        items[name] = cutter.cut()
        complete(cutter.made, kernel)
        pieces += cutter.made
    return items, pieces


# -- functions ----------------------------------------------------------------------------------------------------------

def complete(pieces: list[Piece], kernel: Definitions) -> None:
    """Writes each piece's function: what earlier pieces make that it needs goes in front of its loop."""
    needs = [needed(p, kernel) for p in pieces]
    for at, piece in enumerate(pieces):
        makes = names(piece.text)[1]
        later = {n for need in needs[at + 1:] for n in need}
        keep = [n for n in makes if n in later and n not in piece.scalars and n != (piece.carry or ("",))[0]]
        piece.function = function(piece, before(pieces, at, kernel), needs[at], keep)


def needed(piece: Piece, kernel: Definitions) -> list[str]:
    known = {"m", *piece.scalars, *kernel.owner}
    return [n for n in names(piece.text)[0] if n not in known and n != (piece.carry or ("",))[0]]


def before(pieces: list[Piece], at: int, kernel: Definitions) -> list[str]:
    """The steps, in order, that make what pieces[at] needs."""
    piece = pieces[at]
    wanted = list(needed(piece, kernel))
    if piece.carry:
        wanted += [n for n in names(f"_ = {piece.carry[1]}")[0] if n not in kernel.owner and n != "m" and n not in piece.scalars]
    took: dict[int, str] = {}
    while wanted:
        name = wanted.pop()
        maker = next((i for i in range(at - 1, -1, -1) if name in names(pieces[i].steps)[1]), None)
        if maker is None:
            raise KeyError(f"{piece.region}/{piece.op}: nothing before it makes {name}:\n{piece.text}")
        if maker not in took:
            took[maker] = pieces[maker].steps
            wanted += needed(replace(pieces[maker], text=pieces[maker].steps), kernel)
    return [took[i] for i in sorted(took)]


def function(piece: Piece, front: list[str], need: list[str], keep: list[str]) -> str:
    """`def piece(m, at)`: at[0] trips, at[1 + i] the first value of scalar i, which moves on with each trip."""
    carry, first = piece.carry or ("state", "0")
    carried = carry in names(piece.text)[1] or carry in names(piece.text)[0]
    again = [n for n in need if n in names(piece.text)[1]]
    heads = [f"{s} = at[{i}]" for i, s in enumerate(piece.scalars, 1)]
    moves = [f"{s} = at[{i}] + trip" for i, s in enumerate(piece.scalars, 1)]
    params = ", ".join(["trip", carry if carried else "state", *(f"{n}={n}" for n in again)])
    tail = ([f"keep({', '.join(keep)})"] if keep else []) + [f"return {carry if carried else 'state'}"]
    lines = ["def piece(m, at):", *(indent(x, 1) for x in (*heads, *front)), f"    def turn({params}):",
             *(indent(x, 2) for x in ("stir(trip)", *moves, piece.text, *tail)), f"    lax.fori_loop(0, at[0], turn, {first if carried else 0})"]
    return "\n".join(lines)
