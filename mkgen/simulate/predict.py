"""How long a step will take, and why: plan -> pieces' cycles -> events of several steps -> their timelines, averaged.

The terms are those of every figure of this project: independent rows, uniform routing with a fixed seed and at least 1,000 draws, each
layer waiting for its busiest rank; dispatch, prologue and every exchange are counted. What a prediction cannot see: docs/simulate.md.
"""
from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from functools import cache

from mkgen.errors import MkgenError
from mkgen.plan.figures import figures
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.profile import Profile, profile_plan
from mkgen.simulate.draws import DRAWS, ROWS, draw_experts, steps_for
from mkgen.simulate.engine import replay
from mkgen.simulate.events import Event, Fetch, Work
from mkgen.simulate.expand import CACHE, STATES, Expansion
from mkgen.simulate.timeline import Timeline

MS, US = 1e3, 1e6
PROBES = 3                               # steps that a sensitivity is measured on


@dataclass(frozen=True)
class Kind:
    """A region's share of a step, microseconds: `times` runs, what the core does and waits for in all of them."""
    name: str
    role: str
    times: int
    us: float
    work_us: float
    wait_us: float

    @property
    def each_us(self) -> float:
        return self.us / self.times


@dataclass(frozen=True)
class Prediction:
    """Of one rows variant. budget: what -> microseconds, which add up to the step; waits: (region, op, for what) -> microseconds."""
    rows: int
    context: int
    tokens: str                          # independent | identical
    predicted_ms: float
    spread_ms: float                     # standard deviation over the simulated steps
    steps: int
    draws: int                           # layers whose experts were drawn
    experts: float                       # of the busiest rank in a layer, the mean
    floor_ms: float                      # true bytes at the HBM's rate
    tokens_per_s: float
    hbm_busy: float                      # fraction of the step in which the memory moves bytes
    hbm_bytes: float
    budget: dict[str, float]
    kinds: tuple[Kind, ...]
    waits: dict[tuple[str, str, str], float]
    timeline: Timeline                   # of the first step
    events: tuple[Event, ...]            # likewise
    steps_a_call: int = 1                # that the host dispatches at once


def predict(plan: Plan, rows: int, *, context: int | None = None, seed: int = 0, draws: int = DRAWS, tokens: str = ROWS,
            host_latency: float = 1.0, steps_a_call: int = 1, profile: Profile | None = None) -> Prediction:
    """Simulates as many steps as have `draws` routing layers, on `rows` active rows at the last position of `context`.
    steps_a_call: each is one of so many that the host dispatches at once, all at that position.

    Raises `MkgenError` (`NotProfiled`) if the compiler refuses a piece."""
    build = plan.spec.build
    context = build.context if context is None else context
    if rows not in build.rows or not 1 <= context <= build.context:
        raise MkgenError(f"{plan.spec.path}: rows {rows} at context {context}; the plan has rows {', '.join(map(str, build.rows))} and context {build.context}"
                         f"\n  fix: --set build.context={context}, or another --rows")
    if not 1 <= steps_a_call <= build.context:
        raise MkgenError(f"{plan.spec.path}: {steps_a_call} steps a call; a row has {build.context} positions\n  fix: --steps of at most that many")
    profile = profile or profile_plan(plan, rows)
    expansion = Expansion(plan, rows, profile, context - 1, steps_a_call)
    counts = draw_experts(plan, rows, steps_for(plan, draws), seed, tokens)
    kept: tuple[tuple[Event, ...], Timeline] | None = None
    totals = Totals()
    for drawn in counts:
        events = expansion.step(drawn.tolist())
        timeline = replay(events, plan.target, host_latency=host_latency)
        kept = kept or (tuple(events), timeline)
        totals.add(timeline)
    return replace(totals.prediction(plan, rows, context, tokens, counts, *kept), steps_a_call=steps_a_call)


