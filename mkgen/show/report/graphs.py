"""Each sub-layer's ops as a drawing: boxes, the values between them, weights, states, and exchanges where values travel."""
from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from mkgen.graph.ir import Op, SubLayer
from mkgen.plan.figures import distinct_experts
from mkgen.plan.plan import Plan
from mkgen.plan.tape import ROW_BYTES
from mkgen.show.report.exchanges import Exchange
from mkgen.show.report.layered import Style, depths, draw
from mkgen.show.report.places import short
from mkgen.show.report.text import size

BOX, HIGH = 120, 40                      # px: an op's box
STYLE = Style(wide=BOX, high=HIGH, gap=12, drop=24, pass_=4, margin=8)
ROOM = 20                                # characters in a box
CARRIED = "carried in"
WEIGHTY = 1 << 20                        # bytes a layer from which on an op's weights are told in its box


@dataclass(frozen=True)
class Box:
    """One op, or a carried value that enters or leaves."""
    name: str
    kind: str                            # the op's kind; 'carried' for a value
    x: float
    y: float
    weights: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    bytes: int = 0                       # of weights, on a core, each time it runs
    exchanges: tuple[Exchange, ...] = ()  # of its output, one after another
    tip: str = ""

    @property
    def sub(self) -> str:
        """The second line: bytes where they count, and the kind where there is room for both."""
        told = size(self.bytes) if self.bytes >= WEIGHTY else ""
        return f"{told} {self.kind}".strip() if len(told) + len(self.kind) < ROOM else told or self.kind


@dataclass(frozen=True)
class Edge:
    path: str                            # of an SVG path
    value: str
    exchanged: bool
    carried: bool


@dataclass(frozen=True)
class Drawing:
    name: str
    role: str
    doc: str
    runs: int
    bytes: int                           # of weights, each time it runs
    flat: bool                           # from left to right
    width: int
    height: int
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]


def drawings(plan: Plan, rows: int, exchanges: list[Exchange]) -> list[Drawing]:
    """One a sub-layer, in the order in which layers first run them."""
    times: dict[str, int] = {}
    for _, region in plan.sequence():
        times[region.name] = times.get(region.name, 0) + 1
    subs = {s.name: s for s in plan.graph.sublayers()}
    held = family_bytes(plan, rows)
    return [drawing(subs[name], n, held, [x for x in exchanges if x.region == name]) for name, n in times.items()]


def family_bytes(plan: Plan, rows: int) -> dict[str, int]:
    """Weight family -> bytes that a core copies for it when its sub-layer runs. A matrix of several families is shared out by
    their columns; routed experts are the expected number of distinct ones."""
    out: dict[str, int] = {}
    for m in plan.matrices.values():
        whole = sum(plan.weights[p.weight].elements for p in m.parts)
        for p in m.parts:
            out[p.weight] = round(m.rows * ROW_BYTES * plan.weights[p.weight].elements / whole)
    for v in plan.vectors.values():
        for w in v.weights:
            out[w] = v.rows * ROW_BYTES // len(v.weights)
    for image in plan.experts:
        each = image.expert_bytes * distinct_experts(plan, image, rows) / len(image.weights)
        out.update((w, round(each)) for w in image.weights)
    return out


def drawing(sub: SubLayer, runs: int, held: dict[str, int], exchanges: list[Exchange]) -> Drawing:
    g = with_carried(sub)
    flat = len(set(depths(g).values())) == len(g)            # a chain: from left to right
    drawn = draw(g, STYLE, flat)
    carried = sorted({v.name for op in sub.ops for v in op.inputs() if v.carried})
    boxes = [box(n, g.nodes[n].get("op"), sub, *drawn.at[n], held, tuple(x for x in exchanges if n in x.after), carried) for n in g.nodes]
    edges = [Edge(drawn.paths[a, b], ", ".join(sorted(d["values"])), any(a in x.after for x in exchanges), a == CARRIED) for a, b, d in g.edges(data=True)]
    return Drawing(sub.name, sub.role, sub.doc, runs, sum(b.bytes for b in boxes), flat, round(drawn.width), round(drawn.height), tuple(boxes), tuple(edges))


def with_carried(sub: SubLayer) -> nx.DiGraph:
    """The ops' graph, and a node that stands for the carried values that enter."""
    g, made = nx.DiGraph(), {}
    for op in sub.ops:
        g.add_node(op.name, op=op)
    for op in sub.ops:
        for v in op.inputs():
            source = made.get(v.name, CARRIED if v.carried else None)
            if source:
                tie(g, source, op.name, v.name)
        made.update((v.name, op.name) for v in op.outputs())
    return g


def tie(g: nx.DiGraph, a: str, b: str, value: str) -> None:
    known = g.edges[a, b]["values"] if g.has_edge(a, b) else frozenset()
    g.add_edge(a, b, values=known | {value.split(".")[-1]})


def box(name: str, op: Op | None, sub: SubLayer, x: float, y: float, held: dict[str, int], exchanges: tuple[Exchange, ...], carried: list[str]) -> Box:
    if op is None:
        return Box(CARRIED, "carried", x, y, tip="from other sub-layers: " + ", ".join(carried))
    weights = tuple(w.name for w in op.weights())
    told = [f"{op.name}: {op.kind}"]
    told += [f"in: {', '.join(f'{v.name} [{v.width}] {v.dtype}' for v in op.inputs())}"] if op.inputs() else []
    told += [f"out: {', '.join(f'{v.name} [{v.width}] {v.dtype}' for v in op.outputs())}"] if op.outputs() else []
    told += [f"weight {w.name} {list(w.shape)}" for w in op.weights()]
    told += [f"state {s.name} {list(s.shape)} {s.dtype}" for s in op.states()]
    return Box(short(name, sub.name), op.kind, x, y, weights, tuple(s.name for s in op.states()), sum(held.get(w, 0) for w in weights),
               exchanges, "\n".join(told))

