"""Replays the events of a step against a chip: the core in order, HBM and links beside it.

The core works, starts copies and messages without waiting for them, and waits where an event says so. HBM is `memory.py`.
The phases of an exchange follow one another on the links of the core; their latency overlaps with what comes next. Starting a
copy or a message takes no time of the core here: the instructions that do it are in the cycles of the work around them.
"""
from __future__ import annotations

from collections import defaultdict, deque
from typing import Hashable, Iterable

from mkgen.errors import MkgenError
from mkgen.simulate.events import Await, Event, Fetch, Pause, Receive, Send, Where, Work
from mkgen.simulate.memory import Copy, Memory
from mkgen.simulate.timeline import Span, Timeline
from mkgen.targets import Target
from mkgen.targets.exchange import phase

EXCHANGE = "exchange"                    # what the core waits for at a Receive
DRAIN = "drain"                          # ... at the end of the step: copies that no event waits for


def replay(events: Iterable[Event], target: Target, *, hbm: float = 1.0, latency: float = 1.0,
           host_latency: float = 1.0) -> Timeline:
    """The step's timeline.

    hbm scales the memory's rate; latency that of the links; host_latency that of exchanges between hosts, where nothing has been
    published. A key that is started again before its wait is waited for in order.
    Raises `MkgenError` for a wait without a start."""
    return _Replay(target, hbm, latency, host_latency).run(events)


class _Replay:
    def __init__(self, target: Target, hbm: float, latency: float, host_latency: float):
        self.target, self.latency, self.host_latency = target, latency, host_latency
        self.memory = Memory(target.dma_bytes_per_s * hbm, target.dma_descriptor_s, target.dma_latency_s, target.dma_lanes)
        self.now = 0.0
        self.links_free = 0.0
        self.last_message = 0.0
        self.last_where = Where(None, "end", "end")
        self.bytes = 0
        self.spans: list[Span] = []
        self.copies: list[tuple[Fetch, Copy]] = []
        self.coming: dict[Hashable, deque[tuple[Fetch, Copy]]] = defaultdict(deque)
        self.messages: dict[Hashable, deque[float]] = defaultdict(deque)

    def run(self, events: Iterable[Event]) -> Timeline:
        act = {Work: self.work, Fetch: self.fetch, Await: self.wait, Send: self.send, Receive: self.receive, Pause: self.pause}
        for event in events:
            act[type(event)](event)
            self.last_where = event.where
        self.idle(max(self.memory.drain(), self.last_message), DRAIN, self.last_where)
        arrived = (Span("hbm", copy.begin, copy.end + self.memory.latency_s, fetch.stream, fetch.where, fetch.bytes, copy.served)
                   for fetch, copy in self.copies)
        return Timeline((*self.spans, *arrived), self.now, self.bytes, self.memory.busy)

    # -- what the core does ---------------------------------------------------------------------------------------------

    def work(self, event: Work) -> None:
        self.spend("core", self.now + event.cycles / self.target.clock_hz, event.where.op, event.where)

    def pause(self, event: Pause) -> None:
        self.spend("pause", self.now + event.seconds, event.why, event.where)

    def fetch(self, event: Fetch) -> None:
        started = event, self.memory.start(self.now, event.bytes, event.descriptors)
        self.bytes += event.bytes
        self.copies.append(started)
        self.coming[event.key].append(started)

    def wait(self, event: Await) -> None:
        fetch, copy = self.oldest(self.coming, event, "copy")
        self.idle(self.memory.arrival(copy), fetch.stream, event.where)

    def send(self, event: Send) -> None:
        took = phase(self.target, event.peers, event.bytes, factors=event.factors, latency=self.latency,
                     host_latency=self.host_latency)
        self.links_free = max(self.now, self.links_free) + took.links
        arrives = self.links_free + took.latency
        self.last_message = max(self.last_message, arrives)
        self.messages[event.key].append(arrives)
        self.spans.append(Span("link", self.now, arrives, "+".join(event.factors), event.where, event.peers * event.bytes,
                               took.seconds))

    def receive(self, event: Receive) -> None:
        self.idle(self.oldest(self.messages, event, "exchange"), EXCHANGE, event.where)

    # -- time -----------------------------------------------------------------------------------------------------------

    def spend(self, track: str, until: float, what: str, where: Where) -> None:
        if until > self.now:
            self.spans.append(Span(track, self.now, until, what, where))
            self.now = until

    def idle(self, until: float, what: str, where: Where) -> None:
        self.spend("wait", until, what, where)

    def oldest(self, table: dict, event: Await | Receive, kind: str):
        if not table[event.key]:
            raise MkgenError(f"{event.where}: waits for {kind} {event.key!r}, which no event before it has started")
        return table[event.key].popleft()
