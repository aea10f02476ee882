"""Lowers one sub-layer: walks its ops in order, places their values, cuts their weights into chunks, and writes the region.

An op's `lower` calls back here for what it needs: `read` and `write` give source text for a value, `vector` and `block` give
source text for weights on the tape, `buffer`, `state`, `semaphores` and `transfer` declare places and copies, `step`,
`start`, `wait` and `loop` add nodes.
"""
from __future__ import annotations

import re
from contextlib import contextmanager
from dataclasses import dataclass

from mkgen.graph.ir import LayerGraph, Op, State, SubLayer, Value, Weight
from mkgen.plan.experts import ExpertImage, plan_experts
from mkgen.plan.regions import Advance, Buffer, Collective, Loop, Node, Seq, Start, Step, Transfer, Wait
from mkgen.plan.shard import Mesh, local_units
from mkgen.plan.tape import LANES, Chunk, Entry, Matrix, Part, Vector, plan_matrix
from mkgen.spec.model import Build

ROWS_PADDED = 8                          # decode rows are padded to one sublane tile


@dataclass(frozen=True)
class Place:
    """Where a value lies: columns [at, at + width) of a buffer, and how complete it is on this rank."""
    buffer: str
    at: int
    width: int
    dtype: str
    spread: str                          # whole | split | partial


class Memory:
    """Declarations shared by all sub-layers: buffers, transfers, matrices, vectors, places of carried values."""

    def __init__(self, graph: LayerGraph, build: Build, mesh: Mesh):
        self.graph, self.build, self.mesh = graph, build, mesh
        self.slot_rows = build.block_kib * 1024 // (LANES * 4)
        self.ring_depth = build.ring_depth
        self.buffers: dict[str, Buffer] = {}
        self.transfers: dict[str, Transfer] = {}
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Vector] = {}
        self.weights: dict[str, Weight] = {}
        self.states: dict[str, tuple[State, Buffer]] = {}
        self.places: dict[str, Place] = {}
        self.experts: dict[str, object] = {}
        self.embed_rows = 0
        self.notes: list[tuple[str, str]] = []
        self.payload = {"reduce": 0, "gather": 0}

    def declare(self, b: Buffer) -> str:
        known = self.buffers.setdefault(b.name, b)
        if known != b:
            raise ValueError(f"buffer {b.name} is declared twice, differently: {known} and {b}")
        return b.name


def identifier(name: str) -> str:
    return name.replace(".", "_")


