"""A predicted step as the page shows it; or why there is none."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.errors import MkgenError
from mkgen.plan.plan import Plan
from mkgen.simulate.timeline import Timeline


@dataclass(frozen=True)
class Change:
    """What the step would take if one thing were different."""
    what: str
    ms: float


@dataclass(frozen=True)
class Forecast:
    """timeline: one step; floor_ms: what nothing can be faster than, and `floor` says of what it is made."""
    timeline: Timeline
    predicted_ms: float
    floor_ms: float
    floor: str
    changes: tuple[Change, ...] = ()
    notes: tuple[str, ...] = ()


def forecast(plan: Plan, rows: int) -> Forecast:
    """What the simulator says. Raises `MkgenError` where no step can be predicted."""
    raise MkgenError("no profile of the generated kernel: its cycles are not known")
