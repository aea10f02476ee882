"""The graph's vocabulary on one page: values, weights, states, ops, and the sub-layers that they form.

A graph is logical: whole widths, no shards, no tiles. An op says what it reads and makes, which weights and states it uses,
what it costs, where it rounds, and what it means (a plain JAX function). How it runs is written next to it (`lower`), against
a builder that the plan provides; the graph itself imports nothing of the plan.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import networkx as nx


@dataclass(frozen=True)
class Value:
    """`width` features a row. A value whose dtype is bf16 is rounded once, where it is made.

    `units`: the number of equal pieces (heads, or single columns) that may lie on different ranks. `groups`: as of a Weight."""
    name: str
    width: int
    dtype: str = "bf16"
    units: int = 1
    groups: int = 0
    carried: bool = False                # lives from sub-layer to sub-layer (the residual stream)
    partial: bool = False                # carried as one term a rank of a sum over the ranks
    planes: int = 0                      # copies a row (the snapshots of a residual scheme); 0: one, without an axis of its own


@dataclass(frozen=True)
class Weight:
    """A weight family. `roles` are checkpoint roles; `assemble` names the rule in `weights.py` that makes the logical array.

    matrix [K, N], vector [n], taps [taps, n], experts [E, K, N].  `split` is the axis that is shared out over the ranks
    in `units` equal pieces when the family is sharded (None: always whole). `groups`: the units form that many equal runs
    that no rank mixes, for instance query heads by their KV head; a unit that is a group of its own is repeated where there
    are fewer than ranks. 0: units stand alone, and the family is whole on every rank where there are fewer than ranks."""
    name: str
    shape: tuple[int, ...]
    roles: tuple[str, ...]
    assemble: str
    dtype: str = "bf16"
    split: int | None = None
    units: int = 1
    groups: int = 0

    @property
    def once(self) -> bool:
        """Shared out along K: no unit is repeated, for the ranks' products are added up."""
        return self.split == 0 and len(self.shape) == 2

    @property
    def elements(self) -> int:
        n = 1
        for s in self.shape:
            n *= s
        return n


@dataclass(frozen=True)
class State:
    """What a sequence keeps between steps, per layer and row. positional: one entry a token; otherwise overwritten."""
    name: str
    shape: tuple[int, ...]
    dtype: str
    positional: bool = False


@dataclass(frozen=True)
class Cost:
    """Per row: floating-point operations; bytes are the plan's business."""
    flops: int = 0


@dataclass(frozen=True)
class Op:
    """Base of all ops. `whole` inputs must be complete on every rank; outputs are `like` the input, `whole`, `split` or `partial`."""
    name: str
    kind: ClassVar[str] = ""
    rounds: ClassVar[str] = ""           # the rounding points, in words
    ahead: ClassVar[bool] = False        # reads what lies first among the weights of the next sub-layer
    columnwise: ClassVar[bool] = False   # treats each column alone: inputs that are split alike need not be whole

    def inputs(self) -> tuple[Value, ...]:
        raise TypeError(f"{type(self).__name__} states no inputs")

    def outputs(self) -> tuple[Value, ...]:
        raise TypeError(f"{type(self).__name__} states no outputs")

    def changes(self) -> tuple[Value, ...]:
        """Carried values that the op makes or changes for later sub-layers, beyond its outputs: steps of the op write each of them."""
        return ()

    def weights(self) -> tuple[Weight, ...]:
        return ()

    def states(self) -> tuple[State, ...]:
        return ()

    def cost(self) -> Cost:
        return Cost()

    def by_rows(self, ranks: int) -> bool:
        """Can rows be shared out over the ranks: does the op treat each row alone, and take it as `ranks` equal runs of columns?"""
        return False

    def needs(self, spread: dict[str, str]) -> dict[str, str]:
        """input name -> 'whole' where it must be complete; missing: any spread will do."""
        return {v.name: "whole" for v in self.inputs()}

    def gives(self, spread: dict[str, str]) -> dict[str, str]:
        """output name -> 'whole' | 'split' | 'partial' | 'rows', from the spread of the inputs (and of the weights)."""
        return {v.name: "whole" for v in self.outputs()}

    def meaning(self, env: Any) -> None:
        raise TypeError(f"{type(self).__name__} has no meaning")

    def lower(self, b: Any) -> None:
        raise TypeError(f"{type(self).__name__} has no lowering")


@dataclass(frozen=True)
class SubLayer:
    """One function of the generated kernel: a mixer, an ffn, or the ends. `graph` is a DiGraph of op names with attribute `op`."""
    name: str
    role: str                            # mixer | ffn | begin | end
    ops: tuple[Op, ...]
    doc: str = ""

    @property
    def graph(self) -> nx.DiGraph:
        g, made = nx.DiGraph(), {}
        for op in self.ops:
            g.add_node(op.name, op=op)
            for v in op.inputs():
                if v.name in made:
                    g.add_edge(made[v.name], op.name, value=v)
            for v in op.outputs():
                made[v.name] = op.name
        return g

    def order(self) -> list[Op]:
        """Topological, ties in the order of writing: the order in which the tape is consumed."""
        g = self.graph
        place = {op.name: i for i, op in enumerate(self.ops)}
        return [g.nodes[n]["op"] for n in nx.lexicographical_topological_sort(g, key=place.__getitem__)]


@dataclass(frozen=True)
class LayerGraph:
    """The whole model: the ends, one sub-layer a distinct kind, and the table that says which layer runs which."""
    begin: SubLayer
    mixers: dict[str, SubLayer]
    ffns: dict[str, SubLayer]
    end: SubLayer
    layers: tuple[tuple[str | None, str | None], ...]
    facts: dict[str, tuple[int, ...]] = field(default_factory=dict)      # per-layer data, name -> one int a layer

    def sublayers(self) -> list[SubLayer]:
        return [self.begin, *self.mixers.values(), *self.ffns.values(), self.end]

    def runs(self, sub: SubLayer) -> int:
        """How often a step runs the sub-layer."""
        kinds = {"mixer": self.mixers, "ffn": self.ffns}.get(sub.role)
        return 1 if kinds is None else sum(kinds.get(name) is sub for layer in self.layers for name in layer)

    def kind_index(self) -> list[tuple[int, int]]:
        """Per layer: how many earlier layers had the same mixer, and the same ffn."""
        seen: dict[str, int] = {}
        out = []
        for mixer, ffn in self.layers:
            out.append((seen.get(f"m.{mixer}", 0), seen.get(f"f.{ffn}", 0)))
            seen[f"m.{mixer}"] = out[-1][0] + 1
            seen[f"f.{ffn}"] = out[-1][1] + 1
        return out
