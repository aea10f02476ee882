"""One abstract run: the region tree is walked with real numbers, each node is held against the rules."""

from __future__ import annotations

from collections import Counter

from mkgen.check.columns import Columns
from mkgen.check.exchange import Exchanges
from mkgen.check.findings import Report
from mkgen.check.flight import Flight
from mkgen.check.model import Model
from mkgen.check.refs import BadExpression
from mkgen.check.scenario import Scenario, lone_row
from mkgen.check.spread import Spread
from mkgen.check.steps import PLAIN, RUN_EXPERTS, TOUCHES, box_of, own_weights
from mkgen.check.values import Ledger, Values
from mkgen.plan.plan import Region
from mkgen.plan.regions import Advance, Branch, Collective, Loop, Node, Seq, Start, Step, Wait

MOST_TRIPS = 100_000


class AbstractRun:
    def __init__(self, model: Model, scenario: Scenario, ledger: Ledger, report: Report):
        self.model, self.scenario, self.report = model, scenario, report
        self.text, self.plan = model.text, model.plan
        self.m = model.memory(scenario)
        self.flight = Flight(report)
        self.exchanges = Exchanges(model.plan, model.rows, report)
        self.values = Values(ledger, report)
        self.spread = Spread(model.plan, report)
        self.columns = Columns(model.plan, self.spread.ops, report)
        self.g = self.base = self.turn = self.routed = 0
        self.ids: list[int] = []  # experts that the sub-layer wants
        self.computed: Counter[int] = Counter()  # number in the list of pieces of these -> how often
        self.region: Region | None = None
        self.read: set[int] = set()  # entries of the current chunk that have been read
        self.walkers = {
            Step: self.step,
            Start: self.start,
            Wait: self.wait,
            Advance: self.advance,
            Collective: self.collective,
            Loop: self.loop,
            Branch: self.branch,
            Seq: lambda n, scope: self.nodes(n.nodes, scope),
        }

    def run(self) -> list[tuple]:
        """All regions, then the end. Returns the sequence of exchanges."""
        for layer, index, region in self.model.short.regions:
            self.turn += 1
            self.region, self.base, self.ids, self.computed = region, self.g, [], Counter()
            self.values.enter(region.name)
            self.columns.enter()
            scope = {"m": self.m, "g": self.g} | ({} if layer is None else {"layer": layer, "index": index})
            kv = self.model.cache(self.m, region.name)
            self.nodes(region.body.nodes, scope | ({} if kv is None else {"kv": kv}))
            self.every_expert()
        self.finish()
        return self.exchanges.trace

    def finish(self) -> None:
        """What has to hold at the end."""
        if 2 * self.g != len(self.model.short.chunks):
            self.report.add(
                "tape",
                "end",
                f"{self.g} chunks are consumed of {len(self.model.short.chunks) // 2}",
                "the tape is read to its end",
            )
        self.flight.finish()
        self.exchanges.finish()
        self.values.finish()

    # -- the walk -----------------------------------------------------------------------------------------------------

    def nodes(self, nodes: tuple[Node, ...], scope: dict) -> None:
        for n in nodes:
            scope["g"] = self.g
            self.walkers[type(n)](n, scope)

    def where(self, name: str) -> str:
        return f"{self.region.name}/{name}"

    def bad(self, where: str, error: BadExpression) -> None:
        self.report.add(
            "expression", where, f"{error}, in a run with {self.scenario}", "the plan's text must name what exists"
        )

    def loop(self, n: Loop, scope: dict) -> None:
        try:
            trips = int(n.trips) if n.trips.isdigit() else self.text.value(n.trips, scope)
        except BadExpression as e:
            return self.bad(self.where(n.name or "loop"), e)
        if n.bound is not None and trips > n.bound or trips > MOST_TRIPS:
            self.report.add("loop", self.where(n.name), f"{n.trips} is {trips}", f"the bound is {n.bound}")
            trips = min(trips, n.bound or 0)
        for i in range(n.first, n.first + trips):
            self.nodes(n.body, scope | {n.var: i})

    def branch(self, n: Branch, scope: dict) -> None:
        try:
            case = self.text.value(n.selector, scope)
            if not 0 <= case < len(n.cases):
                raise BadExpression(f"{n.selector} is {case}, there are {len(n.cases)} cases")
        except BadExpression as e:
            return self.bad(self.where("branch"), e)
        self.nodes(n.cases[case][1].nodes, dict(scope))

    def collective(self, n: Collective, scope: dict) -> None:
        where = self.where(f"{n.kind} {n.part}")
        self.exchanges.stage(n, where)
        self.spread.exchange(n, where)
        self.values.exchange(n, where)

    # -- copies -------------------------------------------------------------------------------------------------------

    def start(self, n: Start, scope: dict) -> None:
        self.issue(n, scope, True)

    def wait(self, n: Wait, scope: dict) -> None:
        self.issue(n, scope, False)

    def issue(self, n: Start | Wait, scope: dict, starts: bool) -> None:
        where = self.where(n.transfer)
        try:
            if n.when is not None and not self.text.value(n.when, scope):
                return
            args = self.text.values(n.args, scope)
        except BadExpression as e:
            return self.bad(where, e)
        self.copy(where, n.transfer, args, starts)

    def copy(self, where: str, name: str, args: tuple, starts: bool) -> None:
        try:
            source, target, semaphore = self.text.copy(name, args)
        except BadExpression as e:
            return self.bad(where, e)
        if not starts:
            return self.flight.wait(name, source, target, semaphore, where)
        t = self.plan.transfers[name]
        if (
            source.buffer not in t.reads
            or target.buffer not in t.writes
            or semaphore.space != "dma_sem"
            or semaphore.shape
        ):
            self.report.add(
                "pairing",
                where,
                f"{source} -> {target} on {semaphore}",
                f"declared are {t.reads} -> {t.writes}, and one semaphore",
            )
        self.flight.start(name, source, target, semaphore, t.bytes, where)

    # -- work ---------------------------------------------------------------------------------------------------------

    def step(self, n: Step, scope: dict) -> None:
        where, key = self.where(n.op), (n.template, n.macro)
        try:
            when = n.args.get("when")
            if isinstance(when, str) and not self.text.value(when, scope):
                return
            reads, writes = self.model.moving(n)
            if reads or writes:
                touch = TOUCHES.get(key, PLAIN)
                inners = list(self.scopes(touch, scope))
                if touch.some and not inners:
                    self.report.add("loop", where, f"works on {touch.over} of {touch.var}", "there is nothing: a batch has at least one item")
                for inner in inners:
                    if key in RUN_EXPERTS:
                        self.computed[inner["i"]] += 1
                    data = touch.data is None or self.text.value(touch.data, inner)
                    self.touch(where, reads, writes, inner, data)
            if "ring" in reads:
                self.pieces(n, scope, where)
            self.fill_tables(n, scope)
        except BadExpression as e:
            self.bad(where, e)
        self.exchanges.step(n, where)
        self.values.step(n, where)
        self.spread.step(n, where)
        self.columns.step(n, where)

    def every_expert(self) -> None:
        """Each expert that was wanted is computed once, whichever of a loop's steps does it."""
        wanted = range(len(self.ids) * self.model.pieces(self.region.name) if self.ids else 0)
        if self.computed != Counter(wanted):
            wrong = {i: self.computed[i] for i in sorted({*wanted, *self.computed}) if self.computed[i] != (i in wanted)}
            said = ", ".join(f"number {i} {n} times" for i, n in wrong.items())
            self.report.add("data", self.where("experts"), f"of {len(wanted)} pieces of experts, {said}", "each that was wanted is computed once")

    def scopes(self, touch, scope: dict):
        for value in self.text.value(touch.over, scope) if touch.var else (None,):
            inner = scope | {touch.var: value} if touch.var else scope
            if touch.bind:
                inner = inner | {name: self.text.value(text, inner) for name, text in touch.bind}
            yield inner

    def touch(self, where: str, reads: tuple, writes: tuple, scope: dict, data: bool) -> None:
        model, value = self.model, self.text.value
        for name in reads:
            box = box_of(model.refs[name], name, model.shapes[name], scope)
            self.flight.read(name, box, where)
            if data and name in model.origins:
                origins = [value(text, scope) for text in model.arrivals(self.region, name)]
                if not any(self.flight.holds(name, box, origin) for origin in origins):
                    self.report.add(
                        "data",
                        where,
                        f"reads {name}{list(box)} for {origins[0] if origins else name}",
                        "no finished copy of it lies there",
                    )
        for name in writes:
            box = box_of(model.refs[name], name, model.shapes[name], scope)
            homes = [value(text, scope) for text in model.homes.get(name, ())]
            self.flight.write(name, box, homes, self.turn, where)

    def fill_tables(self, n: Step, scope: dict) -> None:
        """What routing and the list of experts leave in SMEM."""
        if (n.template, n.macro) == ("experts", "first"):
            ids = self.model.wanted(self.scenario, self.routed, self.region.name)
            return self.m.expert_ids.put(0, self.model.first(ids, self.region.name))
        if "expert_count" in n.writes:
            self.ids = self.model.wanted(self.scenario, self.routed, self.region.name)
            self.routed += 1
            self.m.expert_count.put(0, len(self.ids))
            self.m.expert_ids.values = [None] * len(self.m.expert_ids.values)
        if "expert_ids" in n.writes:
            pieces = self.model.pieces(self.region.name)
            first = -(-self.model.constants["FIRST_EXPERTS"] // pieces)
            here = [scope["i"] // pieces] if "i" in scope and scope["i"] % pieces == 0 else [] if "i" in scope else None
            for i in range(min(first, len(self.ids)), len(self.ids)) if here is None else here:
                if i < len(self.ids):
                    self.m.expert_ids.put(i, self.ids[i])
                    if "taker" in n.writes:
                        self.m.taker.put(i, lone_row(i, self.model.rows))

    # -- the tape -----------------------------------------------------------------------------------------------------

    def chunk(self):
        """The entries that should lie in the current slot: behind the region's chunks the next one's first; none further on (a
        finding of its own)."""
        at, own, regions = self.g - self.base, self.region.chunks, self.model.short.regions
        following = regions[self.turn][2].chunks[:1] if self.turn < len(regions) else ()
        found = [*own, *following][at:][:1]
        return found[0].entries if found else None

    def pieces(self, n: Step, scope: dict, where: str) -> None:
        """Each piece that a step reads from the ring is an entry of the chunk at g."""
        entries = self.chunk()
        if entries is None:
            return
        for arg, name, row, rows, first in self.text.tape_reads(n):
            block = None if first is None else first + self.text.value(n.args.get("number", "0"), scope)
            for k, e in enumerate(entries):
                if (e.row, e.rows) == (row, rows) and name in (None, e.name) and block in (None, e.block):
                    self.read.add(k)
                    if name is None:
                        self.vector(n, arg, e.name, where)
                    break
            else:
                piece = f"rows {row} to {row + rows} of chunk {self.g - self.base}" + (
                    f" as block {block} of {name}" if name else ""
                )
                self.report.add(
                    "tape",
                    where,
                    f"reads {piece}; there are {[(e.name, e.row, e.rows, e.block) for e in entries]}",
                    "a step reads whole entries",
                )

    def vector(self, n: Step, arg: str, name: str, where: str) -> None:
        """A vector that is read as one of the op's is one of the op's."""
        op, held = self.spread.ops.get(n.op), self.plan.vectors.get(name)
        if op is None or held is None:
            return
        key = (n.op, arg)
        if key not in self.text.owned:
            self.text.owned[key] = own_weights(op, arg)
        if self.text.owned[key] and not self.text.owned[key] & set(held.weights):
            self.report.add(
                "tape",
                where,
                f"reads {name} as {arg}",
                f"that is {', '.join(sorted(self.text.owned[key]))}",
            )

    def advance(self, n: Advance, scope: dict) -> None:
        entries = self.chunk()
        unread = [e.name for k, e in enumerate(entries or ()) if k not in self.read]
        if unread:
            self.report.add(
                "tape",
                self.where("advance"),
                f"{', '.join(unread)} in chunk {self.g - self.base}",
                "no step reads it before its slot is given up",
            )
        self.read = set()
        self.g += 1
