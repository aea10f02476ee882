"""A plan as the events of one step: its regions are walked with the numbers of a scenario, each piece of work with its cycles.

What a region does depends on the layer only through the tape's next chunks, the number of experts and the layer's facts that its
control reads, so each region is walked once for each of these, and then repeated.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

from mkgen.check.model import Model, Text
from mkgen.check.scenario import SEVERAL, Scenario, tokens
from mkgen.check.shorten import Short, control_texts
from mkgen.errors import MkgenError
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Advance, Loop, Start, Step, Wait, walk
from mkgen.plan.tape import ROW_BYTES
from mkgen.profile import PROLOGUE, Profile
from mkgen.profile.pieces import Exchange, Fork, Item, Run, Turn
from mkgen.simulate.events import Await, Event, Fetch, Pause, Receive, Send, Where, Work
from mkgen.targets import Target

TAPE, EXPERTS, CACHE, STATES, EMBEDDING = "tape", "experts", "cache", "states", "embedding"
DISPATCH, LOOP, BARRIER = "dispatch", "loop", "barrier"
SIGNAL_BYTES = 4                         # of a barrier's message
INSIDE = {                               # (template, macro) -> trips of the loops in its text that depend on data, from its arguments
    ("experts", "take_rest"): lambda args: (f"m.expert_count[0] - -(-FIRST_EXPERTS // {args['image'].pieces})",),
    ("mixture", "weigh_past"): lambda args: () if args["live"].isdigit() else (args["live"],),
}


@dataclass(frozen=True)
class Recorded:
    """An event without its place. kind: work | fetch | await | send | receive; chunk: of the tape, counted from the region's first."""
    kind: str
    op: str
    value: object = None                 # work: cycles; fetch: (bytes, stream, writes); send: (factors, peers, bytes)
    key: object = None
    chunk: int | None = None


def call_seconds(target: Target, steps: int) -> dict[str, float]:
    """What a step bears of its call, if that decodes `steps`: its share of the host's dispatch, and its trip of the program's loop."""
    return {DISPATCH: target.host_dispatch_s} if steps == 1 else {DISPATCH: target.host_dispatch_s / steps, LOOP: target.loop_trip_s}


def expand(plan: Plan, rows: int, *, cycles: Profile, experts: Sequence[Sequence[int]] = (), position: int | None = None) -> list[Event]:
    """The events of a step of `rows` active rows.

    cycles: `mkgen.profile.profile_plan(plan, rows)`. experts: how many distinct ones the rank runs in each layer that routes, in order,
    and how many of them for one row alone (`draws.draw_experts`). position: of every row's token; the context's last if not given."""
    return Expansion(plan, rows, cycles, position).step(experts)


