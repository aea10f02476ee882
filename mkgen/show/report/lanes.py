"""Spans as lanes that a viewer can draw: what overlaps lies side by side, and a wait knows what ended it."""
from __future__ import annotations

import heapq
from dataclasses import dataclass

from mkgen.show.report.needs import NEVER
from mkgen.simulate.timeline import Span, Timeline

TICK = 1e-9                              # s: two moments closer than this are one


@dataclass(frozen=True)
class Bar:
    """A span in a lane of its track. ended: the index of the copy or phase whose arrival ended this wait, -1: none is known.
    needed: of a copy, when the core comes to its wait, in seconds; negative: not known."""
    span: Span
    group: str                           # core | hbm <stream> | link
    lane: int
    ended: int = -1
    needed: float = NEVER

    @property
    def until(self) -> float:
        """When its slot has been read for the first time."""
        return max(self.span.end, self.needed)


def group(span: Span) -> str:
    return {"hbm": f"hbm {span.what}", "link": "link"}.get(span.track, "core")


def bars(timeline: Timeline, needed: tuple[float, ...] = ()) -> list[Bar]:
    """In order of their begin; the bars of one lane never overlap. needed: of each copy, in the order of the timeline (`needs`)."""
    known = dict(zip((id(s) for s in timeline.spans if s.track == "hbm"), needed))
    spans = sorted(timeline.spans, key=lambda s: (s.begin, s.end))
    busy: dict[str, list[tuple[int, int]]] = {}          # (end, lane) of lanes in use
    idle: dict[str, list[int]] = {}
    top: dict[str, int] = {}
    out: list[Bar] = []
    arrivals = {}
    for i, s in enumerate(spans):
        if s.track in ("hbm", "link"):
            arrivals.setdefault(tick(s.end), []).append(i)
    for s in spans:
        name = group(s)
        running, free = busy.setdefault(name, []), idle.setdefault(name, [])
        while running and running[0][0] <= tick(s.begin):
            heapq.heappush(free, heapq.heappop(running)[1])
        if free:
            lane = heapq.heappop(free)
        else:
            lane = top.get(name, 0)
            top[name] = lane + 1
        out.append(Bar(s, name, lane, ender(s, spans, arrivals) if s.track == "wait" else -1, known.get(id(s), NEVER)))
        heapq.heappush(running, (tick(out[-1].until), lane))
    return out


def tick(seconds: float) -> int:
    return round(seconds / TICK)


def ender(wait: Span, spans: list[Span], arrivals: dict[int, list[int]]) -> int:
    """The copy of the stream that was waited for, or the phase of an exchange, that arrived as the wait ended."""
    for t in (0, -1, 1):
        for i in arrivals.get(tick(wait.end) + t, ()):
            s = spans[i]
            if (s.track == "hbm" and s.what == wait.what) or (s.track == "link" and wait.what == "exchange"):
                return i
    return -1


def layer_bands(timeline: Timeline) -> list[tuple[float, float, int | None, str]]:
    """(begin, end, layer, sub-layer) of the core's time, one a run of a sub-layer."""
    out: list[list] = []
    for s in sorted((s for s in timeline.spans if s.track in ("core", "wait", "pause")), key=lambda s: s.begin):
        if out and out[-1][2:] == [s.where.layer, s.where.region]:
            out[-1][1] = s.end
        else:
            out.append([s.begin, s.end, s.where.layer, s.where.region])
    return [tuple(b) for b in out]


def memory_busy(timeline: Timeline, latency: float) -> list[tuple[float, float]]:
    """(begin, end) of the stretches in which HBM serves a copy; a copy arrives `latency` seconds after its last byte was served."""
    out: list[list[float]] = []
    for s in sorted((s for s in timeline.spans if s.track == "hbm"), key=lambda s: s.begin):
        end = max(s.begin, s.end - latency)
        if out and s.begin <= out[-1][1] + TICK:
            out[-1][1] = max(out[-1][1], end)
        else:
            out.append([s.begin, end])
    return [(a, b) for a, b in out]
