"""Runs a control slice with the numbers of a scenario and writes down what it does: one rank's trace of a kernel."""

from __future__ import annotations

from typing import NamedTuple

from mkgen.check.model import Model
from mkgen.check.refs import Box
from mkgen.check.scenario import Scenario, lone_row
from mkgen.prove.program import Program

Spot = tuple[str, Box]  # a box of a buffer; () of a semaphore that has no dimensions


class Event(NamedTuple):
    """what: start | wait | send | read | write | signal | await. place: where it reads or writes; of a copy its target.

    sent: the semaphore of a send's own side. peer: who gets the message or the signal; count: of a signal."""

    what: str
    place: Spot
    source: Spot | None = None
    semaphore: Spot | None = None
    sent: Spot | None = None
    peer: int | None = None
    count: int = 0


class Stuck(Exception):
    """The kernel does what no kernel may: reads a table that is not written, breaks a promise, or goes where data says."""


def run_program(program: Program, model: Model, scenario: Scenario) -> list[Event]:
    """The trace of the scenario's rank, from the kernel's first instruction to its last. Raises Stuck."""
    machine = Machine(program, model, scenario)
    calls = {
        name: getattr(machine, name)
        for name in (
            "start",
            "send",
            "wait",
            "signal",
            "await_signal",
            "read",
            "write",
            "fetch",
            "put",
            "made",
            "need",
            "unknown",
        )
    }
    program.kernel(scenario.rank, **calls)
    return machine.events


class Machine:
    """Tables in SMEM hold what the host gives and what the kernel writes; what routing would write is the scenario's."""

    def __init__(self, program: Program, model: Model, scenario: Scenario):
        self.events: list[Event] = []
        self.model, self.scenario = model, scenario
        self.tables: dict[str, list[int | None]] = {
            name: [None] * max(1, _size(program.control.shapes[name])) for name in program.control.smem
        }
        given = {
            "tokens": scenario.tokens,
            "positions": scenario.positions,
            "chunks": model.short.chunks,
            "facts": model.short.facts,
        }
        for name, values in given.items():
            self.tables[name] = list(values)
        routers = {image.kind for image in model.plan.experts}
        self.kinds = [region.name for _, _, region in model.short.regions if region.name in routers]
        self.routed, self.ids = 0, []

    # -- copies ---------------------------------------------------------------------------------------------------------

    def start(self, source, source_box, target, box, semaphore, element):
        self.events.append(Event("start", (target, box), (source, source_box), (semaphore, element)))

    def send(self, source, source_box, target, box, arrived, element, sent, own, peer):
        self.events.append(Event("send", (target, box), (source, source_box), (arrived, element), (sent, own), peer))

    def wait(self, source, source_box, target, box, semaphore, element):
        self.events.append(Event("wait", (target, box), (source, source_box), (semaphore, element)))

    def signal(self, semaphore, element, count, peer):
        self.events.append(Event("signal", (semaphore, element), peer=peer, count=count))

    def await_signal(self, semaphore, element, count):
        self.events.append(Event("await", (semaphore, element), count=count))

    def read(self, buffer, box):
        self.events.append(Event("read", (buffer, box)))

    def write(self, buffer, box):
        self.events.append(Event("write", (buffer, box)))

    # -- tables ---------------------------------------------------------------------------------------------------------

    def fetch(self, table: str, at: int) -> int:
        values = self.tables[table]
        if not 0 <= at < len(values):
            raise Stuck(f"{table}[{at}] is read, it has {len(values)} entries")
        if values[at] is None:
            raise Stuck(f"{table}[{at}] is read before it is written")
        return values[at]

    def put(self, table: str, at: int, value: int) -> None:
        values = self.tables[table]
        if not 0 <= at < len(values):
            raise Stuck(f"{table}[{at}] is written, it has {len(values)} entries")
        values[at] = value

    def made(self, table: str, at: int) -> None:
        """A table entry that comes out of arrays: how many experts the rank runs, and which."""
        kind = self.kinds[self.routed % len(self.kinds)] if self.kinds else ""
        if (table, at) == ("expert_ids", 0):
            self.put(table, at, self.model.first(self.model.wanted(self.scenario, self.routed, kind), kind))
        elif table == "expert_count":
            self.ids = self.model.wanted(self.scenario, self.routed, kind)
            self.routed += 1
            self.tables["expert_ids"] = [None] * len(self.tables["expert_ids"])
            self.put(table, at, len(self.ids))
        elif table == "expert_words":
            marks, each = {e: 1 for e in self.ids}, 32
            if "taker" in self.tables:
                marks, each = {e: 8 + lone_row(n, self.model.rows) for n, e in enumerate(self.ids)}, 8
            words = [sum(m << 32 // each * (e % each) for e, m in marks.items() if e // each == w) for w in range(len(self.tables[table]) - 1)]
            self.put(table, at, words[at - 1] if at else sum(1 << w for w, word in enumerate(words) if word))
        else:
            raise Stuck(f"{table}[{at}] is written with what no scenario gives")

    def need(self, value: int, unit: int) -> int:
        if value % unit:
            raise Stuck(f"{value} is promised to be a multiple of {unit}")
        return value

    def unknown(self, what: str) -> None:
        raise Stuck(what)


def _size(shape: tuple[int, ...]) -> int:
    n = 1
    for s in shape:
        n *= s
    return n
