"""Values in VMEM: what a step reads was made in this run of its sub-layer, and what is made is read by some step."""

from __future__ import annotations

from mkgen.check.exchange import named
from mkgen.check.findings import Report
from mkgen.check.steps import accumulates, scratch
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Collective, Step, walk

PROLOGUE = {"position_column"}  # made before the first sub-layer


def check_changes(plan: Plan, report: Report) -> None:
    """Of an op that makes a value for later sub-layers, steps write it: a value that is carried was always made before."""
    for sub in plan.graph.sublayers():
        steps = [n for n in walk(plan.regions[sub.name].body) if isinstance(n, Step)]
        for op in sub.ops:
            written = {name for n in steps if n.op == op.name for name in n.writes}
            for name in (v.name.replace(".", "_") for v in op.changes()):
                if name not in written:
                    report.add("value", f"{sub.name}/{op.name}", f"does not write {name}", "later sub-layers take it from this one")


class Ledger:
    """What was made and what was read in any run: a loop that turns no time in one scenario does so in another."""

    def __init__(self, plan: Plan, moved: set[str]):
        ops = [op for sub in plan.graph.sublayers() for op in sub.ops]
        carried = {v.name.replace(".", "_") for op in ops for v in (*op.inputs(), *op.outputs()) if v.carried}
        own = {b.name for b in plan.buffers.values() if b.space == "vmem" and not b.remote}
        self.outputs = {b.name for b in plan.buffers.values() if b.space == "out"}
        self.watched = (own | self.outputs) - carried - moved - PROLOGUE
        self.made: dict[tuple[str, str, str | None], str] = {}  # (sub-layer, buffer, who made it)
        self.read: set[tuple[str, str, str | None]] = set()

    def finish(self, report: Report) -> None:
        for key, where in self.made.items():
            if key not in self.read:
                report.add("value", where, f"makes {key[1]}", "no step of the sub-layer reads it")


class Values:
    """One run. An op that reads and writes a buffer which it made itself accumulates: that is no use of it."""

    def __init__(self, ledger: Ledger, report: Report):
        self.ledger, self.report = ledger, report
        self.made: dict[str, str] = {}  # buffer -> op that made it in this sub-layer
        self.used: set[str] = set()  # and read since
        self.written: set[str] = set()  # outputs of the kernel
        self.region = ""

    def enter(self, region: str) -> None:
        self.region = region
        self.made, self.used = {}, set()

    def step(self, n: Step, where: str) -> None:
        ledger = self.ledger
        for name in n.reads:
            if name in n.writes and self.made.get(name, n.op) == n.op:
                continue
            if name in ledger.watched and name not in self.made:
                self.report.add("value", where, f"reads {name}", "no step before it in the sub-layer has made it")
            ledger.read.add((self.region, name, self.made.get(name)))
            self.used.add(name)
        sums = accumulates(n)
        if sums in ledger.watched and sums not in self.made:
            self.report.add("value", where, f"adds to {sums}", "no step before it in the sub-layer has cleared it")
        for name in n.writes:
            if name in n.reads and self.made.get(name, n.op) != n.op:
                continue  # changed in place: what another op made stays its
            if name in ledger.watched:
                if name in self.used and self.made.get(name) == n.op:
                    self.report.add("value", where, f"writes {name} once more", "it was read before it was complete")
                if self.made.get(name) != n.op:
                    self.used.discard(name)
                    self.made[name] = n.op
                if name in ledger.outputs:
                    self.written.add(name)
                elif not scratch(n, name):
                    ledger.made.setdefault((self.region, name, n.op), where)

    def exchange(self, n: Collective, where: str) -> None:
        """The first start reads its sources, the last finish makes its targets."""
        watched = self.ledger.watched
        if n.part == "start" and n.round == 0:
            for name in (name for text in n.sources for name in named(text)):
                if name in watched and name not in self.made:
                    self.report.add("value", where, f"exchanges {name}", "no step before it in the sub-layer has made it")
                self.ledger.read.add((self.region, name, self.made.get(name)))
                self.used.add(name)
        elif n.part == "finish" and n.round == n.rounds - 1:
            for name in (name for text in n.targets for name in named(text)):
                if name in watched:
                    self.used.discard(name)
                    self.made[name] = f"{n.kind} {name}"
                    self.ledger.made.setdefault((self.region, name, self.made[name]), where)

    def finish(self) -> None:
        for name in sorted(self.ledger.outputs - self.written):
            self.report.add("value", name, "is not written", "it is an output of the kernel")
