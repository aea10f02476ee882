"""Lowers one sub-layer: walks its ops in order, places their values, cuts their weights into chunks, and writes the region.

An op's `lower` calls back here for what it needs: `read` and `write` give source text for a value, `vector` and `block` give
source text for weights on the tape, `buffer`, `state`, `semaphores` and `transfer` declare places and copies, `step`,
`start`, `wait` and `loop` add nodes.
"""
from __future__ import annotations

from mkgen.graph.ir import Op, SubLayer, Value
from mkgen.plan.exchanges import Exchange, Exchanges
from mkgen.plan.memory import Memory
from mkgen.plan.nodes import Nodes
from mkgen.plan.overlap import Begin, Finish, arrange
from mkgen.plan.regions import Node, Seq
from mkgen.plan.tape import Chunk, Entry
from mkgen.plan.values import Values
from mkgen.plan.weights import Weights


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
        self.arranged = False            # are exchanges put where they belong before an op asks for them?
        self.trace: list[Op | Exchange] = []
        self.whole_sums: set[str] = set()    # sums that are needed whole
        self.talks: set[str] = set()     # ops that exchange something in their middle

    def region(self) -> Seq:
        """Lowers the ops. Where ranks exchange values, a first plain pass finds out what and when; the second has it arranged."""
        order = [*self.sub.order()]
        if self.ranks > 1:
            plain = Builder(self.memory.scratch(), self.sub, self.end_chunks)
            for op in order:
                plain.lower(op)
            gathered = {v for e in plain.trace if isinstance(e, Exchange) and e.kind == "gather" for v in e.values}
            self.whole_sums = {v for e in plain.trace if isinstance(e, Exchange) and e.kind == "scatter" for v in e.values} & gathered
            order, self.arranged = arrange(plain.trace, plain.talks), True
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
        self.op = op
        self.complete(op)
        self.trace.append(op)
        op.lower(self)
        self.ends[op.name] = len(self.nodes[0])

    def result(self, v: Value) -> str:
        """The spread of an output of the current op."""
        return self.op.gives({n: p.spread for n, p in self.memory.places.items()})[v.name]
