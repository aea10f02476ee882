"""Where a step's time goes, summed from the spans of a timeline: by what the core does, and by sub-layer."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan
from mkgen.simulate.timeline import Span, Timeline

COMPUTE, PAUSE = "compute", "pause"
ORDER = (COMPUTE, "tape", "experts", "cache", "states", "embedding", "exchange", "drain", PAUSE)


@dataclass(frozen=True)
class Part:
    """Seconds of one use of the core's time; what: compute, pause, or the stream or exchange that it waited for."""
    what: str
    seconds: float


@dataclass(frozen=True)
class Row:
    """One sub-layer: seconds by use, times it runs, and HBM bytes of its copies."""
    name: str
    runs: int
    parts: dict[str, float]
    bytes: int

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def use(span: Span) -> str | None:
    """What the core's time went to in this span; None: not of the core."""
    return {"core": COMPUTE, "wait": span.what, "pause": PAUSE}.get(span.track)


def whole(timeline: Timeline) -> list[Part]:
    """Of the step, in a fixed order; the parts add up to its seconds."""
    sums: dict[str, float] = {}
    for s in timeline.spans:
        what = use(s)
        if what:
            sums[what] = sums.get(what, 0.0) + s.seconds
    return [Part(w, sums[w]) for w in sorted(sums, key=place)]


def place(what: str) -> tuple[int, str]:
    return (ORDER.index(what) if what in ORDER else len(ORDER) - 1, what)


def by_region(plan: Plan, timeline: Timeline) -> list[Row]:
    """By the region that spans name, in the order in which they first occur."""
    parts: dict[str, dict[str, float]] = {}
    moved: dict[str, int] = {}
    for s in timeline.spans:
        what = use(s)
        if what:
            row = parts.setdefault(s.where.region, {})
            row[what] = row.get(what, 0.0) + s.seconds
        elif s.track == "hbm":
            moved[s.where.region] = moved.get(s.where.region, 0) + s.bytes
    runs: dict[str, int] = {}
    for _, region in plan.sequence():
        runs[region.name] = runs.get(region.name, 0) + 1
    return [Row(name, runs.get(name, 1), row, moved.get(name, 0)) for name, row in parts.items()]


def by_op(timeline: Timeline, most: int = 14) -> list[tuple[str, str, dict[str, float]]]:
    """(sub-layer, op, seconds by use) of the ops that take most of the step."""
    sums: dict[tuple[str, str], dict[str, float]] = {}
    for s in timeline.spans:
        what = use(s)
        if what:
            row = sums.setdefault((s.where.region, s.where.op), {})
            row[what] = row.get(what, 0.0) + s.seconds
    found = sorted(sums.items(), key=lambda item: -sum(item[1].values()))
    return [(*key, row) for key, row in found[:most]]
