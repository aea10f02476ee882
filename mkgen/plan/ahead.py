"""Tiles of a positional cache that are read ahead: the sub-layer in front starts a cache's first ones, beside its last exchange.

Which tiles these are depends on the positions alone. Started at the beginning of their own sub-layer they would be waited for if it
reads few weights in front of them: a copy takes a microsecond however small it is. An exchange in front of them is time enough.
"""
from __future__ import annotations

from dataclasses import replace

from mkgen.graph.ir import LayerGraph
from mkgen.plan.plan import Region
from mkgen.plan.regions import Collective, Loop, Node, Seq, Start, Wait, walk

END, MIXED = "the end", "not always the last"


def read_ahead(graph: LayerGraph, regions: dict[str, Region]) -> tuple[dict[str, Region], list[str]]:
    """The regions, each first tile started as early as it may be; the mixers whose tiles are read ahead."""
    out, follows, kinds = dict(regions), followers(graph), list(graph.mixers)
    moved = {name: loop for name in kinds if name not in follows.get(MIXED, ()) and (loop := hurried(regions[name]))}
    for name, loop in moved.items():
        out[name] = with_nodes(out[name], [n for n in regions[name].body.nodes if n is not loop])
    for place, after in follows.items():
        for name in (n for n in moved if n in after):
            out[place] = with_nodes(out[place], beside_exchange(out[place], started(moved[name], place, after, name, kinds)))
    return out, list(moved)


def followers(graph: LayerGraph) -> dict[str, set[str | None]]:
    """Sub-layer that is its layer's last, or begins the step -> the mixers of the layers behind it; None: a layer without one. MIXED:
    those behind a mixer that is the last in some layers only, which it cannot know."""
    last = ["begin", *(ffn or mixer for mixer, ffn in graph.layers)]
    inner = {mixer for mixer, ffn in graph.layers if ffn}
    out: dict[str, set[str | None]] = {}
    for place, after in zip(last, [*(mixer for mixer, _ in graph.layers), END]):
        out.setdefault(MIXED if place in inner else place, set()).add(after)
    return out


def hurried(region: Region) -> Loop | None:
    """The loop that starts the mixer's first tiles, if no exchange comes in front of the wait for them."""
    nodes = region.body.nodes
    loop = next((n for n in nodes if isinstance(n, Loop) and n.name.startswith("first_") and n.name.endswith("_tile_copy")), None)
    if loop is None:
        return None
    needed = next(i for i, n in enumerate(nodes) if waits_for(n, loop.body[0].transfer))
    return None if any(isinstance(n, Collective) for n in nodes[:needed]) else loop


def started(loop: Loop, place: str, after: set, name: str, kinds: list[str]) -> Loop:
    """The loop, as it stands in the sub-layer `place`, which the mixers `after` may follow."""
    copy = loop.body[0].transfer
    if place == "begin":
        return replace(loop, doc="the first layer's first tiles", body=(Start(copy, ("m", "m.facts[MIXER_INDEX]", "i")),))
    due = "" if after == {name} else "layer + 1 < LAYERS" if after == {name, END} else f"comes_next(m, layer, {kinds.index(name)})"
    trips, index = f"jnp.where({due}, {loop.trips}, 0)" if due else loop.trips, "m.facts[(layer + 1) * FACTS + MIXER_INDEX]"
    return replace(loop, doc="the next layer's first tiles", trips=trips, body=(Start(copy, ("m", index, "i")),))


def beside_exchange(region: Region, loop: Loop) -> list[Node]:
    """In front of the finish of the sub-layer's last exchange; behind all if there is none, or tiles of its own come later."""
    nodes = list(region.body.nodes)
    at = max((i for i, n in enumerate(nodes) if isinstance(n, Collective) and (n.part, n.round) == ("finish", 0)), default=len(nodes))
    if any(isinstance(x, Wait) and x.transfer.endswith("_tile_copy") for n in nodes[at:] for x in walk(n)):
        at = len(nodes)
    return [*nodes[:at], loop, *nodes[at:]]


def waits_for(node: Node, transfer: str) -> bool:
    return any(isinstance(n, Wait) and n.transfer == transfer for n in walk(node))


def with_nodes(region: Region, nodes: list[Node]) -> Region:
    return replace(region, body=Seq(tuple(nodes)))
