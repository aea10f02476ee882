"""A layered drawing of a small directed acyclic graph (the method of Sugiyama, Tagawa and Toda, 1981).

Layers are longest paths from the sources; an edge that skips layers passes through a narrow place in each; layers are
sorted by the barycentres of their neighbours, then places move towards those neighbours as far as their order allows.
"""
from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

SWEEPS = 6


@dataclass(frozen=True)
class Drawn:
    """Left upper corners of the nodes, SVG paths of the edges, and the extent; all in px."""
    at: dict[str, tuple[float, float]]
    paths: dict[tuple[str, str], str]
    width: float
    height: float


@dataclass(frozen=True)
class Style:
    """px: a node's width and height, the gap between nodes of a layer, between layers, a passing edge's width, the margin."""
    wide: float
    high: float
    gap: float
    drop: float
    pass_: float
    margin: float


def draw(g: nx.DiGraph, style: Style, flat: bool = False) -> Drawn:
    """Layers from top to bottom, or flat: from left to right."""
    depth = depths(g)
    full, chains = with_passes(g, depth)
    layers = sort_layers(full)
    across = style.high if flat else style.wide
    middle = spread(full, layers, lambda n: across if n in g else style.pass_, style.gap)
    along, step = (style.wide, style.wide + style.drop) if flat else (style.high, style.high + style.drop)
    low = min(middle[n] - (across if n in g else style.pass_) / 2 for n in full)

    def point(n: str, end: bool) -> tuple[float, float]:
        """Where an edge meets the node: (across, along)."""
        return middle[n] - low + style.margin, style.margin + full.nodes[n]["depth"] * step + (along if end else 0)

    at, paths = {}, {}
    for n in g.nodes:
        c, a = point(n, False)
        at[n] = (a, c - across / 2) if flat else (c - across / 2, a)
    for edge, chain in chains.items():
        bits = []
        for here, there in zip(chain, chain[1:]):
            bits.append(bend(point(here, True), point(there, False), flat, first=not bits))
            if there not in g:
                bits.append(line(point(there, True), flat))
        paths[edge] = "".join(bits)
    extent = max(middle[n] - low + (across if n in g else style.pass_) / 2 for n in full) + 2 * style.margin
    length = 2 * style.margin + (len(layers) - 1) * step + along
    return Drawn(at, paths, *((length, extent) if flat else (extent, length)))


def depths(g: nx.DiGraph) -> dict[str, int]:
    out: dict[str, int] = {}
    for n in nx.topological_sort(g):
        out[n] = max((out[p] + 1 for p in g.predecessors(n)), default=0)
    return out


def with_passes(g: nx.DiGraph, depth: dict[str, int]) -> tuple[nx.DiGraph, dict[tuple[str, str], list[str]]]:
    """The graph with a node wherever an edge passes a layer, and each edge's chain of nodes."""
    full, chains = nx.DiGraph(), {}
    for n in g.nodes:
        full.add_node(n, depth=depth[n])
    for a, b in g.edges:
        passes = [f"{a}|{b}|{d}" for d in range(depth[a] + 1, depth[b])]
        for k, n in enumerate(passes):
            full.add_node(n, depth=depth[a] + 1 + k)
        chains[a, b] = [a, *passes, b]
        nx.add_path(full, chains[a, b])
    return full, chains


def sort_layers(full: nx.DiGraph) -> list[list[str]]:
    layers: list[list[str]] = [[] for _ in range(max(d for _, d in full.nodes(data="depth")) + 1)]
    for n, d in full.nodes(data="depth"):
        layers[d].append(n)
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        place = {n: (i + 0.5) / len(layer) for layer in layers for i, n in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            layer.sort(key=lambda n: mean([place[m] for m in (full.predecessors(n) if down else full.successors(n))], place[n]))
            place.update((n, (i + 0.5) / len(layer)) for i, n in enumerate(layer))
    return layers


def spread(full: nx.DiGraph, layers: list[list[str]], size, gap: float) -> dict[str, float]:
    """Middles across: near the neighbours' on one side, then on the other, at least a gap apart, in order."""
    middle: dict[str, float] = {}
    for layer in layers:
        at = -sum(size(n) + gap for n in layer) / 2
        for n in layer:
            middle[n] = at + size(n) / 2
            at += size(n) + gap
    for sweep in range(2 * SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            want = [mean([middle[m] for m in (full.predecessors(n) if down else full.successors(n))], middle[n]) for n in layer]
            got: list[float] = []
            for i, n in enumerate(layer):
                apart = (size(layer[i - 1]) + size(n)) / 2 + gap if i else 0
                got.append(max(want[i], got[-1] + apart) if i else want[i])
            shift = mean([w - x for w, x in zip(want, got)], 0.0)
            middle.update((n, x + shift) for n, x in zip(layer, got))
    return middle


def mean(values: list[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def bend(a: tuple[float, float], b: tuple[float, float], flat: bool, first: bool) -> str:
    """A curve between two layers; points are (across, along)."""
    half = (a[1] + b[1]) / 2
    points = [a, (a[0], half), (b[0], half), b]
    told = [f"{y:.1f} {x:.1f}" if flat else f"{x:.1f} {y:.1f}" for x, y in points]
    return (f"M{told[0]}" if first else "") + f"C{told[1]} {told[2]} {told[3]}"


def line(to: tuple[float, float], flat: bool) -> str:
    return f"L{to[1]:.1f} {to[0]:.1f}" if flat else f"L{to[0]:.1f} {to[1]:.1f}"
