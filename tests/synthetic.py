"""A timeline of a plan without a chip's cycles: the region tree is walked in order, with copies served one after another.

For tests of what shows a timeline: every kind of span is there, and the rules of `Timeline` hold. The times mean nothing.
"""
from __future__ import annotations

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Advance, Branch, Collective, Loop, Seq, Start, Step, Wait
from mkgen.simulate.events import Where
from mkgen.simulate.timeline import Span, Timeline
from mkgen.targets.exchange import phase_seconds

STREAMS = {"tape_copy": "tape", "expert_copy": "experts", "embed_copy": "embedding"}
WORK = 1.0e-6


class Walk:
    def __init__(self, plan: Plan, rows: int, turns: int):
        self.plan, self.rows, self.turns = plan, rows, turns
        self.now = self.memory = self.busy = 0.0
        self.spans: list[Span] = []
        self.flying: dict[str, list[Span]] = {}
        self.table = [c for _, r in plan.sequence() for c in r.chunks]
        self.issued = 0
        self.phases: list[Span] = []

    def stream(self, name: str) -> str:
        base = name.removesuffix("_copy")
        return STREAMS.get(name) or next((s for n, s in (("expert", "experts"), ("cache", "cache")) if base.startswith(n)), "states")

    def fetch(self, name: str, size: int, where: Where) -> None:
        begin = max(self.memory, self.now)
        took = size / self.plan.target.hbm_bytes_per_s
        self.memory = begin + took
        self.busy += took
        span = Span("hbm", self.now, self.memory + self.plan.target.dma_latency_s, self.stream(name), where, size, took)
        self.spans.append(span)
        self.flying.setdefault(name, []).append(span)

    def tape(self, where: Where) -> None:
        if self.issued < len(self.table):
            self.fetch("tape_copy", self.table[self.issued].rows * 512, where)
            self.issued += 1

    def until(self, span: Span, what: str, where: Where) -> None:
        if span.end > self.now:
            self.spans.append(Span("wait", self.now, span.end, what, where, span.bytes))
            self.now = span.end

    def node(self, n, layer, region, op) -> str:
        where = Where(layer, region, op)
        if isinstance(n, Seq):
            for x in n.nodes:
                op = self.node(x, layer, region, op)
        elif isinstance(n, Loop):
            for _ in range(int(n.trips) if n.trips.isdigit() else min(self.turns, n.bound or self.turns)):
                for x in n.body:
                    op = self.node(x, layer, region, op)
        elif isinstance(n, Branch):
            return self.node(n.cases[0][1], layer, region, op)
        elif isinstance(n, Step):
            took = WORK * (1 + len(n.reads)) / 4
            self.spans.append(Span("core", self.now, self.now + took, n.op, Where(layer, region, n.op)))
            self.now += took
            return n.op
        elif isinstance(n, Start):
            if n.transfer == "tape_copy":
                self.tape(where)
            else:
                self.fetch(n.transfer, self.plan.transfers[n.transfer].bytes, where)
        elif isinstance(n, Wait):
            if self.flying.get(n.transfer):
                self.until(self.flying[n.transfer].pop(0), self.stream(n.transfer), where)
        elif isinstance(n, Collective) and n.part == "start":
            end = self.now + phase_seconds(self.plan.target, n.peers, n.message_bytes(self.rows))
            self.phases.append(Span("link", self.now, end, n.kind, where, n.peers * n.message_bytes(self.rows)))
            self.spans.append(self.phases[-1])
        elif isinstance(n, Collective) and self.phases:
            self.until(self.phases.pop(), "exchange", where)
        else:
            assert isinstance(n, (Advance, Collective)), n
        return op


def timeline(plan: Plan, rows: int, turns: int = 2) -> Timeline:
    """turns: of loops whose number depends on data."""
    w = Walk(plan, rows, turns)
    first = Where(None, "begin", "dispatch")
    w.spans.append(Span("pause", 0.0, plan.target.host_dispatch_s / 10, "dispatch", first))
    w.now = w.memory = plan.target.host_dispatch_s / 10
    for _ in range(plan.ring_depth):
        w.tape(first)
    for layer, region in plan.sequence():
        w.node(region.body, layer, region.name, region.name)
    end = max(s.end for s in w.spans)
    if end > w.now:
        w.spans.append(Span("pause", w.now, end, "drain", Where(None, "end", "drain")))
    return Timeline(tuple(w.spans), end, sum(s.bytes for s in w.spans if s.track == "hbm"), w.busy)