class Expansion:
    """Events of steps of one plan, variant and position; several steps share what they have in common."""

    def __init__(self, plan: Plan, rows: int, cycles: Profile, position: int | None = None, steps_a_call: int = 1):
        self.plan, self.rows, self.profile, self.steps_a_call = plan, rows, cycles, steps_a_call
        self.position = plan.spec.build.context - 1 if position is None else position
        self.table = plan.chunk_table().tolist()
        self.facts = plan.fact_table().reshape(-1, len(plan.fact_names)).tolist()
        steps = [n for region in plan.regions.values() for n in walk(region.body) if isinstance(n, Step)]
        text = " ".join([control_texts(plan), *(t for n in steps for t in inside(n))])
        self.used = [i for i, name in enumerate(plan.fact_names) if i > 3 and name.upper() in text]
        self.text = Text(plan)
        self.model = Model(plan, rows, self.text, Short((), self.table, plan.fact_table().tolist(), plan.tape_rows))
        self.streams = streams(plan)
        self.recorded: dict[tuple, list[Recorded]] = {}

    def step(self, experts: Sequence[Sequence[int]] = ()) -> list[Event]:
        kinds = {image.kind for image in self.plan.experts}
        counts = iter(experts)
        out, base = self.prologue(), 0
        places = self.plan.graph.kind_index()
        for layer, region in self.plan.sequence():
            count, index = None, 0
            if layer is not None:
                role = 0 if region.role == "mixer" else 1
                index = places[layer][role]
            if region.name in kinds:
                count = tuple(next(counts, ())) or None
                if count is None:
                    raise MkgenError(f"{self.plan.spec.model.name}: {len(experts)} numbers of experts are given; more layers route")
            known = () if layer is None else (*(self.facts[layer][i] for i in self.used), self.next_mixer(layer))
            key = region.name, count, known
            if key not in self.recorded:
                self.recorded[key] = Walk(self, region, layer or 0, index, base, count).record()
            out += self.replayed(self.recorded[key], layer, region.name, base)
            base += len(region.chunks)
        return out

    def next_mixer(self, layer: int) -> int | None:
        """What the layer behind begins with, whose first tiles may be started in this one."""
        return self.facts[layer + 1][0] if layer + 1 < len(self.facts) else None

    # -- the ends of the step -------------------------------------------------------------------------------------------

    def prologue(self) -> list[Event]:
        """Dispatch, what tells the peers that this rank is here, the tables of the step: each step's, but for the dispatch."""
        plan = self.plan
        out = [Pause(Where(None, PROLOGUE, why), seconds, why) for why, seconds in call_seconds(plan.target, self.steps_a_call).items()]
        for piece in self.profile.prologue:
            where = Where(None, PROLOGUE, piece.op)
            cost = self.profile.of(piece)
            out.append(Work(where, cost.all + sum(t * c for t, c in zip(self.listing_trips(len(cost.loops), piece.text), cost.loops))))
            if piece.op == "open_exchanges":
                names = tuple(name for name, _, _ in plan.mesh.stages)
                peers = sum(size - 1 for _, size, _ in plan.stages)
                out.append(Send(Where(None, PROLOGUE, BARRIER), BARRIER, names, peers, SIGNAL_BYTES))
        return out

    def listing_trips(self, loops: int, text: str) -> list[int]:
        """Trips of the loops that list the tiles of each row: one loop a row."""
        if loops == 0:
            return []
        if "list_kv_items" not in text or loops != self.rows:
            raise MkgenError(f"simulate: {loops} loops in front of the first region have trips that nothing says: {text}")
        sight = next(s for s in sorted(set(self.model.sights.values()), key=lambda s: -len(s.tables[0])) if f"m.{s.tables[0]}," in text)
        known = self.model.constants
        tile = known["KV_TILE"]
        return [-(-self.position // tile) - sight.oldest(self.position) // tile] * loops

    def tape(self, where: Where, g: int) -> Fetch:
        return Fetch(where, (TAPE, g), self.table[2 * g + 1] * ROW_BYTES, TAPE)

    # -- recorded regions -----------------------------------------------------------------------------------------------

    def replayed(self, recorded: list[Recorded], layer: int | None, region: str, base: int) -> list[Event]:
        out: list[Event] = []
        places: dict[str, Where] = {}
        for r in recorded:
            where = places.get(r.op)
            if where is None:
                where = places[r.op] = Where(layer, region, r.op)
            if r.kind == "work":
                out.append(Work(where, r.value))
            elif r.kind == "fetch":
                if r.chunk is not None:
                    out.append(self.tape(where, base + r.chunk))
                else:
                    size, stream, writes = r.value
                    out.append(Fetch(where, r.key, size, stream, writes))
            elif r.kind == "await":
                out.append(Await(where, r.key if r.chunk is None else (TAPE, base + r.chunk)))
            elif r.kind == "send":
                out.append(Send(where, r.key, *r.value))
            else:
                out.append(Receive(where, r.key))
        return out


class Walk:
    """One region, run once on the scenario's numbers."""

    def __init__(self, owner: Expansion, region: Region, layer: int, index: int, base: int, count: tuple[int, int] | None):
        self.owner, self.region, self.layer, self.index, self.base, self.g, self.count = owner, region, layer, index, base, base, count
        build, rows = owner.plan.spec.build, owner.rows
        last = min(owner.position, build.context - 1)
        scenario = Scenario("simulated", 0, rows, (last,) * rows, tokens(owner.plan, 0, rows), (count[0] if count else 0,))
        self.scenario = scenario
        self.m: SimpleNamespace = owner.model.memory(scenario)
        self.out: list[Recorded] = []

    def record(self) -> list[Recorded]:
        kv = self.owner.model.cache(self.m, self.region.name)
        scope = {"m": self.m, "layer": self.layer, "index": self.index, "rows": self.owner.rows} | ({} if kv is None else {"kv": kv})
        self.items(self.owner.profile.items[self.region.name], scope)
        return self.out

    def value(self, text: str, scope: dict):
        return self.owner.text.value(text, scope)

    def holds(self, text: str | None, scope: dict) -> bool:
        return text is None or bool(self.value(text, scope))

    def items(self, items: tuple[Item, ...], scope: dict) -> None:
        for item in items:
            scope["g"] = self.g
            if isinstance(item, Run):
                self.run(item, scope)
            elif isinstance(item, Turn):
                self.turn(item, scope)
            elif isinstance(item, Fork):
                self.items(item.cases[self.value(item.branch.selector, scope)], dict(scope))
            else:
                self.exchange(item)

    def turn(self, item: Turn, scope: dict) -> None:
        loop: Loop = item.loop
        trips = int(loop.trips) if loop.trips.isdigit() else self.value(loop.trips, scope)
        for i in range(loop.first, loop.first + trips):
            inner = scope | {loop.var: i}
            if self.holds(item.when, inner):
                self.items(item.body, inner)

    def exchange(self, item: Exchange) -> None:
        n, op, cost = item.node, item.piece.op, self.owner.profile.of(item.piece)
        key = n.kind, n.stage, n.round
        if n.part == "finish":               # one text finishes all rounds; its waits are issued while messages come in
            self.out.append(Recorded("work", op, cost.until / n.rounds))
            self.out.append(Recorded("receive", op, key=key))
            self.out.append(Recorded("work", op, (cost.all - cost.until) / n.rounds))
        elif n.round == 0:
            self.out.append(Recorded("work", op, cost.all))
        if n.part == "start":
            self.out.append(Recorded("send", op, (n.factors, n.peers, n.message_bytes(self.owner.rows)), key))

    def run(self, item: Run, scope: dict) -> None:
        op, cost = item.piece.op, self.owner.profile.of(item.piece)
        for w in item.waits:
            if self.holds(w.when, scope):
                self.copy(w, op, scope)
        asked, trips = [], []
        for n in item.steps:
            if (n.template, n.macro) == ("exchange", "await_peers"):
                self.out.append(Recorded("receive", BARRIER, key=BARRIER))
            asked.append(self.holds(n.args.get("when") if isinstance(n.args.get("when"), str) else None, scope))
            self.tables(n)
            trips += [self.value(t, scope) for t in inside(n)]
        asked += [self.holds(n.when, scope) for n in item.tail if isinstance(n, Start)]
        asked += [self.holds(n.when, scope) for n in item.waits]
        if len(trips) != len(cost.loops):
            raise MkgenError(f"simulate: {self.region.name}/{op} has {len(cost.loops)} loops inside whose trips depend on data; "
                             f"how often they turn is known of {len(trips)}\n  fix: say it in mkgen.simulate.expand.INSIDE")
        busy = cost.all if any(asked) or not asked else cost.idle
        busy += sum(max(0, t) * c for t, c in zip(trips, cost.loops))
        for _, behind in item.parts:
            if busy:
                self.out.append(Recorded("work", op, busy / len(item.parts)))
            for n in behind:
                if isinstance(n, Advance):
                    self.g += 1
                    scope["g"] = self.g
                elif self.holds(n.when, scope):
                    self.copy(n, op, scope)

    def copy(self, n: Start | Wait, op: str, scope: dict) -> None:
        plan = self.owner.plan
        args = self.owner.text.values(n.args, scope)
        kind = "fetch" if isinstance(n, Start) else "await"
        if TAPE in plan.transfers[n.transfer].reads:
            self.out.append(Recorded(kind, op, chunk=args[1] - self.base))
            return
        source, target, semaphore = self.owner.text.copy(n.transfer, args)
        writes = target.space == "hbm"
        stream = self.owner.streams[(target if writes else source).buffer]
        self.out.append(Recorded(kind, op, (source.bytes, stream, writes), (n.transfer, semaphore.box)))

    def tables(self, n: Step) -> None:
        """What routing leaves in SMEM: the list of experts, at first its first; those that several rows chose stand evenly among them."""
        if {"expert_count", "expert_ids"} & {*n.writes}:
            ids = self.owner.model.wanted(self.scenario, 0, self.region.name)
            self.m.expert_ids.put(0, self.owner.model.first(ids, self.region.name))
            self.m.expert_count.put(0, len(ids))
            for i, e in enumerate(ids):
                self.m.expert_ids.put(i, e)
            if hasattr(self.m, "taker"):
                distinct, alone = self.count or (0, 0)
                several = {k * distinct // (distinct - alone) for k in range(distinct - alone)}
                for i in range(len(ids)):
                    self.m.taker.put(i, SEVERAL if i in several else 0)


def inside(n: Step) -> tuple[str, ...]:
    """Trips of the loops in a step's text that depend on data, one after another."""
    return INSIDE[n.template, n.macro](n.args) if (n.template, n.macro) in INSIDE else ()


def streams(plan: Plan) -> dict[str, str]:
    """HBM array -> what its bytes are."""
    positional = {s.name for sub in plan.graph.sublayers() for op in sub.ops for s in op.states() if s.positional}
    out = {TAPE: TAPE, "embedding": EMBEDDING} | {image.name: EXPERTS for image in plan.experts}
    return out | {buffer: CACHE if name in positional else STATES for name, buffer in plan.states.items()}
