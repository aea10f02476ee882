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
        self.ranks, self.rows = plan.mesh.ranks, rows
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
        self.met = False  # every rank is known to be in the kernel
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
            self.complete(n)
            self.now = None

    def complete(self, n: Collective) -> None:
        """Of what the exchange has filled: over how many ranks it is spread, and whether it is a sum that may be rounded."""
        cut = len(n.targets) - n.beside if n.kind == "scatter" else 0
        for i, target in enumerate(n.targets):
            for name in named(target):
                self.cut_over.pop(name, None)
                if i < cut:
                    self.cut_over[name] = n.over or self.ranks
                    self.sums |= {name} if self.rounds_sums else set()

    def begin(self, n: Collective, where: str) -> None:
        add = self.report.add
        if not self.met:
            add("exchange", where, f"{n.kind} over {n.stage} starts", "no peer has been waited for: it may not be in the kernel yet")
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
        """The groups of all rounds follow one another through the mesh, innermost first (of a scatter of columns last first), up to all ranks."""
        at, over = 1, n.over or self.ranks
        inner = [name for name in n.path if self.groups.get(name, (1, 0))[1] < over]
        if n.kind == "scatter" and inner != list(n.path[:len(inner)]):
            self.report.add("exchange", where, f"scatter over {over} ranks goes by {', '.join(n.path)}", "groups of them add up what has been shared out")
        for name in (*reversed(inner), *n.path[len(inner):]) if n.kind == "scatter" and not n.rows else n.path:
            size, stride = self.groups.get(name, (1, 0))
            if stride != at:
                self.report.add("exchange", where, f"{n.kind} goes by {', '.join(n.path)}", f"a group {at} apart is missing before {name}")
            at *= size
        for name in sorted({x for source in n.sources for x in named(source)}):
            if at != (self.cut_over.get(name, self.ranks) if n.kind == "gather" else self.ranks):
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
        over, cut = n.over or self.ranks, len(n.widths) - n.beside
        left = max(1, over // prod(sizes[:n.round + 1]))
        times = {"gather": prod(sizes[:n.round]), "scatter": left}.get(n.kind, 1)
        columns = sum(n.widths[:cut]) * times + sum(n.widths[cut:])
        words = -(-columns // (LANES * (2 if n.wire == "bf16" else 1))) * LANES
        inbox, outbox = (self.dims.get(f"{box}_{n.stage}") for box in ("inbox", "outbox"))
        shares = n.kind == "scatter" and self.groups.get(n.stage, (1, 0))[1] < over
        for name, room in (("inbox", inbox), *([("outbox", outbox)] if shares else [])):
            if room is None or room[-1] < words:
                self.report.add("exchange", where, f"{n.kind} of {words} words a row", f"its {name} takes {room and room[-1]}")
        if n.words != words or n.peers != size - 1:
            self.report.add("exchange", where, f"says {n.peers} messages of {n.words} words a row", f"there are {size - 1} of {words}")

    def values(self, n: Collective, where: str) -> None:
        """Sources are as wide as what leaves, targets as what comes."""
        add = self.report.add
        if not len(n.sources) == len(n.targets) == len(n.widths) or min(n.widths, default=0) <= 0:
            add("exchange", where, f"{len(n.sources)} sources, {len(n.targets)} targets, widths {n.widths}", "one width above 0 for each")
        back = prod(self.groups.get(name, (1, 1))[0] for name in n.path) if n.kind == "gather" else 1
        if not 0 <= n.beside < max(len(n.widths), 1) or (n.beside or n.over) and n.kind != "scatter":
            add("exchange", where, f"{n.beside} of {len(n.widths)} values of a {n.kind} go whole, over {n.over} ranks", "a scatter shares out one at least")
        if n.rows and ((len(n.widths), n.over, n.beside) != (1, 0, 0) or n.kind == "gather" and n.rounds > 1 or self.rows % self.ranks or self.ranks.bit_count() != 1 or n.kind == "reduce"):
            add("exchange", where, f"{n.kind} of {self.rows} rows in {n.rounds} rounds, {len(n.widths)} values", f"rows that {self.ranks} ranks divide, "
                "of one value, are shared out; they are gathered in one round")
        for i, (source, target, width) in enumerate(zip(n.sources, n.targets, n.widths)):
            shared = n.kind == "scatter" and i < len(n.widths) - n.beside
            out = (n.over or self.ranks) if shared else 1
            last = out - 1 if not n.rows else 0                  # the last runs may be padding in part
            whole = n.kind == "reduce" or n.kind == "scatter" and not shared
            for text, need, least in ((source, out * width, out * width - last), (target, back * width, back * width)):
                columns, most = self.columns(text), need if not whole or text == source else LANES**3
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
        self.spread(n, where)
        self.met |= (n.template, n.macro) == ("exchange", "await_peers")
        touched = {*n.reads, *n.writes}
        for name in touched & self.remote:
            self.report.add("exchange", where, f"touches {name}", "peers write there: only exchanges may touch it")
        for name in touched & self.busy:
            self.report.add("exchange", where, f"touches {name} during its {self.now.kind} ({self.where})", "it is not complete")

    def spread(self, n: Step, where: str) -> None:
        """What a step makes of columns that ranks share is spread as they are: over all ranks, or over the neighbours of one group."""
        matrix = n.args.get("matrix") if n.template in ("linear", "coded") else None
        over = {self.cut_over[x] for x in n.reads if x in self.cut_over}
        if len(over) > 1:
            self.report.add("exchange", where, f"takes columns of {', '.join(sorted(n.reads))} together", f"they are spread over {sorted(over)} ranks")
        for name in n.writes:
            made = over if not isinstance(matrix, Matrix) else {self.shares(matrix)} - {None} if f"m.{name}" == n.args.get("y") else set()
            if made:
                self.cut_over[name] = min(made)
            elif name not in n.reads:
                self.cut_over.pop(name, None)

    def shares(self, m: Matrix) -> int | None:
        """Ranks that a matrix is cut over by its columns, as its parts say: all, or the neighbours of one group; None: it is not."""
        part, columns = m.parts[0], self.weights[m.parts[0].weight].shape[1]
        if m.whole or part.width == columns:
            return None
        return m.over if m.over and -(-columns // m.over) <= part.width else self.ranks

    def finish(self) -> None:
        if self.now:
            self.report.add("exchange", self.where, f"{self.now.kind}: {self.done} of {self.now.rounds} rounds are finished at the end",
                            "an exchange needs all its rounds")


def same(n: Collective) -> tuple:
    """What all parts and rounds of one exchange have in common."""
    return n.kind, n.sources, n.targets, n.widths, n.path, n.wire, n.rows


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
