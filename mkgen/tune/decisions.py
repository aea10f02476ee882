"""What each knob of the chosen build gives: against the spec's own value, and against the best other value, all else as chosen."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.tune.space import Dimension
from mkgen.tune.trial import Bench, Trial

US = 1e3                                 # microseconds in a millisecond


@dataclass(frozen=True)
class Decision:
    """One knob. gained: rows -> microseconds that the own value would cost beside the rest; costs: that the best alternative would.

    None: it could not be tried (`why`), or there was no time."""
    name: str
    keys: tuple[str, ...]
    own: str
    chosen: str
    gained: dict[int, float] | None
    alternative: str | None
    costs: dict[int, float] | None
    why: str = ""

    @property
    def changed(self) -> bool:
        return self.own != self.chosen


def decide(bench: Bench, dims: list[Dimension], best: Trial) -> list[Decision]:
    """One for each dimension, changed or kept; what is not known yet is tried, the own values first, as long as there is time."""
    backs = bench.try_many([d.to(best.build, d.of(bench.base.build)) for d in dims])
    bench.try_many([build for d in dims for _, build in d.neighbours(best.build)])
    return [decision(bench, d, best, back) for d, back in zip(dims, backs)]


def decision(bench: Bench, d: Dimension, best: Trial, back: Trial | None) -> Decision:
    own, chosen = d.of(bench.base.build), d.of(best.build)
    others = [(value, t) for (value, _), t in zip(d.neighbours(best.build), bench.try_many([b for _, b in d.neighbours(best.build)], 0.0))
              if t is not None and t.good and t.plan != best.plan]             # another way to say the same is no alternative
    value, other = min(others, key=lambda o: bench.score(o[1]), default=(None, None))
    why = "" if own == chosen else "not tried: no time" if back is None else back.refused or ""
    return Decision(d.name, d.keys, d.text(own), d.text(chosen), more(best, back), None if other is None else d.text(value), more(best, other), why)


def more(best: Trial, other: Trial | None) -> dict[int, float] | None:
    """Microseconds that `other` takes longer."""
    return None if other is None or not other.good else {r: (other.ms[r] - ms) * US for r, ms in best.ms.items()}


def microseconds(by_rows: dict[int, float]) -> str:
    return ", ".join(f"{us:+,.1f} us" + (f" at {r} rows" if len(by_rows) > 1 else "") for r, us in by_rows.items())
