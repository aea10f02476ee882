"""Lowers one sub-layer: walks its ops in order, places their values, cuts their weights into chunks, and writes the region.

An op's `lower` calls back here for what it needs: `read` and `write` give source text for a value, `vector` and `block` give
source text for weights on the tape, `buffer`, `state`, `semaphores` and `transfer` declare places and copies, `step`,
`start`, `wait` and `loop` add nodes.
"""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.errors import MkgenError
from mkgen.graph.ir import Op, SubLayer, Value
from mkgen.plan.exchange import Exchange, is_rows
from mkgen.plan.exchanges import Exchanges
from mkgen.plan.memory import Memory
from mkgen.plan.nodes import Nodes
from mkgen.plan.overlap import Begin, Finish, arrange
from mkgen.plan.regions import Node, Seq
from mkgen.plan.tape import Chunk, Entry
from mkgen.plan.values import Values
from mkgen.plan.weights import Weights


@dataclass(frozen=True)
class Arrangement:
    """by_column: sums that are added to split columns are made in runs. by_row: those that may be are shared out by rows.
    whole_sums: those that are needed whole."""
    by_column: bool
    by_row: bool
    order: tuple[Op | Begin | Finish, ...]
    whole_sums: frozenset[str]


class Builder(Values, Weights, Exchanges, Nodes):
    def __init__(self, memory: Memory, sub: SubLayer, end_chunks: int | None = None):
        """`end_chunks`: for the last sub-layer, how many chunks it consumes: the last `ring_depth` of them refill nothing."""
        self.end_chunks = end_chunks
        self.memory, self.sub, self.build, self.mesh = memory, sub, memory.build, memory.mesh
        self.ranks = memory.mesh.ranks
        self.nodes: list[list[Node]] = [[]]
        self.chunks: list[Chunk] = []
        self.open: list[Entry] | None = None
        self.early: list[Node] = []
        self.late: list[Node] = []
        self.ends: dict[str, int] = {}
        self.op: Op | None = None
        self.order: tuple = tuple(sub.order())
        self.arranged = False            # are exchanges put where they belong before an op asks for them?
        self.by_column = True            # is a sum that is added to split columns made in runs?
        self.by_row = False              # is a sum shared out by rows, where it may be?
        self.trace: list[Op | Exchange] = []
        self.whole_sums: frozenset[str] = frozenset()    # sums that are needed whole
        self.routes_at = 0               # the first node behind which memory is the experts'
        self.talks: set[str] = set()     # ops that exchange something in their middle

    def region(self) -> Seq:
        """Lowers the ops, arranged as the fastest of the ways to exchange asks for."""
        if self.ranks > 1:
            tried = self.arrangements()
            best = min(tried, key=lambda p: self.copy(p).exchange_seconds()) if len(tried) > 1 else tried[0]
            self.follow(best)
            if len({p.by_column for p in tried}) > 1:
                self.memory.notes.append((self.sub.name, f"what is added to split columns is summed {'in runs' if best.by_column else 'whole'}"))
                self.memory.added.add("runs" if best.by_column else "whole")
        return self.run(self.order)

    def arrangements(self) -> list[Arrangement]:
        """Those that differ. Rows are shared out only where that leaves the ops, and so the tape, in their order."""
        by_column = {"auto": (True, False), "runs": (True,), "whole": (False,)}[self.build.add]
        tried = [self.arrangement(columns, False) for columns in by_column]
        if sums := self.row_sums():
            ops = [[x for x in p.order if isinstance(x, Op)] for p in tried]
            rows = [self.arrangement(columns, True) for columns in by_column]
            rows = [p for p, same in zip(rows, ops) if [x for x in p.order if isinstance(x, Op)] == same]
            tried = rows if rows and any(is_rows(self.way(n)) for n in sums) else tried + rows
        return [p for i, p in enumerate(tried) if p.order not in [q.order for q in tried[:i]]]

    def arrangement(self, by_column: bool, by_row: bool) -> Arrangement:
        """A plain lowering finds out what is exchanged and when, and has it arranged."""
        plain = Builder(self.memory.scratch(), self.sub, self.end_chunks)
        plain.by_column, plain.by_row = by_column, by_row
        for op in self.sub.order():
            plain.lower(op)
        kinds = {kind: {v for e in plain.trace if isinstance(e, Exchange) and e.kind == kind for v in e.values} for kind in ("scatter", "gather")}
        return Arrangement(by_column, by_row, tuple(arrange(plain.trace, plain.talks)), frozenset(kinds["scatter"] & kinds["gather"]))

    def follow(self, a: Arrangement) -> None:
        self.order, self.by_column, self.by_row, self.whole_sums, self.arranged = a.order, a.by_column, a.by_row, a.whole_sums, True

    def copy(self, a: Arrangement) -> Builder:
        """The arrangement, lowered on a copy of the memory."""
        other = Builder(self.memory.scratch(), self.sub, self.end_chunks)
        other.follow(a)
        other.run(other.order)
        return other

    def run(self, order: tuple) -> Seq:
        rest = {}
        for item in order:
            if isinstance(item, Begin):
                rest[item.exchange] = self.start_exchange(item.exchange)
            elif isinstance(item, Finish):
                self.finish_exchange(rest.pop(item.exchange))
            else:
                self.lower(item)
        self.close()
        return Seq(tuple(self.early + self.nodes[0] + self.late))

    def lower(self, op: Op) -> None:
        """Refills of the ring that would come in front of the experts may come behind them."""
        self.op = op
        self.complete(op)
        self.trace.append(op)
        if op.kind == "route":
            self.routes_at = len(self.nodes[0])
        op.lower(self)
        self.ends[op.name] = len(self.nodes[0])
        if op.kind == "routed_experts":
            self.refill_behind(self.routes_at)

    def result(self, v: Value) -> str:
        """The spread of an output of the current op."""
        return self.op.gives({n: p.spread for n, p in self.memory.places.items()})[v.name]
