"""The builder's view of values: where each lies, and the source text that reads or writes it."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.graph.ir import Value
from mkgen.plan.exchange import ROWS
from mkgen.plan.memory import Place, ROWS_PADDED, identifier
from mkgen.plan.regions import Buffer
from mkgen.plan.shard import apart, local_units, sharers

CARRIED = {"running": "the residual stream", "snapshots": "snapshots of the residual stream",
           "past": "snapshots, weighed for the next mixture", "past_sums": "their highest score | sum of weights | of squares",
           "normed": "what both branches of a layer read", "branch": "what a layer's mixer made, one rank's term"}


@dataclass(frozen=True)
class Target:
    """Where a step stores its result: `m.h[...] = (expr).astype(bf16)`."""
    ref: str
    dtype: str
    width: int

    def set(self, expr: str, at: str = "...") -> str:
        return f"{self.ref}[{at}] = {expr}" + ("" if self.dtype == "f32" else f".astype({self.dtype})")


class Values:
    def local(self, v: Value, spread: str, over: int = 0) -> int:
        return v.width // v.units * local_units(v.units, over or self.ranks, v.groups) if spread == "split" else v.width

    def place(self, v: Value) -> Place:
        if v.name not in self.memory.places:
            if not v.carried:
                raise ValueError(f"{self.sub.name}: {v.name} is read before it is made")
            self.place_carried(v)
        return self.memory.places[v.name]

    def dtype(self, v: Value) -> str:
        """What v is kept in: a bf16 value stays float32 if the build keeps activations so."""
        return "f32" if v.dtype == "bf16" and self.build.activations == "f32" else v.dtype

    def place_carried(self, v: Value) -> None:
        shape = (ROWS_PADDED, v.width) if v.planes == 0 else (v.planes, ROWS_PADDED, v.width)
        purpose = CARRIED.get(v.name) or f"{self.op.kind.replace('_', ' ')}, all layers"
        self.buffer(v.name, shape, self.dtype(v), purpose)
        spread = "partial" if v.partial and self.ranks > 1 else "whole"
        self.memory.places[v.name] = Place(identifier(v.name), 0, v.width, self.dtype(v), spread)

    def ref(self, v: Value) -> str:
        """The ref that holds v."""
        return f"m.{self.place(v).buffer}"

    def read(self, v: Value, dtype: str) -> str:
        """Source text of v's local columns as `dtype`, rounded if v is a bf16 value kept unrounded."""
        p = self.place(v)
        width = self.memory.buffers[p.buffer].shape[-1]
        text = f"m.{p.buffer}[...]" if (p.at, p.width) == (0, width) else f"m.{p.buffer}[:, {p.at}:{p.at + p.width}]"
        if self.build.activations == "f32" and dtype == "bf16":
            return text                           # the product takes it apart
        if self.dtype(v) == "bf16" and p.dtype == "f32" and p.spread != "partial":
            return f"{text}.astype(bf16)" if dtype == "bf16" else f"round_bf16({text})"
        return text if p.dtype == dtype else f"{text}.astype({dtype})"

    def first_column(self, v: Value) -> str:
        """Source text: the number of the first of v's columns on this rank; beyond the last where it holds padding alone."""
        p, share = self.place(v), sharers(self.ranks, v.groups)
        if p.spread != "split":
            return "0"
        rank, group = 'lax.axis_index("tp")', v.width // v.groups if v.groups else 0
        if share == 1 or group == share * p.width:
            return f"{rank} * {p.width}"
        part = f" + lax.rem({rank}, {share}) * {p.width}" if v.groups < v.units else ""
        return f"lax.div({rank}, {share}) * {group}{part}"

    def apart(self, v: Value, size: int) -> bool:
        """Does every run of `size` of v's columns lie on one rank?"""
        return self.place(v).spread == "whole" or apart(v.width, v.units, v.groups, self.ranks, size)

    def bare(self, name: str) -> str:
        """A name without the sub-layer's prefix."""
        return name.removeprefix(self.sub.name + ".")

    def own(self, name: str) -> str:
        """The name as an identifier: bare, unless another sub-layer keeps a state of the same bare name."""
        states = {s.name for sub in self.memory.graph.sublayers() for op in sub.ops for s in op.states()}
        bare = self.bare(name)
        alone = sum(s.partition(".")[2] == bare for s in states) == 1
        return identifier(bare if alone else name)

    def held(self, state: str) -> str:
        """The name of a state's copy in VMEM: never that of its array in HBM."""
        name = self.own(state)
        return name if name != identifier(state) else f"{name}_held"

    def room(self, name: str, width: int, dtype: str, purpose: str, space: str = "vmem") -> str:
        """A buffer [8, width] for values that live within the sub-layer: shared with those of the same name, width and dtype
        in other sub-layers, which never run at the same time."""
        shared = Buffer(identifier(self.bare(name)), (ROWS_PADDED, width), dtype, space, purpose)
        if self.memory.buffers.setdefault(shared.name, shared) == shared:
            return shared.name
        return self.buffer(name, (ROWS_PADDED, width), dtype, purpose, space)

    def columns(self, vs: tuple[Value, ...]) -> str:
        """Source text, float32, of values that lie side by side in one buffer."""
        places = [self.place(v) for v in vs]
        for left, right in zip(places, places[1:]):
            if (left.buffer, left.at + left.width) != (right.buffer, right.at):
                raise ValueError(f"{self.op.name}: {', '.join(v.name for v in vs)} must lie side by side")
        text = f"m.{places[0].buffer}[:, {places[0].at}:{places[-1].at + places[-1].width}]"
        rounded = self.dtype(vs[0]) == "bf16" and places[0].dtype == "f32"
        return f"round_bf16({text})" if rounded else text if places[0].dtype == "f32" else f"{text}.astype(f32)"

    def join(self, vs: tuple[Value, ...], name: str) -> Target:
        """A new buffer that holds several outputs of the current op side by side."""
        spread, at = self.result(vs[0]), 0
        widths = [self.local(v, spread) for v in vs]
        buffer = self.room(name, sum(widths), self.dtype(vs[0]), " | ".join(self.bare(v.name) for v in vs))
        for v, width in zip(vs, widths):
            self.memory.places[v.name] = Place(buffer, at, width, self.dtype(v), spread)
            at += width
        return Target(f"m.{buffer}", self.dtype(vs[0]), at)

    def write(self, v: Value, width: int | None = None, dtype: str | None = None) -> Target:
        """A new buffer for an output of the current op (or the carried buffer), to be stored to with `set`. The buffer may be
        wider than the value, and keep it unrounded (`dtype`)."""
        if v.carried:
            p = self.place(v)
        else:
            spread = self.result(v)
            even = spread == "split" and self.op.columnwise and all(self.even(x) for x in self.op.inputs() if x.name in self.memory.places)
            inputs = [self.memory.places[x.name] for x in self.op.inputs() if x.name in self.memory.places]
            over = max((p.over for p in inputs if p.spread == "split"), default=0) if spread == "split" else 0
            even |= spread == ROWS       # a run of each of the rank's rows
            local = v.width // (over or self.ranks) if even else self.local(v, spread, over)
            name = self.room(v.name, width or local, dtype or self.dtype(v), self.op.kind.replace("_", " "))
            p = self.memory.places[v.name] = Place(name, 0, local, dtype or self.dtype(v), spread, even, over=over)
        return Target(f"m.{p.buffer}", p.dtype, p.width)

    def counts(self, v: Value) -> str | None:
        """Where ranks hold copies of one unit of v: source text that is true on one of them only; None if none does."""
        copies = sharers(self.ranks, v.groups) if v.groups == v.units < self.ranks and self.place(v).spread == "split" else 1
        return None if copies == 1 else f'lax.rem(lax.axis_index("tp"), {copies}) == 0'

    def alias(self, x: Value, ys: tuple[Value, ...]) -> None:
        p, at = self.place(x), 0
        for y in ys:
            self.memory.places[y.name] = Place(p.buffer, p.at + at, y.width, p.dtype, p.spread)
            at += y.width
