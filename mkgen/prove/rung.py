"""One line of the proof."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rung:
    """name, what was compared, how far off; error and bound are None where the answer is yes or no."""

    name: str
    compared: str
    error: float | None
    bound: float | None
    verdict: str  # pass | fail | skipped
    reason: str = ""

    def as_dict(self) -> dict:
        return dict(self.__dict__)


def judge(name: str, compared: str, error: float, bound: float, reason: str = "") -> Rung:
    """Passes if error <= bound; an error that is no number fails."""
    return Rung(name, compared, float(error), bound, "pass" if error <= bound else "fail", reason)


def answer(name: str, compared: str, bad: list[str]) -> Rung:
    """Passes if nothing is bad."""
    return Rung(name, compared, None, None, "fail" if bad else "pass", "; ".join(bad[:4]))
