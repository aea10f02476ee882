"""A predicted step as the page shows it; or why there is none."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan
from mkgen.show.report.budget import Part, place, whole
from mkgen.show.report.needs import needs
from mkgen.simulate.timeline import Timeline

WAIT = "wait: "                          # in front of a stream, in the names of a prediction's budget
MOST_WAITS = 12


@dataclass(frozen=True)
class Change:
    """What the step would take if one thing were different, or why that cannot be."""
    what: str
    ms: float
    why_not: str = ""


@dataclass(frozen=True)
class Waits:
    """All waits of one op for one stream or for exchanges: seconds a step."""
    region: str
    op: str
    what: str
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """predicted_ms and parts are means over the simulated steps, timeline is one of them. floor_ms: what nothing can be faster
    than, and `floor` says of what it is made."""
    timeline: Timeline
    predicted_ms: float
    floor_ms: float
    floor: str
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()
    means: tuple[Part, ...] = ()
    waits: tuple[Waits, ...] = ()
    needed: tuple[float, ...] = ()       # of each copy of the timeline (`needs`)

    @property
    def parts(self) -> tuple[Part, ...]:
        return self.means or tuple(whole(self.timeline))


def forecast(plan: Plan, rows: int, at: int | None = None, host_latency: float = 1.0, changes: bool = True) -> Forecast:
    """What the simulator says of a step at `at` tokens a row (None: the whole context). changes: whether to ask what would be if.

    Raises `MkgenError` where no step can be predicted."""
    from mkgen.simulate.predict import predict, sensitivity
    p = predict(plan, rows, context=at, host_latency=host_latency)
    probed = sensitivity(plan, rows, context=at, host_latency=host_latency) if changes else {}
    asked = tuple(Change(what, p.predicted_ms, by) if isinstance(by, str) else Change(what, p.predicted_ms + by / 1e3) for what, by in probed.items())
    means: dict[str, float] = {}
    for what, us in p.budget.items():
        name = what.removeprefix(WAIT) if what.startswith(WAIT) or what == "compute" else "pause"
        means[name] = means.get(name, 0.0) + us / 1e6
    waits = [Waits(*key, us / 1e6) for key, us in p.waits.items()]
    hosts = f" Exchanges between hosts take {host_latency:g} times the latency within one." if host_latency != 1.0 else ""
    notes = [f"{p.context:,} tokens a row.{hosts} Mean of {p.steps} simulated steps, ± {p.spread_ms:.3f} ms; the step shown below is the first of them, {p.timeline.seconds * 1e3:.3f} ms."]
    if p.draws:
        notes.append(f"Routing: {p.tokens} rows, uniform, {p.draws:,} layers drawn with a fixed seed; the busiest rank of a layer runs {p.experts:.2f} experts.")
    return Forecast(p.timeline, p.predicted_ms, p.floor_ms, "true bytes at HBM rate", asked, tuple(notes),
                    tuple(Part(n, means[n]) for n in sorted(means, key=place)), tuple(sorted(waits, key=lambda w: -w.seconds)[:MOST_WAITS]),
                    needs(p.events, p.timeline, plan.target))
