"""What the checker says: findings, and the report that collects them."""

from __future__ import annotations

from dataclasses import dataclass

MOST = 40  # findings of one plan: one mistake shows in many places


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a plan. `rule` names the check, `where` a region and its op or transfer."""

    rule: str
    where: str
    what: str
    why: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.where}: {self.what} ({self.why})"


class Stop(Exception):
    """Enough was found: the abstract run ends."""


class Report:
    """Findings in the order in which they were made; the same mistake at the same place is told once."""

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, str], Finding] = {}

    def add(self, rule: str, where: str, what: str, why: str) -> None:
        """Raises `Stop` when the report is full."""
        self.seen.setdefault((rule, where, why), Finding(rule, where, what, why))
        if len(self.seen) >= MOST:
            raise Stop

    @property
    def findings(self) -> list[Finding]:
        return list(self.seen.values())
