"""Exchanges between ranks: their stages in order, one at a time, their payloads within the buffers that peers write."""

from __future__ import annotations

from mkgen.check.findings import Report
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Collective, Step
from mkgen.plan.tape import LANES


class Exchanges:
    """One run's exchanges. `trace` is the sequence that must be the same on every rank, whatever its data."""

    def __init__(self, plan: Plan, rows: int, report: Report):
        self.report = report
        self.stages = [name for name, _, _ in plan.mesh.stages]
        self.ranks = plan.mesh.ranks
        self.dims = {b.name: b.dims(rows) for b in plan.buffers.values() if b.space in ("vmem", "out")}
        self.remote = {b.name for b in plan.buffers.values() if b.remote}
        self.trace: list[tuple] = []
        self.now: tuple | None = None  # (kind, args) of the exchange in progress
        self.done = 0  # its finished stages
        self.open = False  # a stage has been started and not finished
        self.where = ""
        self.put: int | None = None  # width of this rank's piece, from gather_put to gather_take
        self.full = False  # every piece has arrived
        self.best: str | None = None  # whose greedy token is at hand: local, or of all ranks

    @property
    def busy(self) -> str | None:
        """The buffer that an unfinished reduction still sums into."""
        return self.now[1][0][2:] if self.now and self.now[0] == "reduce" and self.now[1] else None

    def stage(self, n: Collective, where: str) -> None:
        self.trace.append((n.kind, n.part, n.factor, n.args))
        add = self.report.add
        if n.factor not in self.stages:
            add("exchange", where, f"{n.kind} over {n.factor}", "the mesh has no such factor of size above 1")
            return
        if n.part == "start":
            self.begin(n, where)
        elif not self.open:
            add("exchange", where, f"{n.kind} over {n.factor} is finished", "it was not started")
        else:
            if self.now[0] != n.kind or self.stages[self.done] != n.factor or n.args and n.args != self.now[1]:
                add(
                    "exchange",
                    where,
                    f"finishes {n.kind}{n.args} over {n.factor}, started was {self.now} over {self.stages[self.done]}",
                    "start and finish are of different exchanges",
                )
            self.open, self.done = False, self.done + 1
            if self.done == len(self.stages):
                self.full = self.full or self.now[0] == "gather"
                self.best = "all" if self.now[0] == "greedy" else self.best
                self.now = None

    def begin(self, n: Collective, where: str) -> None:
        add = self.report.add
        if self.open:
            add(
                "exchange",
                where,
                f"{n.kind} over {n.factor} starts before {self.now[0]} ({self.where}) is finished",
                "one exchange at a time",
            )
        elif self.now and (self.now != (n.kind, n.args)):
            add(
                "exchange",
                where,
                f"{n.kind}{n.args} starts after {self.done} of {len(self.stages)} stages of {self.now} ({self.where})",
                "an exchange needs all its stages",
            )
            self.now = None
        if self.now is None:
            self.now, self.done, self.where = (n.kind, n.args), 0, where
            self.payload(n, where)
        if self.stages[min(self.done, len(self.stages) - 1)] != n.factor:
            add(
                "exchange",
                where,
                f"stage {self.done} of {n.kind} is over {n.factor}",
                f"the order is {', '.join(self.stages)}",
            )
            self.done = self.stages.index(n.factor)
        self.open = True

    def payload(self, n: Collective, where: str) -> None:
        """The message fits the place that the peers write; the value that is exchanged is as wide as is said."""
        inbox, gather = self.dims.get("inbox"), self.dims.get("gather")
        width = 2 * LANES if n.kind == "greedy" else number(n.args[-1] if n.args else "")
        room = gather if n.kind == "gather" else inbox
        if width is None or width <= 0:
            self.report.add("exchange", where, f"{n.kind}{n.args}", "the width of an exchange is a literal")
        elif room is None or -(-width // LANES) * LANES > room[-1]:
            self.report.add("exchange", where, f"{n.kind} of {width} words", f"the buffer takes {room and room[-1]}")
        if n.kind == "reduce":
            dims = self.dims.get(n.args[0][2:])
            if dims is None or width and dims[-1] < width:
                self.report.add(
                    "exchange", where, f"reduces {width} columns of {n.args[0]}", f"it has the shape {dims}"
                )
        if n.kind == "greedy" and self.best != "local":
            self.report.add("exchange", where, "compares tokens", "no step has found this rank's own")
        if n.kind == "gather" and (self.put != width or self.full):
            self.report.add(
                "exchange",
                where,
                f"gathers pieces of {width} words",
                f"the piece put in place has {self.put}" if not self.full else "the gather before was not taken out",
            )

    def step(self, n: Step, where: str) -> None:
        """Steps may touch neither the remote buffers (but to put and take) nor a sum before it is complete."""
        touched = {*n.reads, *n.writes}
        if n.template != "exchange":
            for name in touched & self.remote:
                self.report.add("exchange", where, f"touches {name}", "peers write there: only exchanges may touch it")
        elif n.macro == "gather_put":
            if self.now or self.put is not None:
                self.report.add("exchange", where, "puts a piece in place", "the exchange before is not over")
            self.put, self.full = number(n.args.get("width")), False
        elif n.macro == "gather_take":
            width = number(n.args.get("width"))
            if not self.full or width != self.put:
                self.report.add(
                    "exchange", where, f"takes pieces of {width} words", "no gather of that width is complete"
                )
            for y in n.writes:
                if width and self.dims.get(y, (0,))[-1] < self.ranks * width:
                    self.report.add(
                        "exchange",
                        where,
                        f"takes {self.ranks} pieces of {width} into {y}",
                        f"it has the shape {self.dims.get(y)}",
                    )
            self.put, self.full = None, False
        if n.macro == "greedy_local":
            self.best = "local"
        elif n.macro == "greedy_store" and (self.now or self.best != ("all" if self.stages else "local")):
            self.report.add("exchange", where, "stores the token", "the ranks have not agreed on it")
        if self.busy in touched:
            self.report.add(
                "exchange", where, f"touches {self.busy} during its reduction ({self.where})", "the sum is not complete"
            )

    def finish(self) -> None:
        if self.now:
            self.report.add(
                "exchange",
                self.where,
                f"{self.now[0]}: {self.done} of {len(self.stages)} stages are finished at the end",
                "an exchange needs all its stages",
            )
        elif self.put is not None:
            self.report.add(
                "exchange", self.where, "a gather is not taken out at the end", "its half of the buffer stays in use"
            )


def check_places(plan: Plan, rows: int, report: Report) -> None:
    """The buffers that the exchanges' templates use have room for every stage, member and half."""
    stages = plan.mesh.stages
    if not stages:
        return
    members = sum(size for _, size, _ in stages)
    want = {"inbox": (2, members, rows, None), "phase": (len(stages) + 1,), "sent": (), "arrived": (2, len(stages))}
    if "gather" in plan.buffers:
        want["gather"] = (2, plan.mesh.ranks, rows, None)
    for name, dims in want.items():
        b = plan.buffers.get(name)
        found = b and b.dims(rows)
        if found is None or len(found) != len(dims) or any(w is not None and w != f for w, f in zip(dims, found)):
            report.add("exchange", name, f"has the shape {found}", f"the mesh asks for {dims}")
        elif name in ("inbox", "gather") and not b.remote:
            report.add("exchange", name, "is not marked remote", "peers write there")


def number(x) -> int | None:
    try:
        return int(x)
    except (TypeError, ValueError):
        return None