class Totals:
    """Sums over timelines."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.budget: dict[str, float] = {}
        self.waits: dict[tuple[str, str, str], float] = {}
        self.regions: dict[str, list[float]] = {}        # work, wait
        self.busy = self.bytes = 0.0

    def add(self, timeline: Timeline) -> None:
        self.seconds.append(timeline.seconds)
        self.busy += timeline.hbm_busy
        self.bytes += timeline.hbm_bytes
        for span in timeline.spans:
            if span.track not in ("core", "wait", "pause"):
                continue
            name = "compute" if span.track == "core" else f"wait: {span.what}" if span.track == "wait" else span.what
            self.budget[name] = self.budget.get(name, 0.0) + span.seconds
            both = self.regions.setdefault(span.where.region, [0.0, 0.0])
            both[span.track != "core"] += span.seconds
            if span.track == "wait":
                key = span.where.region, span.where.op, span.what
                self.waits[key] = self.waits.get(key, 0.0) + span.seconds

    def prediction(self, plan: Plan, rows: int, context: int, tokens: str, counts, events: tuple[Event, ...], timeline: Timeline) -> Prediction:
        n = len(self.seconds)
        mean = sum(self.seconds) / n
        runs: dict[str, int] = {}
        for _, region in plan.sequence():
            runs[region.name] = runs.get(region.name, 0) + 1
        roles = {r.name: r.role for r in plan.regions.values()}
        kinds = tuple(Kind(name, roles.get(name, "begin"), runs.get(name, 1), (work + wait) / n * US, work / n * US, wait / n * US)
                      for name, (work, wait) in self.regions.items())
        us = {name: s / n * US for name, s in sorted(self.budget.items(), key=lambda i: -i[1])}
        return Prediction(
            rows, context, tokens, mean * MS, statistics.pstdev(self.seconds) * MS, n, counts[..., 0].size, float(counts[..., 0].mean()) if counts.size else 0.0,
            floor_seconds(plan, rows, events) * MS, rows / mean, self.busy / n / mean, self.bytes / n, us, kinds,
            {key: s / n * US for key, s in sorted(self.waits.items(), key=lambda i: -i[1])}, timeline, events)


def floor_seconds(plan: Plan, rows: int, events: tuple[Event, ...]) -> float:
    """True bytes of a step, without padding, at the rate that the HBM reaches: weights with the experts of the mean rank, and what
    the events read and write of states and caches."""
    states = sum(e.bytes for e in events if isinstance(e, Fetch) and e.stream in (CACHE, STATES))
    return (figures(plan, rows)["true_bytes_per_step"] + states) / plan.target.hbm_bytes_per_s


# -- what if ------------------------------------------------------------------------------------------------------------

def sensitivity(plan: Plan, rows: int, *, context: int | None = None, seed: int = 0, tokens: str = ROWS,
                host_latency: float = 1.0, steps_a_call: int = 1) -> dict[str, float | str]:
    """What -> change of the step in microseconds, on the same draws; or why it cannot be had. Slots: beside this variant alone."""
    context = plan.spec.build.context if context is None else context
    counts = draw_experts(plan, rows, PROBES, seed, tokens)

    def mean(made: Plan, change=lambda events: events, **scales) -> float:
        expansion = Expansion(made, rows, profile_plan(made, rows), context - 1, steps_a_call)
        return sum(replay(change(expansion.step(c.tolist())), made.target, **({"host_latency": host_latency} | scales)).seconds
                   for c in counts) / len(counts) * US

    def alone(**more: int) -> Plan:
        build = plan.spec.build
        spec = replace(plan.spec, build=replace(build, rows=(rows,), **{name: getattr(build, name) + n for name, n in more.items()}))
        return make_plan(spec, plan.graph, plan.target)

    def deeper(**more: int) -> float | str:
        try:
            made = alone(**more)
        except MkgenError as error:
            return str(error).split("\n")[0].removeprefix(f"{plan.spec.path}: ")
        return mean(made) - shallow() if (made.ring_depth, made.spec.build.expert_slots) != (plan.ring_depth, plan.spec.build.expert_slots) else 0.0

    @cache
    def shallow() -> float:
        """Of this variant alone: the others may have decided how ranks exchange."""
        return mean(alone()) if len(plan.spec.build.rows) > 1 else base

    base = mean(plan)
    out: dict[str, float | str] = {
        "10 % more HBM bandwidth": mean(plan, hbm=1.1) - base,
        "half the latency of exchanges": mean(plan, latency=0.5) - base,
        "no time for exchanges but the bytes'": mean(plan, latency=0.0) - base,
        "compute twice as fast": mean(plan, lambda events: [replace(e, cycles=e.cycles / 2) if isinstance(e, Work) else e for e in events]) - base,
        "one more ring slot": deeper(ring_depth=1),
    }
    if plan.experts:
        out["one more expert slot"] = deeper(expert_slots=1)
    return out
