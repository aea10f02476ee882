"""A timeline as columns of whole numbers for the page's canvas: nanoseconds, and indices into lists of names."""
from __future__ import annotations

from typing import Any

from mkgen.plan.plan import Plan
from mkgen.show.report.lanes import Bar, bars, layer_bands, memory_busy
from mkgen.show.report.lives import Vmem
from mkgen.show.report.places import EXCHANGE
from mkgen.simulate.timeline import Timeline

NS = 1e9
SHORT = {"embedding": "embed"}


class Names(dict):
    """name -> its index, in the order in which they were asked for."""

    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def canvas(plan: Plan, timeline: Timeline, vmem: Vmem, needed: tuple[float, ...] = ()) -> dict[str, Any]:
    """What the page's script draws. `b` are differences from bar to bar; `e`: the bar that ended a wait, or -1;
    `f`: how long after its arrival a copy is wanted, negative where the core waits for it, null where that is not known."""
    all_bars = bars(timeline, needed)
    ops, regions, whats, groups = Names(), Names(), Names(), group_rows(all_bars)
    index = {g["key"]: i for i, g in enumerate(groups)}
    begins = [round(b.span.begin * NS) for b in all_bars]
    tracks = ("core", "wait", "pause", "hbm", "link")
    bands = [[round(a * NS), round(b * NS), -1 if layer is None else layer, regions[name]] for a, b, layer, name in layer_bands(timeline)]
    steps = live_bytes(timeline, vmem)
    return {
        "end": round(timeline.seconds * NS), "groups": groups,
        "b": [b - a for a, b in zip([0, *begins], begins)],
        "d": [round(x.span.end * NS) - b for x, b in zip(all_bars, begins)],
        "t": [tracks.index(x.span.track) for x in all_bars],
        "g": [index[x.group] for x in all_bars], "l": [x.lane for x in all_bars],
        "w": [whats[x.span.what if x.span.track != "core" else "compute"] for x in all_bars],
        "o": [ops[x.span.where.op] for x in all_bars], "r": [regions[x.span.where.region] for x in all_bars],
        "n": [-1 if x.span.where.layer is None else x.span.where.layer for x in all_bars],
        "y": [x.span.bytes for x in all_bars], "s": [round(x.span.served * NS) for x in all_bars], "e": [x.ended for x in all_bars],
        "f": [round((x.needed - x.span.end) * NS) if x.needed >= 0 else None for x in all_bars],
        "ops": list(ops), "regions": list(regions), "whats": list(whats), "tracks": list(tracks), "bands": bands,
        "busy": [round(t * NS) for pair in memory_busy(timeline, plan.target.dma_latency_s) for t in pair],
        "latency": round(plan.target.dma_latency_s * NS), "windows": windows(plan, timeline), "budget": vmem.budget,
        "live": [[round(t * NS) for t, _ in steps], [v for _, v in steps]],
    }


def live_bytes(timeline: Timeline, vmem: Vmem) -> list[tuple[float, int]]:
    """(moment, live VMEM bytes from there on): the places of a sub-layer are followed as the core goes through its ops."""
    found: list[tuple[float, int]] = []
    first = {region: at for region, at, _ in region_columns(vmem.places)}
    run, now = None, 0
    for s in sorted((s for s in timeline.spans if s.track in ("core", "wait")), key=lambda s: s.begin):
        region = s.where.region
        if region not in first:
            continue                     # the prologue
        if run != (s.where.layer, region):
            run, now = (s.where.layer, region), first[region]
        now = next_place(vmem.places, region, s.where.op, now, first[region])
        if not found or found[-1][1] != vmem.totals[now]:
            found.append((s.begin, vmem.totals[now]))
    return found


def next_place(places: tuple[tuple[str, str], ...], region: str, op: str, now: int, first: int) -> int:
    """The op's place at or behind `now`; in a loop, the one before it; where it has none (a copy by itself), `now`.

    A span of several ops, `first..last`, stands at the first of them."""
    mine = [i for i in range(first, len(places)) if places[i][0] == region]
    wanted = EXCHANGE if op.endswith((", start", ", finish")) else op.split("..")[0]
    return next((i for i in mine if i >= now and places[i][1] == wanted), next((i for i in reversed(mine) if places[i][1] == wanted), now))


def region_columns(places: tuple[tuple[str, str], ...]) -> list[tuple[str, int, int]]:
    """(sub-layer, first place, places)."""
    out: list[list] = []
    for i, (region, _) in enumerate(places):
        if out and out[-1][0] == region:
            out[-1][2] += 1
        else:
            out.append([region, i, 1])
    return [tuple(x) for x in out]


def group_rows(all_bars: list[Bar]) -> list[dict[str, Any]]:
    """The drawn rows from top to bottom: the core, the links, then each stream of HBM copies by its bytes."""
    lanes: dict[str, int] = {}
    moved: dict[str, int] = {}
    for x in all_bars:
        lanes[x.group] = max(lanes.get(x.group, 0), x.lane + 1)
        moved[x.group] = moved.get(x.group, 0) + x.span.bytes
    order = sorted(lanes, key=lambda g: (g != "core", g != "link", -moved[g]))
    return [{"key": g, "label": label(g), "what": g.removeprefix("hbm "), "lanes": lanes[g]} for g in order]


def label(key: str) -> str:
    stream = key.removeprefix("hbm ")
    return {"core": "core", "link": "links"}.get(key, f"HBM {SHORT.get(stream, stream)}")


def windows(plan: Plan, timeline: Timeline) -> list[dict[str, Any]]:
    """One a distinct kind of layer: a turn from the middle of the step, and the layer that follows, for the back edge."""
    spans: dict[int, list[float]] = {}
    for begin, end, layer, _ in layer_bands(timeline):
        if layer is not None:
            known = spans.setdefault(layer, [begin, end])
            known[1] = end
    kinds: dict[tuple, list[int]] = {}
    for n, kind in enumerate(plan.graph.layers):
        if n in spans:
            kinds.setdefault(kind, []).append(n)
    out = []
    for kind, layers in sorted(kinds.items(), key=lambda item: -len(item[1])):
        n = layers[len(layers) // 2]
        last = spans.get(n + 1, spans[n])
        name = " + ".join(k for k in kind if k)
        out.append({"label": name, "layer": n, "b": round(spans[n][0] * NS), "e": round(last[1] * NS), "count": len(layers)})
    return out