class Builder:
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

    # -- the walk -------------------------------------------------------------------------------------------------------

    def region(self) -> Seq:
        for op in self.sub.order():
            self.op = op
            self.complete(op)
            op.lower(self)
            self.ends[op.name] = len(self.nodes[0])
        self.close()
        return Seq(tuple(self.early + self.nodes[0] + self.late))

    def spread(self) -> dict[str, str]:
        return {n: p.spread for n, p in self.memory.places.items()}

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

    # -- values ---------------------------------------------------------------------------------------------------------

    def local(self, v: Value, spread: str) -> int:
        return v.width // v.units * local_units(v.units, self.ranks) if spread == "split" else v.width

    def place(self, v: Value) -> Place:
        if v.name not in self.memory.places:
            if not v.carried:
                raise ValueError(f"{self.sub.name}: {v.name} is read before it is made")
            self.place_carried(v)
        return self.memory.places[v.name]

    def place_carried(self, v: Value) -> None:
        shape = (ROWS_PADDED, v.width) if v.planes == 1 else (v.planes, ROWS_PADDED, v.width)
        self.buffer(v.name, shape, v.dtype, "the residual stream" if v.planes == 1 else "snapshots of the residual stream")
        self.memory.places[v.name] = Place(identifier(v.name), 0, v.width, v.dtype, "whole")

    def ref(self, v: Value) -> str:
        """The ref that holds v."""
        return f"m.{self.place(v).buffer}"

    def read(self, v: Value, dtype: str) -> str:
        """Source text of v's local columns as `dtype`, rounded if v is a bf16 value kept unrounded."""
        p = self.place(v)
        width = self.memory.buffers[p.buffer].shape[-1]
        text = f"m.{p.buffer}[...]" if (p.at, p.width) == (0, width) else f"m.{p.buffer}[:, {p.at}:{p.at + p.width}]"
        if v.dtype == "bf16" and p.dtype == "f32" and p.spread != "partial":
            text += ".astype(bf16)"
            return text if dtype == "bf16" else text + ".astype(f32)"
        return text if p.dtype == dtype else f"{text}.astype({dtype})"

    def columns(self, vs: tuple[Value, ...]) -> str:
        """Source text, float32, of values that lie side by side in one buffer."""
        places = [self.place(v) for v in vs]
        for left, right in zip(places, places[1:]):
            if (left.buffer, left.at + left.width) != (right.buffer, right.at):
                raise ValueError(f"{self.op.name}: {', '.join(v.name for v in vs)} must lie side by side")
        text = f"m.{places[0].buffer}[:, {places[0].at}:{places[-1].at + places[-1].width}]"
        rounded = vs[0].dtype == "bf16" and places[0].dtype == "f32"
        return text + (".astype(bf16)" if rounded else "") + ("" if places[0].dtype == "f32" and not rounded else ".astype(f32)")

    def join(self, vs: tuple[Value, ...], name: str) -> "Target":
        """A new buffer that holds several outputs of the current op side by side."""
        spread, at = self.result(vs[0]), 0
        widths = [self.local(v, spread) for v in vs]
        buffer = self.buffer(name, (ROWS_PADDED, sum(widths)), vs[0].dtype, " | ".join(v.name for v in vs))
        for v, width in zip(vs, widths):
            self.memory.places[v.name] = Place(buffer, at, width, v.dtype, spread)
            at += width
        return Target(f"m.{buffer}", vs[0].dtype, at)

    def write(self, v: Value, width: int | None = None, dtype: str | None = None) -> "Target":
        """A new buffer for an output of the current op (or the carried buffer), to be stored to with `set`. The buffer may be
        wider than the value, and keep it unrounded (`dtype`)."""
        if v.carried:
            p = self.place(v)
        else:
            spread = self.result(v)
            local = self.local(v, spread)
            name = self.buffer(v.name, (ROWS_PADDED, width or local), dtype or v.dtype, v.name)
            p = self.memory.places[v.name] = Place(name, 0, local, dtype or v.dtype, spread)
        return Target(f"m.{p.buffer}", p.dtype, p.width)

    def alias(self, x: Value, ys: tuple[Value, ...]) -> None:
        p, at = self.place(x), 0
        for y in ys:
            self.memory.places[y.name] = Place(p.buffer, p.at + at, y.width, p.dtype, p.spread)
            at += y.width

    # -- weights --------------------------------------------------------------------------------------------------------

    def whole(self, ws: tuple[Weight, ...]) -> bool:
        """A family is kept whole if the build says so or if it has fewer units than there are ranks (unless it shares a
        matrix with families that are split: those repeat their units instead)."""
        return any(w.name in self.build.replicate for w in ws) or all(w.split is None or w.units < self.ranks for w in ws)

    def width(self, w: Weight, axis: int, whole: bool) -> int:
        if whole or w.split != axis:
            return w.shape[axis]
        return w.shape[axis] // w.units * local_units(w.units, self.ranks)

    def take(self, entry_rows: int, name: str, block: int | None = None) -> int:
        """A place for `entry_rows` rows in the open chunk; opens one (and waits for it) where none is open or it is full."""
        if self.open is not None and sum(e.rows for e in self.open) + entry_rows > self.memory.slot_rows:
            self.close()
        if self.open is None:
            self.open = []
            self.nodes[-1].append(Wait("tape_copy", ("m", "g")))
        at = sum(e.rows for e in self.open)
        self.open.append(Entry(name, at, entry_rows, block))
        return at

    def close(self) -> None:
        """The open chunk has been read for the last time: its slot is refilled with the chunk `ring_depth` ahead."""
        if self.open is not None:
            self.advance(refill=self.refills(1) == 1)
            self.chunks.append(Chunk(tuple(self.open)))
            self.open = None

    def advance(self, refill: bool) -> None:
        self.nodes[-1] += ([Start("tape_copy", ("m", "g + RING_DEPTH"))] if refill else []) + [Advance()]

    def refills(self, count: int) -> int:
        """How many of the next `count` chunks may refill their slot: all, except at the end of the tape."""
        if self.end_chunks is None:
            return count
        return max(0, min(count, self.end_chunks - self.memory.ring_depth - len(self.chunks)))

    def vector(self, *ws: Weight) -> str:
        """Source text [lane_rows, 128] float32 of one family, or of several side by side (line by line for taps)."""
        name = ws[0].name if len(ws) == 1 else "+".join(w.name for w in ws)
        whole = self.ranks == 1 or all(w.split is None for w in ws)
        lines = ws[0].shape[0] if len(ws[0].shape) == 2 else 1
        width = sum(self.width(w, len(w.shape) - 1, whole) for w in ws)
        v = Vector(name, tuple(w.name for w in ws), lines, width, ws[0].dtype, whole)
        self.memory.vectors[name] = v
        self.memory.weights.update({w.name: w for w in ws})
        at = self.take(v.rows, name)
        rows = f"tape_rows(m, g, {at}, {v.rows})"
        return f"bitcast({rows}, f32)" if v.dtype == "f32" else f"bitcast({rows}, bf16).astype(f32)"

    def matrix(self, name: str, ws: tuple[Weight, ...], along: str) -> Matrix:
        whole = self.ranks == 1 or (along == "columns" and self.whole(ws)) or along == "whole"
        k = self.width(ws[0], 0, whole)
        parts = tuple(Part(w.name, self.width(w, 1, whole)) for w in ws)
        m = plan_matrix(name, parts, k, whole, self.memory.slot_rows)
        self.memory.matrices[name] = m
        self.memory.weights.update({w.name: w for w in ws})
        return m

    def block(self, name: str, ws: tuple[Weight, ...], along: str = "columns") -> tuple[str, Matrix]:
        """Source text [k, n] bf16 of a small matrix that is one block of the open chunk."""
        m = self.matrix(name, ws, along)
        if m.blocks != 1 or m.layout != "panels":
            raise ValueError(f"{name}: [{m.k}, {m.n}] must be one block of panels, of at most {self.build.block_kib} KiB")
        at = self.take(m.block_rows, name, 0)
        return f"panels(m, g, {at}, {m.block_k}, {m.block_n})", m

    def matmul(self, op) -> None:
        """A Linear: blocks one after another through the ring; one block shares a chunk with its neighbours."""
        m = self.matrix(op.name, op.ws, op.along)
        spread = {"columns": "split", "rows": "partial"}.get(op.along, "whole") if self.ranks > 1 and not m.whole else "whole"
        logits = op.ys[0].name == "logits"
        buffer = self.buffer("logits" if logits else op.name + "_y", (ROWS_PADDED, m.n_padded), "f32",
                             "logits of this rank's vocabulary" if logits else " | ".join(y.name for y in op.ys),
                             space="out" if logits else "vmem")
        at = 0
        for y, part in zip(op.ys, m.parts):
            self.memory.places[y.name] = Place(buffer, at, part.width, "f32", spread)
            at += part.width
        x = self.place(op.x)
        args = dict(matrix=m, x=self.read(op.x, "bf16"), y=f"m.{buffer}", pad=m.k_padded - x.width)
        if m.blocks == 1:
            self.step(op, "linear", "single", writes=(buffer,), at=self.take(m.block_rows, m.name, 0), **args)
            return
        self.close()
        if m.k_blocks > 1:
            self.step(op, "linear", "clear", writes=(buffer,), y=f"m.{buffer}")
        args |= dict(x_ref=f"m.{x.buffer}", x_at=x.at, x_dtype=x.dtype)
        filled = self.refills(m.blocks)
        for first, last in ((0, filled), (filled, m.blocks)):
            if first == last:
                continue
            with self.loop(f"{identifier(op.name)}_block", "i", str(last - first), doc=f"{m.blocks} blocks"):
                self.nodes[-1].append(Wait("tape_copy", ("m", "g")))
                self.step(op, "linear", "block", writes=(buffer,), first=first, **args)
                self.advance(refill=first < filled)
        self.chunks += [Chunk((Entry(m.name, 0, m.block_rows, i),)) for i in range(m.blocks)]

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def step(self, op: Op, template: str, macro: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), **args) -> None:
        """Adds work. Buffers named in its arguments are what it touches: a Target is written, anything else is read; `reads`
        and `writes` add those that only the macro names."""
        texts = [a for a in args.values() if isinstance(a, str)]
        read = {name for t in texts for name in re.findall(r"\bm\.(\w+)", t)} | set(reads)
        if "matrix" in args or any(re.search(r"\b(tape_rows|panels|columns)\(m, g", t) for t in texts):
            read.add("ring")
        written = {a.ref[2:] for a in args.values() if isinstance(a, Target)} | set(writes)
        self.nodes[-1].append(Step(op.name, template, macro, args, tuple(sorted(read)), tuple(sorted(written))))

    def start(self, transfer: str, *args: str, when: str | None = None) -> None:
        self.nodes[-1].append(Start(transfer, args, when))

    def wait(self, transfer: str, *args: str, when: str | None = None) -> None:
        self.nodes[-1].append(Wait(transfer, args, when))

    def wait_late(self, transfer: str, *args: str, when: str | None = None, rows: bool = False) -> None:
        """A wait at the end of the sub-layer; `rows`: once a row."""
        self.late.append(self.each_row(Wait(transfer, args, when), rows))

    def start_early(self, transfer: str, *args: str, when: str | None = None, rows: bool = False) -> None:
        """A start at the beginning of the sub-layer; `rows`: once a row."""
        self.early.append(self.each_row(Start(transfer, args, when), rows))

    def start_early_loop(self, transfer: str, var: str, trips: str, *args: str, bound: int) -> None:
        self.early.append(Loop(f"first_{transfer}", var, trips, (Start(transfer, args),), bound=bound))

    def each_row(self, node: Node, rows: bool) -> Node:
        return Loop(f"{node.transfer}_rows", "row", "m.rows", (node,)) if rows else node

    @contextmanager
    def after(self, op: str):
        """Nodes added inside go right behind the last node of an earlier op."""
        at = self.ends[op]
        self.nodes.append([])
        yield
        self.nodes[0][at:at] = self.nodes.pop()

    @contextmanager
    def loop(self, name: str, var: str, trips: str, doc: str = "", bound: int | None = None, unroll: bool = False,
             carry: str | None = None, init: str | None = None):
        self.nodes.append([])
        yield
        body = tuple(self.nodes.pop())
        self.nodes[-1].append(Loop(name, var, trips, body, doc, bound, unroll, carry, init))

    # -- declarations ---------------------------------------------------------------------------------------------------

    def buffer(self, name: str, shape: tuple, dtype: str, purpose: str, space: str = "vmem", remote: bool = False) -> str:
        return self.memory.declare(Buffer(identifier(name), tuple(shape), dtype, space, purpose, remote))

    def semaphores(self, name: str, shape: tuple, purpose: str) -> str:
        return self.buffer(name, shape, "dma", purpose, space="dma_sem")

    def state(self, s: State, shape: tuple, dtype: str, purpose: str) -> str:
        """An array in HBM, [layers of this kind, *shape], updated in place."""
        layers = sum(self.sub.name in run for run in self.memory.graph.layers)
        name = self.buffer(s.name, (layers, *shape), dtype, purpose, space="hbm")
        self.memory.states[s.name] = (s, self.memory.buffers[name])
        return f"m.{name}"

    def transfer(self, name: str, params: tuple[str, ...], source: str, target: str, semaphore: str, size: int, doc: str, *,
                 setup: tuple[str, ...] = (), reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> None:
        self.memory.transfers[name] = Transfer(name, params, source, target, semaphore, size, doc, setup, reads, writes)

    def collective(self, kind: str, part: str, factor: str, args: tuple[str, ...], size: int) -> None:
        self.nodes[-1].append(Collective(kind, part, factor, args, size))

    def embedding(self, table: Weight, run: int) -> int:
        """Declares the rank's part of an embedding table, `run` tokens; returns u32 rows a token."""
        words = -(-table.shape[1] // (2 * LANES))
        self.memory.weights[table.name] = table
        self.memory.embed_rows = run * words
        return words

    @property
    def max_rows(self) -> int:
        return max(self.build.rows)

    def maker(self, v: Value) -> str:
        """The op of this sub-layer that makes v."""
        return next(op.name for op in self.sub.ops if v in op.outputs())

    def activation(self, act) -> str:
        """Source text of an activation of the names `gate` and `up`, float32."""
        return "silu(gate, up)" if act.kind == "silu" else f"situ(gate, up, {act.beta}, {act.linear_beta})"

    def expert_image(self, op) -> ExpertImage:
        layers = sum(self.sub.name in run for run in self.memory.graph.layers)
        names = tuple(w.name for w in op.weights())
        image = plan_experts(self.build.formats.get("experts", "bf16"), layers, op.experts, self.build.expert_parallel,
                             self.build.tensor_parallel, op.x.width, op.width, op.y.width, names)
        self.memory.weights.update({w.name: w for w in op.weights()})
        if self.memory.experts.setdefault("image", image) != image:
            raise ValueError(f"{op.name}: a model has one kind of routed experts")
        return image

    def fact(self, name: str) -> str:
        return f"m.facts[layer * FACTS + {name.upper()}]"

    # -- exchanges ------------------------------------------------------------------------------------------------------

    def all_reduce(self, v: Value) -> None:
        """Sums a partial value over all ranks, in place, factor by factor."""
        p = self.memory.places[v.name]
        if p.at:
            raise ValueError(f"{v.name}: a partial sum has a buffer of its own")
        self.close()
        self.memory.payload["reduce"] = max(self.memory.payload["reduce"], p.width)
        for factor, size, _ in self.mesh.stages:
            for part in ("start", "finish"):
                self.collective("reduce", part, factor, (f"m.{p.buffer}", str(p.width)), (size - 1) * p.width * 4)
        self.memory.places[v.name] = Place(p.buffer, p.at, p.width, p.dtype, "whole")

    def all_gather(self, v: Value) -> None:
        """Brings the column slices of all ranks together, in rank order."""
        p = self.memory.places[v.name]
        self.close()
        self.memory.payload["gather"] = max(self.memory.payload["gather"], p.width)
        name = self.buffer(v.name + "_whole", (ROWS_PADDED, self.ranks * p.width), "f32", f"{v.name}, of all ranks")
        source = self.read(v, "f32")
        self.nodes[-1].append(Step(v.name, "exchange", "gather_put", dict(x=source, width=p.width), (p.buffer,), ("gather",)))
        for factor, size, stride in self.mesh.stages:
            for part in ("start", "finish"):
                self.collective("gather", part, factor, (str(p.width),), (size - 1) * stride * p.width * 4)
        self.nodes[-1].append(Step(v.name, "exchange", "gather_take", dict(y=f"m.{name}", width=p.width), ("gather",), (name,)))
        self.memory.places[v.name] = Place(name, 0, v.width, "f32", "whole")


@dataclass(frozen=True)
class Target:
    """Where a step stores its result: `m.h[...] = (expr).astype(bf16)`."""
    ref: str
    dtype: str
    width: int

    def set(self, expr: str) -> str:
        return f"{self.ref}[...] = {expr}" + ("" if self.dtype == "f32" else f".astype({self.dtype})")
