"""HBM as a server of a few lanes, over which all copies go.

A copy is one or several descriptors. A descriptor of `bytes` needs bytes / bytes_per_s + descriptor_s of service; it waits, in the
order of starts, for one of `lanes`, and those in a lane share the memory in equal parts. A copy has arrived `latency_s` after the
last of it. People with the chip found both that its DMA engine serves outstanding descriptors in rotation, so that more in flight delays all,
and that the order of starts matters: with one lane the first would be missed, with a lane for each descriptor the second.

Work goes by *virtual time*, the service that each lane in use has had so far: a descriptor ends at a virtual time that is
known when it gets its lane, so each start and each end costs one step of a heap.
"""
from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush


@dataclass(slots=True)
class Copy:
    """served: seconds of service that it needs; left: descriptors that have not ended; end: when the last of them has left the
    memory, None: not known yet."""
    begin: float
    descriptors: int
    served: float
    left: int
    end: float | None = None


class Memory:
    """Copies start in order of time; an arrival may be asked for at any time, as long as nothing starts before it is known."""

    def __init__(self, bytes_per_s: float, descriptor_s: float, latency_s: float, lanes: int):
        self.bytes_per_s, self.descriptor_s, self.latency_s, self.lanes = bytes_per_s, descriptor_s, latency_s, lanes
        self.now = self.virtual = self.busy = self.last = 0.0
        self.queue: deque[Copy] = deque()                # descriptors without a lane, by their copy
        self.served: list[tuple[float, int, Copy]] = []  # those in a lane, by the virtual time of their end
        self.turn = 0

    def start(self, now: float, size: int, descriptors: int = 1) -> Copy:
        self._advance(now)
        copy = Copy(now, descriptors, size / self.bytes_per_s + descriptors * self.descriptor_s, descriptors)
        self.busy += copy.served
        self.queue.extend([copy] * descriptors)
        self._fill()
        return copy

    def arrival(self, copy: Copy) -> float:
        """When the copy has arrived, if nothing else starts before."""
        while copy.end is None:
            self._finish()
        return copy.end + self.latency_s

    def drain(self) -> float:
        """When all copies have arrived."""
        while self.served:
            self._finish()
        return self.last + self.latency_s if self.turn else 0.0

    def _fill(self) -> None:
        while self.queue and len(self.served) < self.lanes:
            copy = self.queue.popleft()
            self.turn += 1
            heappush(self.served, (self.virtual + copy.served / copy.descriptors, self.turn, copy))

    def _advance(self, now: float) -> None:
        while self.served and self.now + (self.served[0][0] - self.virtual) * len(self.served) <= now:
            self._finish()
        if now > self.now:
            if self.served:
                self.virtual += (now - self.now) / len(self.served)
            self.now = now

    def _finish(self) -> None:
        """The next descriptor to end ends; one that waits gets its lane."""
        goal = self.served[0][0]
        self.now += max(0.0, goal - self.virtual) * len(self.served)
        self.virtual = goal
        copy = heappop(self.served)[2]
        copy.left -= 1
        self.last = self.now
        if not copy.left:
            copy.end = self.now
        self._fill()
