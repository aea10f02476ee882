"""Each sub-layer's ops as a drawing: boxes in layers from top to bottom, edges as curves, exchanges where values travel.

Layers are the longest path from the top; in a layer, ops are sorted by where their neighbours stand (barycentres), a few
sweeps down and up. The graphs are small (one sub-layer), so that this is enough to leave few crossings.
"""
from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from mkgen.graph.ir import Op, SubLayer
from mkgen.plan.figures import distinct_experts
from mkgen.plan.plan import Plan
from mkgen.plan.tape import ROW_BYTES
from mkgen.show.report.exchanges import Exchange
from mkgen.show.report.places import short

BOX, HIGH, GAP, DROP, MARGIN = 132, 40, 14, 26, 8        # px: box width and height, between boxes, between layers, around
SWEEPS = 4
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
    exchange: Exchange | None = None     # of its output
    tip: str = ""


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
    return [drawing(subs[name], n, held, {x.after: x for x in exchanges if x.region == name}) for name, n in times.items()]


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


def drawing(sub: SubLayer, runs: int, held: dict[str, int], exchanges: dict[str, Exchange]) -> Drawing:
    g = with_carried(sub)
    ranks = ordered(g)
    wide = max(len(r) for r in ranks)
    width = wide * BOX + (wide - 1) * GAP + 2 * MARGIN
    at: dict[str, tuple[float, float]] = {}
    for depth, rank in enumerate(ranks):
        span = len(rank) * BOX + (len(rank) - 1) * GAP
        for i, n in enumerate(rank):
            at[n] = ((width - span) / 2 + i * (BOX + GAP), MARGIN + depth * (HIGH + DROP))
    boxes = [box(n, g.nodes[n].get("op"), sub, *at[n], held, exchanges.get(n)) for n in g.nodes]
    edges = [Edge(curve(at[a], at[b]), ", ".join(sorted(d["values"])), a in exchanges, "op" not in g.nodes[a] or "op" not in g.nodes[b])
             for a, b, d in g.edges(data=True)]
    height = len(ranks) * (HIGH + DROP) - DROP + 2 * MARGIN
    return Drawing(sub.name, sub.role, sub.doc, runs, sum(b.bytes for b in boxes), width, height, tuple(boxes), tuple(edges))


def with_carried(sub: SubLayer) -> nx.DiGraph:
    """The ops' graph, and a node for all carried values that enter, one for those that leave."""
    g, made = nx.DiGraph(), {}
    for op in sub.ops:
        g.add_node(op.name, op=op)
    for op in sub.ops:
        for v in op.inputs():
            source = made.get(v.name)
            if source is None and v.carried:
                source = "in"
                g.add_node("in", values=g.nodes.get("in", {}).get("values", frozenset()) | {v.name})
            if source:
                tie(g, source, op.name, v.name)
        made.update((v.name, op.name) for v in op.outputs())
    return g


def tie(g: nx.DiGraph, a: str, b: str, value: str) -> None:
    known = g.edges[a, b]["values"] if g.has_edge(a, b) else frozenset()
    g.add_edge(a, b, values=known | {value.split(".")[-1]})


def ordered(g: nx.DiGraph) -> list[list[str]]:
    """Nodes layer by layer, each layer from left to right."""
    depth: dict[str, int] = {}
    for n in nx.topological_sort(g):
        depth[n] = max((depth[p] + 1 for p in g.predecessors(n)), default=0)
    ranks: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for n in g.nodes:
        ranks[depth[n]].append(n)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        place = {n: (i + 0.5) / len(r) for r in ranks for i, n in enumerate(r)}
        for rank in ranks if down else reversed(ranks):
            def key(n: str) -> float:
                near = list(g.predecessors(n) if down else g.successors(n))
                return sum(place[m] for m in near) / len(near) if near else place[n]
            rank.sort(key=key)
            place.update((n, (i + 0.5) / len(rank)) for i, n in enumerate(rank))
    return ranks


def box(name: str, op: Op | None, sub: SubLayer, x: float, y: float, held: dict[str, int], exchange: Exchange | None) -> Box:
    if op is None:
        return Box("residual stream", "carried", x, y, tip="values that live from sub-layer to sub-layer")
    weights = tuple(w.name for w in op.weights())
    told = [f"{op.name}: {op.kind}"]
    told += [f"in: {', '.join(f'{v.name} [{v.width}] {v.dtype}' for v in op.inputs())}"] if op.inputs() else []
    told += [f"out: {', '.join(f'{v.name} [{v.width}] {v.dtype}' for v in op.outputs())}"] if op.outputs() else []
    told += [f"weight {w.name} {list(w.shape)}" for w in op.weights()]
    told += [f"state {s.name} {list(s.shape)} {s.dtype}" for s in op.states()]
    return Box(short(name, sub.name), op.kind, x, y, weights, tuple(s.name for s in op.states()), sum(held.get(w, 0) for w in weights),
               exchange, "\n".join(told))


def curve(a: tuple[float, float], b: tuple[float, float]) -> str:
    """From the bottom of a box to the top of another; one that skips layers bends out beside the boxes between."""
    (x0, y0), (x1, y1) = (a[0] + BOX / 2, a[1] + HIGH), (b[0] + BOX / 2, b[1])
    if y1 - y0 <= DROP + 1:
        mid = (y0 + y1) / 2
        return f"M{x0:.1f} {y0:.1f}C{x0:.1f} {mid:.1f} {x1:.1f} {mid:.1f} {x1:.1f} {y1:.1f}"
    side = BOX / 2 + GAP / 2
    lane = max(x0, x1) + side if abs(x0 - x1) < 1 else (x0 + x1) / 2
    lane = x0 + side if abs(x0 - x1) < 1 else lane
    bend = DROP
    return (f"M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 + bend:.1f} {lane:.1f} {y0:.1f} {lane:.1f} {y0 + bend:.1f}"
            f"L{lane:.1f} {y1 - bend:.1f}C{lane:.1f} {y1:.1f} {x1:.1f} {y1 - bend:.1f} {x1:.1f} {y1:.1f}")
