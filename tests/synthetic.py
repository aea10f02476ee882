"""A timeline of a plan without its cycles: the region tree becomes events in order, and the simulator's engine replays them.

For tests of what shows a timeline: every kind of span is there. What the core computes has made-up lengths: the times mean nothing.
"""
from __future__ import annotations

from collections import defaultdict

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Advance, Branch, Collective, Loop, Seq, Start, Step, Wait
from mkgen.simulate.engine import replay
from mkgen.simulate.events import Await, Event, Fetch, Pause, Receive, Send, Where, Work
from mkgen.simulate.timeline import Timeline

CYCLES = 700.0                           # of a step, for each buffer that it reads


class Walk:
    def __init__(self, plan: Plan, rows: int, turns: int):
        self.plan, self.rows, self.turns = plan, rows, turns
        self.events: list[Event] = []
        self.open: dict[tuple, int] = defaultdict(int)
        self.run = 0                     # of a sub-layer: but for the tape, no copy is waited for in another
        self.phases: list[int] = []
        self.table = [c.rows * 512 for _, r in plan.sequence() for c in r.chunks]
        self.issued = 0

    def stream(self, name: str) -> str:
        heads = {"tape": "tape", "expert": "experts", "cache": "cache", "embed": "embedding"}
        return next((s for head, s in heads.items() if name.startswith(head)), "states")

    def fetch(self, name: str, where: Where) -> None:
        size = self.plan.transfers[name].bytes
        if name == "tape_copy":
            if self.issued == len(self.table):
                return
            size, self.issued = self.table[self.issued], self.issued + 1
        writes = self.plan.transfers[name].target.split("at")[0].split(".")[1] in self.plan.states.values()
        self.events.append(Fetch(where, self.key(name), size, self.stream(name), writes))
        self.open[self.key(name)] += 1

    def key(self, name: str) -> tuple:
        return (name,) if name == "tape_copy" else (name, self.run)

    def trips(self, n: Loop) -> int:
        if n.trips == "RING_DEPTH":
            return self.plan.ring_depth
        return int(n.trips) if n.trips.isdigit() else min(self.turns, n.bound or self.turns)

    def node(self, n, layer, region, op) -> str:
        where = Where(layer, region, op)
        if isinstance(n, (Seq, Loop, Branch)):
            body = n.nodes if isinstance(n, Seq) else n.body if isinstance(n, Loop) else n.cases[0][1].nodes
            trips = 1 if isinstance(n, (Seq, Branch)) else self.trips(n)
            for x in body * trips:
                op = self.node(x, layer, region, op)
        elif isinstance(n, Step):
            self.events.append(Work(Where(layer, region, n.op), CYCLES * (1 + len(n.reads))))
            return n.op
        elif isinstance(n, Start):
            if n.when and "+" in n.when:         # one ahead in a loop whose number depends on data: the first ones are enough here
                return op
            self.fetch(n.transfer, where)
        elif isinstance(n, Wait):
            if self.open[self.key(n.transfer)]:
                self.open[self.key(n.transfer)] -= 1
                self.events.append(Await(where, self.key(n.transfer)))
        elif isinstance(n, Collective) and n.part == "start":
            self.phases.append(len(self.events))
            self.events.append(Send(Where(layer, region, f"{n.kind}, start"), self.phases[-1], n.factors, n.peers, n.message_bytes(self.rows)))
        elif isinstance(n, Collective) and self.phases:
            self.events.append(Receive(Where(layer, region, f"{n.kind}, finish"), self.phases.pop(0)))
        else:
            assert isinstance(n, (Advance, Collective)), n
        return op


def timeline(plan: Plan, rows: int, turns: int = 2) -> Timeline:
    """The replay of `step`."""
    return replay(step(plan, rows, turns), plan.target)


def step(plan: Plan, rows: int, turns: int = 2) -> list[Event]:
    """turns: of loops whose number depends on data."""
    w = Walk(plan, rows, turns)
    first = Where(None, "begin", "dispatch")
    w.events.append(Pause(first, plan.target.host_dispatch_s / 10, "dispatch"))
    for layer, region in plan.sequence():
        w.run += 1
        w.node(region.body, layer, region.name, region.name)
    return w.events
