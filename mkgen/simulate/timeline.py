"""What a replay gives: who was busy when, and what each wait was for. `report`, `trace` and the tables read nothing else."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.simulate.events import Where


@dataclass(frozen=True)
class Span:
    """One stretch of time, in seconds from the start of the step.

    track: core (it computes), wait (it waits: `what` says for which copy or exchange), hbm (a copy, from its start to its
    arrival), link (a phase of an exchange, from its sends to its last message), pause (dispatch, loop).
    served: hbm only, seconds that the memory alone would take for these bytes; the rest is queueing behind other copies."""
    track: str
    begin: float
    end: float
    what: str                            # work: the op; hbm: the stream; wait: 'tape', 'experts', 'exchange', ...
    where: Where
    bytes: int = 0
    served: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.begin


@dataclass(frozen=True)
class Timeline:
    """One step. core, wait and pause spans follow one another without gap or overlap and end at `seconds`."""
    spans: tuple[Span, ...]
    seconds: float
    hbm_bytes: int                       # read and written
    hbm_busy: float                      # seconds in which the memory was moving bytes

    def track(self, name: str) -> list[Span]:
        return [s for s in self.spans if s.track == name]

    def total(self, track: str, what: str | None = None) -> float:
        return sum(s.seconds for s in self.spans if s.track == track and what in (None, s.what))
