"""What a plan says that a rank does, start for start and wait for wait: its regions, expanded over the whole schedule."""

from __future__ import annotations

from typing import NamedTuple

from mkgen.check.findings import Report
from mkgen.check.model import Model
from mkgen.check.refs import BadExpression, View
from mkgen.check.run import AbstractRun
from mkgen.check.scenario import Scenario
from mkgen.check.values import Ledger
from mkgen.plan.regions import Collective, Step


class Copy(NamedTuple):
    """A local copy's start or wait."""

    starts: bool
    where: str
    source: View
    target: View
    semaphore: View


class Stage(NamedTuple):
    """Start or finish of a stage of an exchange: to, or from, each of `peers` a message of `bytes`."""

    starts: bool
    where: str
    peers: int
    bytes: int


class Expansion(AbstractRun):
    """The walk of an abstract run without its rules: only what is started and waited for."""

    def __init__(self, model: Model, scenario: Scenario):
        report = Report()
        super().__init__(model, scenario, Ledger(model.plan, model.moved), report)
        self.events: list[Copy | Stage] = []

    def expand(self) -> list[Copy | Stage]:
        """Raises BadExpression where the plan's text means nothing."""
        self.run()
        return self.events

    def bad(self, where: str, error: BadExpression) -> None:
        raise error

    def copy(self, where: str, name: str, args: tuple, starts: bool) -> None:
        self.events.append(Copy(starts, where, *self.text.copy(name, args)))

    def collective(self, n: Collective, scope: dict) -> None:
        where = self.where(f"{n.kind} {n.part} over {n.stage}")
        self.events.append(Stage(n.part == "start", where, n.peers, n.message_bytes(self.model.rows)))

    def step(self, n: Step, scope: dict) -> None:
        when = n.args.get("when")
        if not isinstance(when, str) or self.text.value(when, scope):
            self.fill_tables(n, scope)

    def advance(self, n, scope: dict) -> None:
        self.g += 1

    def finish(self) -> None:
        """No rules: nothing to say at the end."""
