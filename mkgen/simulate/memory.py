"""HBM as a server that all outstanding copies share.

A copy of `bytes` in `descriptors` pieces is bytes / bytes_per_s + descriptors * descriptor_s of service, and has arrived
`latency_s` after the last of it. The service is shared by descriptors in equal parts (processor sharing): people with the chip
found its DMA engine to serve outstanding descriptors in rotation, so that whatever is started early delays everything else; this
is why the order of starts matters, and why a refill that nobody needs yet should be held back.

Work goes by *virtual time*, the service that each outstanding descriptor has had so far: a copy ends at a virtual time that is
known when it starts, so each start and each end costs one step of a heap.
"""
from __future__ import annotations

from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True)
class Copy:
    """`served`: seconds of service that it needs; `end`: when the last of its bytes left the memory, None: not known yet."""
    begin: float
    descriptors: int
    served: float
    end: float | None = None


class Memory:
    """Copies start in order of time; an arrival may be asked for at any time, as long as nothing starts before it is known."""

    def __init__(self, bytes_per_s: float, descriptor_s: float, latency_s: float):
        self.bytes_per_s, self.descriptor_s, self.latency_s = bytes_per_s, descriptor_s, latency_s
        self.now = self.virtual = self.busy = self.last = 0.0
        self.shares = 0                                  # outstanding descriptors
        self.waiting: list[tuple[float, int, Copy]] = []         # by the virtual time of their end
        self.started = 0

    def start(self, now: float, size: int, descriptors: int = 1) -> Copy:
        self._advance(now)
        copy = Copy(now, descriptors, size / self.bytes_per_s + descriptors * self.descriptor_s)
        self.started += 1
        self.shares += descriptors
        self.busy += copy.served
        heappush(self.waiting, (self.virtual + copy.served / descriptors, self.started, copy))
        return copy

    def arrival(self, copy: Copy) -> float:
        """When the copy has arrived, if nothing else starts before."""
        while copy.end is None:
            self._finish()
        return copy.end + self.latency_s

    def drain(self) -> float:
        """When all copies have arrived."""
        while self.waiting:
            self._finish()
        return self.last + self.latency_s if self.started else 0.0

    def _advance(self, now: float) -> None:
        while self.waiting and self.now + (self.waiting[0][0] - self.virtual) * self.shares <= now:
            self._finish()
        if now > self.now:
            if self.shares:
                self.virtual += (now - self.now) / self.shares
            self.now = now

    def _finish(self) -> None:
        """The next copy to end ends."""
        goal, _, copy = heappop(self.waiting)
        self.now += max(0.0, goal - self.virtual) * self.shares
        self.virtual = goal
        self.shares -= copy.descriptors
        copy.end = self.last = self.now
