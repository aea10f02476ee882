"""Exchanges between ranks: their rounds in order, one at a time, their messages within the buffers that peers write."""

from __future__ import annotations

import re
from itertools import combinations
from math import prod

from mkgen.check.findings import Report
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Collective, Step
from mkgen.plan.tape import LANES, Matrix



class Exchanges:
    """One run's exchanges. `trace` is the sequence that must be the same on every rank, whatever its data."""

    def __init__(self, plan: Plan, rows: int, report: Report):
        self.report = report
        self.groups = groups(plan)
        self.weights = plan.weights
        self.ranks = plan.mesh.ranks
        self.dims = {b.name: b.dims(rows) for b in plan.buffers.values() if b.space in ("vmem", "out")}
        self.remote = {b.name for b in plan.buffers.values() if b.remote or b.name.startswith("outbox_")}
        self.cut_over: dict[str, int] = {}  # buffers of products that are cut over fewer ranks than all
        self.dtypes = {b.name: b.dtype for b in plan.buffers.values()}
        self.rounds_sums = plan.spec.build.wire == "bf16"
        self.sums: set[str] = set()  # where a finished scatter left a sum, if sums may be rounded
        self.trace: list[tuple] = []
        self.now: Collective | None = None  # the exchange in progress, as its first round started it
        self.done = 0  # its finished rounds
        self.open = False  # a round has been started and not finished
        self.where = ""

    @property
    def busy(self) -> set[str]:
        """The buffers that an unfinished exchange will fill."""
        return {name for t in self.now.targets for name in named(t)} if self.now else set()

    def stage(self, n: Collective, where: str) -> None:
        self.trace.append((n.kind, n.part, n.stage, n.round, n.sources))
        add = self.report.add
        if n.stage not in self.groups:
            add("exchange", where, f"{n.kind} over {n.stage}", "the mesh has no such group of more than one rank")
            return
        if n.part == "start":
            self.begin(n, where)
            return
        if not self.open:
            add("exchange", where, f"round {n.round} of {n.kind} over {n.stage} is finished", "it was not started")
            return
        if same(n) != same(self.now) or n.round != self.done or n.stage != self.over:
            add("exchange", where, f"finishes round {n.round} of {n.kind}{n.sources} over {n.stage}, started was round {self.done} of "
                f"{self.now.kind}{self.now.sources} over {self.over}", "start and finish are of different exchanges")
        self.open, self.done = False, self.done + 1
        if self.done == self.now.rounds:
            self.sums |= {x for t in n.targets for x in named(t)} if n.kind == "scatter" and self.rounds_sums else set()
            self.now = None

    def begin(self, n: Collective, where: str) -> None:
        add = self.report.add
        if self.open:
            add("exchange", where, f"{n.kind} over {n.stage} starts before {self.now.kind} ({self.where}) is finished", "one exchange at a time")
        elif self.now and (same(self.now) != same(n) or n.round != self.done):
            add("exchange", where, f"round {n.round} of {n.kind}{n.sources} starts after {self.done} of {self.now.rounds} rounds of "
                f"{self.now.kind} ({self.where})", "an exchange needs all its rounds, in order")
            self.now = None
        if self.now is None:
            self.now, self.done, self.where = n, 0, where
            if n.round:
                add("exchange", where, f"{n.kind} begins with round {n.round}", "the first round is 0")
            self.route(n, where)
            self.values(n, where)
        want = n.path[min(n.round, n.rounds - 1)]
        if n.stage != want:
            add("exchange", where, f"round {n.round} of {n.kind} is over {n.stage}", f"{want} is its turn")
        self.message(n, where)
        self.open, self.over = True, n.stage

    def route(self, n: Collective, where: str) -> None:
        """The groups of all rounds follow one another through the mesh, innermost first (a scatter's last first), up to all ranks."""
        at = 1
        for name in reversed(n.path) if n.kind == "scatter" else n.path:
            size, stride = self.groups.get(name, (1, 0))
            if stride != at:
                self.report.add("exchange", where, f"{n.kind} goes by {', '.join(n.path)}", f"a group {at} apart is missing before {name}")
            at *= size
        for name in sorted({x for source in n.sources for x in named(source)}):
            if at != self.cut_over.get(name, self.ranks):
                self.report.add("exchange", where, f"{n.kind} of {name} goes by {', '.join(n.path)}",
                                f"that reaches {at} ranks, it is spread over {self.cut_over.get(name, self.ranks)}")
        if n.wire == "bf16" and n.kind == "gather":
            for source in n.sources:
                if not source.startswith("round_bf16(") and any(self.dtypes.get(x) != "bf16" for x in named(source) - self.sums):
                    self.report.add("exchange", where, f"gathers {source} as bf16", "it is neither a bf16 value, nor a sum that may be rounded")

    def message(self, n: Collective, where: str) -> None:
        """What is sent fits the place that the peers write, and goes to all of the group."""
        size, _ = self.groups[n.stage]
        sizes = [self.groups.get(name, (1, 1))[0] for name in n.path]
        times = {"gather": prod(sizes[:n.round]), "scatter": prod(sizes[n.round + 1:])}.get(n.kind, 1)
        words = -(-sum(n.widths) * times // (LANES * (2 if n.wire == "bf16" else 1))) * LANES
        inbox, outbox = (self.dims.get(f"{box}_{n.stage}") for box in ("inbox", "outbox"))
        for name, room in (("inbox", inbox), *([("outbox", outbox)] if n.kind == "scatter" else [])):
            if room is None or room[-1] < words:
                self.report.add("exchange", where, f"{n.kind} of {words} words a row", f"its {name} takes {room and room[-1]}")
        if n.words != words or n.peers != size - 1:
            self.report.add("exchange", where, f"says {n.peers} messages of {n.words} words a row", f"there are {size - 1} of {words}")

    def values(self, n: Collective, where: str) -> None:
        """Sources are as wide as what leaves, targets as what comes."""
        add = self.report.add
        if not len(n.sources) == len(n.targets) == len(n.widths) or min(n.widths, default=0) <= 0:
            add("exchange", where, f"{len(n.sources)} sources, {len(n.targets)} targets, widths {n.widths}", "one width above 0 for each")
        reached = prod(self.groups.get(name, (1, 1))[0] for name in n.path)
        out = reached if n.kind == "scatter" else 1
        back = reached if n.kind == "gather" else 1
        for source, target, width in zip(n.sources, n.targets, n.widths):
            last = out - 1 if n.kind == "scatter" else 0         # the last runs may be padding in part
            for text, need, least in ((source, out * width, out * width - last), (target, back * width, back * width)):
                columns, most = self.columns(text), need if n.kind != "reduce" or text == source else LANES**3
                if columns is None or not least <= columns <= most:
                    add("exchange", where, f"{n.kind}s {width} columns: {text} has {columns}", f"{need} are needed")

    def columns(self, text: str) -> int | None:
        """Columns of a source text: those of its slice, or of the whole buffer."""
        found = re.search(r"m\.(\w+)(?:\[:, (\d*):(\d+)\])?", text)
        dims = found and self.dims.get(found.group(1))
        if not dims:
            return None
        first, last = int(found.group(2) or 0), int(found.group(3) or dims[-1])
        return last - first if last <= dims[-1] else None

    def step(self, n: Step, where: str) -> None:
        """Steps touch neither the remote buffers, nor what an exchange will fill before it is over."""
        matrix = n.args.get("matrix")
        for name in n.writes:
            self.cut_over.pop(name, None)
            if isinstance(matrix, Matrix) and n.template in ("linear", "coded") and not matrix.whole and f"m.{name}" == n.args.get("y"):
                self.cut_over |= {name: self.shares(matrix)}
        touched = {*n.reads, *n.writes}
        for name in touched & self.remote:
            self.report.add("exchange", where, f"touches {name}", "peers write there: only exchanges may touch it")
        for name in touched & self.busy:
            self.report.add("exchange", where, f"touches {name} during its {self.now.kind} ({self.where})", "it is not complete")

    def shares(self, m: Matrix) -> int:
        """Ranks that a matrix is cut over by its columns, as its parts say: all, or the neighbours of one group."""
        weight = self.weights[m.parts[0].weight]
        return m.over if m.over and -(-weight.shape[1] // m.over) <= m.parts[0].width < weight.shape[1] else self.ranks

    def finish(self) -> None:
        if self.now:
            self.report.add("exchange", self.where, f"{self.now.kind}: {self.done} of {self.now.rounds} rounds are finished at the end",
                            "an exchange needs all its rounds")


def same(n: Collective) -> tuple:
    """What all parts and rounds of one exchange have in common."""
    return n.kind, n.sources, n.targets, n.widths, n.path, n.wire


def named(text: str) -> set[str]:
    """Buffers that a source text names."""
    return set(re.findall(r"\bm\.(\w+)", text))


def groups(plan: Plan) -> dict[str, tuple[int, int]]:
    """Groups of ranks that can exchange: name -> (ranks, stride)."""
    out, stages = {}, plan.mesh.stages
    for i, j in combinations(range(len(stages) + 1), 2):
        name = "all" if j - i == len(stages) else "_".join(name for name, _, _ in reversed(stages[i:j]))
        out[name] = prod(size for _, size, _ in stages[i:j]), stages[i][2]
    return out


def check_places(plan: Plan, rows: int, report: Report) -> None:
    """The buffers that the exchanges' templates use have room for every group, member and half."""
    if not plan.stages:
        return
    known = groups(plan)
    want: dict[str, tuple] = {"phase": (len(plan.stages),), "sent": (), "arrived": (2, len(plan.stages))}
    for name, size, stride in plan.stages:
        if known.get(name) != (size, stride):
            report.add("exchange", name, f"is a group of {size} ranks {stride} apart", f"the mesh has {known.get(name)}")
        want[f"inbox_{name}"] = (2, size, rows, None)
        if f"outbox_{name}" in plan.buffers:
            want[f"outbox_{name}"] = (size, rows, None)
    for name, dims in want.items():
        b = plan.buffers.get(name)
        found = b and b.dims(rows)
        if found is None or len(found) != len(dims) or any(w is not None and w != f for w, f in zip(dims, found)):
            report.add("exchange", name, f"has the shape {found}", f"its group asks for {dims}")
        elif name.startswith("inbox_") != b.remote:
            report.add("exchange", name, "is not marked remote" if not b.remote else "is marked remote", "peers write the inboxes, and nothing else")
