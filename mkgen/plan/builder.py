"""Lowers one sub-layer: walks its ops in order, places their values, cuts their weights into chunks, and writes the region.

An op's `lower` calls back here for what it needs: `read` and `write` give source text for a value, `vector` and `block` give
source text for weights on the tape, `buffer`, `state`, `semaphores` and `transfer` declare places and copies, `step`,
`start`, `wait` and `loop` add nodes.
"""
from __future__ import annotations

from mkgen.graph.ir import Op, SubLayer, Value
from mkgen.plan.memory import Memory, Place
from mkgen.plan.nodes import Nodes
from mkgen.plan.regions import Node, Seq, Step
from mkgen.plan.shard import round_up, unit_range
from mkgen.plan.tape import LANES, Chunk, Entry
from mkgen.plan.values import Values
from mkgen.plan.weights import Weights


class Builder(Values, Weights, Nodes):
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

    def region(self) -> Seq:
        for op in self.sub.order():
            self.op = op
            self.complete(op)
            op.lower(self)
            self.ends[op.name] = len(self.nodes[0])
        self.close()
        return Seq(tuple(self.early + self.nodes[0] + self.late))

    def complete(self, op: Op) -> None:
        """Puts an exchange in front of an op that needs a whole input which the rank has only a part of."""
        inputs = {v.name: v for v in op.inputs() if v.name in self.memory.places}
        for name, need in op.needs({n: self.memory.places[n].spread for n in inputs}).items():
            if name not in inputs or need != "whole":
                continue
            spread = self.memory.places[name].spread
            if spread == "partial":
                self.all_reduce(inputs[name])
            elif spread == "split":
                self.all_gather(inputs[name])

    def result(self, v: Value) -> str:
        """The spread of an output of the current op."""
        return self.op.gives({n: p.spread for n, p in self.memory.places.items()})[v.name]

    def all_reduce(self, v: Value) -> None:
        """Sums a partial value over all ranks, in place, factor by factor."""
        p = self.memory.places[v.name]
        if p.at:
            raise ValueError(f"{v.name}: a partial sum has a buffer of its own")
        self.all_reduce_buffer(p.buffer, p.width)
        if self.ranks > 1:
            self.memory.notes.append((v.name, f"all-reduce of {p.width} float32 a row: {self.op.name} needs the whole sum"))
        self.memory.places[v.name] = Place(p.buffer, p.at, p.width, p.dtype, "whole")

    def all_reduce_buffer(self, buffer: str, width: int | None = None) -> None:
        """Sums the first `width` columns of a float32 buffer (None: all) over all ranks, in place, factor by factor."""
        width = width or self.memory.buffers[buffer].shape[-1]
        self.close()
        self.memory.payload["reduce"] = max(self.memory.payload["reduce"], width)
        for factor, size, _ in self.mesh.stages:
            for part in ("start", "finish"):
                self.collective("reduce", part, factor, (f"m.{buffer}", str(width)), size - 1, round_up(width, LANES))

    def all_gather(self, v: Value) -> None:
        """Brings the column slices of all ranks together, in rank order."""
        p = self.memory.places[v.name]
        self.close()
        self.memory.payload["gather"] = max(self.memory.payload["gather"], p.width)
        name = self.room(v.name + "_whole", self.ranks * p.width, "f32", f"{self.bare(v.name)} of all ranks")
        self.memory.notes.append((v.name, f"all-gather of {p.width} columns a rank: {self.op.name} needs all of them"))
        source = self.read(v, "f32")
        self.nodes[-1].append(Step(v.name, "exchange", "gather_put", dict(x=source, width=p.width), (p.buffer,), ("gather",)))
        for factor, size, stride in self.mesh.stages:
            for part in ("start", "finish"):
                self.collective("gather", part, factor, (str(p.width),), size - 1, stride * round_up(p.width, LANES))
        self.nodes[-1].append(Step(v.name, "exchange", "gather_take", dict(y=f"m.{name}", width=p.width), ("gather",), (name,)))
        pieces = self.pieces(v, p.width)
        if pieces != [(0, v.width)]:
            self.nodes[-1].append(Step(v.name, "exchange", "gather_order", dict(y=f"m.{name}", pieces=pieces), (name,), (name,)))
        self.memory.places[v.name] = Place(name, 0, v.width, "f32", "whole")

    def pieces(self, v: Value, width: int) -> list[tuple[int, int]]:
        """(first column, columns) of v's true features among the ranks' pieces of `width` columns, in order, each once."""
        out, done, unit = [], 0, v.width // v.units
        for rank in range(self.ranks):
            first, last = unit_range(v.units, self.ranks, rank, v.groups)
            if first == done < last:
                at, n, done = rank * width, (last - first) * unit, last
                joins = out and sum(out[-1]) == at
                out[-1:] = [(out[-1][0], out[-1][1] + n)] if joins else [*out[-1:], (at, n)]
        return out
