"""One rank's trace of the generated code by itself: nothing is touched that is on its way, and nothing is left behind.

This asks the code what the checker asks the plan, and more: here each read is what the kernel's text reads, not what
the plan says that it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mkgen.check.findings import Report
from mkgen.check.refs import Box, overlap
from mkgen.prove.agree import spot_bytes, spot_text
from mkgen.prove.machine import Event, Spot

RULE = "code flight"
ROWS = -2  # of a box of VMEM


@dataclass
class Arrived:
    """What a copy has brought into VMEM; left: rows of the buffer in which nothing has read it."""

    copy: Event
    left: list[tuple[int, int]]


class Hazards:
    """dims: shapes of all buffers; item: bytes of an element. parts: of a copy's source, rows of it that have to be read each, counted
    from its first; none: something of it."""

    def __init__(
        self,
        dims: dict[str, tuple[int, ...]],
        item: dict[str, int],
        report: Report,
        parts: Callable[[Spot], list[tuple[int, int]]] = lambda source: [],
    ):
        self.dims, self.item, self.report, self.parts = dims, item, report, parts
        self.on: dict[Spot, list[list]] = {}  # semaphore -> [event, waited for?]
        self.coming: dict[str, list[Event]] = {}
        self.going: dict[str, list[Event]] = {}
        self.unread: dict[str, list[Arrived]] = {}
        self.owed: dict[Spot, int] = {}  # bytes that a semaphore gives when all sends on it have left
        self.leaving: dict[Spot, list[Event]] = {}
        self.arrivals: set[Spot] = set()
        self.filled: dict[str, set[Box]] = {}  # what copies have brought into buffers that nothing else fills

    def run(self, events: list[Event], hbm: set[str]) -> None:
        """hbm: buffers whose contents are not for the kernel to read."""
        self.hbm = hbm
        steps = {"start": self.start, "send": self.send, "wait": self.wait, "read": self.read, "write": self.write}
        self.arrivals = {e.semaphore for e in events if e.what == "send"}
        self.peers = {e.place[0] for e in events if e.what == "send"}
        brought, made = ({e.place[0] for e in events if e.what in what} for what in (("start",), ("write", "send")))
        self.filled = {name: set() for name in brought - made - hbm}
        for e in events:
            if e.what in steps:
                steps[e.what](e)
        self.finish()

    def bad(self, e: Event | None, where: str, what: str, why: str) -> None:
        self.report.add(RULE, where, what, why)

    def within(self, e: Event, spot: Spot) -> None:
        for (lo, hi), size in zip(spot[1], self.dims[spot[0]]):
            if not 0 <= lo < hi <= size:
                self.bad(e, spot[0], f"{e.what} of {spot_text(spot)}", f"it has the shape {self.dims[spot[0]]}")
                return

    # -- copies ---------------------------------------------------------------------------------------------------------

    def start(self, e: Event) -> None:
        self.within(e, e.source)
        self.within(e, e.place)
        name, box = e.place
        for f in self.coming.get(name, ()):
            if overlap(f.place[1], box):
                self.bad(
                    e,
                    name,
                    f"a copy starts into {spot_text(e.place)}, another is on its way to {spot_text(f.place)}",
                    "two copies into one place",
                )
        for f in self.going.get(name, ()):
            if overlap(f.source[1], box):
                self.bad(
                    e,
                    name,
                    f"a copy starts into {spot_text(e.place)} while one reads {spot_text(f.source)}",
                    "the source of a copy is overwritten",
                )
        for f in self.coming.get(e.source[0], ()):
            if overlap(f.place[1], e.source[1]):
                self.bad(
                    e,
                    e.source[0],
                    f"a copy reads {spot_text(e.source)}, one is on its way there",
                    "its source has not arrived",
                )
        self.replace(e.place)
        self.on.setdefault(e.semaphore, []).append([e, False])
        self.coming.setdefault(name, []).append(e)
        self.going.setdefault(e.source[0], []).append(e)

    def replace(self, place: Spot) -> None:
        """What was copied there is gone: was it read?"""
        name, box = place
        if name in self.unread:
            for a in self.unread[name]:
                if overlap(a.copy.place[1], box):
                    self.unused(a, "before it is overwritten")
            self.unread[name] = [a for a in self.unread[name] if not overlap(a.copy.place[1], box)]

    def unused(self, a: Arrived, when: str) -> None:
        f, (name, box) = a.copy, a.copy.place
        rest = "" if a.left == [box[ROWS]] else f", of it rows {a.left[0][0]} to {a.left[0][1]}"
        self.bad(f, name, f"{spot_text(f.source)} is copied to {spot_text(f.place)}{rest}", f"nothing reads it there {when}")

    def send(self, e: Event) -> None:
        self.within(e, e.source)
        self.within(e, e.place)
        for f in self.coming.get(e.source[0], ()):
            if overlap(f.place[1], e.source[1]):
                self.bad(
                    e,
                    e.source[0],
                    f"a message reads {spot_text(e.source)}, a copy is on its way there",
                    "its source has not arrived",
                )
        self.owed[e.sent] = self.owed.get(e.sent, 0) + spot_bytes(e.source, self.item)
        self.leaving.setdefault(e.sent, []).append(e)
        self.going.setdefault(e.source[0], []).append(e)

    def wait(self, e: Event) -> None:
        key = e.semaphore
        if key in self.owed and key not in self.on:
            self.owed[key] -= spot_bytes(e.place, self.item)
            if self.owed[key] < 0:
                self.bad(
                    e,
                    key[0],
                    f"waits for {spot_text(e.place)} to leave",
                    "no message is on its way: the wait never ends",
                )
            if self.owed[key] <= 0:
                for f in self.leaving.pop(key, ()):
                    self.going[f.source[0]].remove(f)
                del self.owed[key]
            return
        if key in self.arrivals:
            return
        on_way = self.on.get(key, [])
        mine = next((f for f in on_way if not f[1] and f[0].place == e.place and f[0].source == e.source), None)
        if mine is None:
            open_ones = [f for f in on_way if not f[1]]
            self.bad(
                e,
                key[0],
                f"waits for {spot_text(e.source)} -> {spot_text(e.place)} on {spot_text(key)}",
                "another copy was started on it" if open_ones else "no copy was started on it: the wait never ends",
            )
            if not open_ones:
                return
            mine = open_ones[0]
        mine[1] = True
        if all(waited for _, waited in on_way):
            del self.on[key]
            for f, _ in on_way:
                self.coming[f.place[0]].remove(f)
                self.going[f.source[0]].remove(f)
                if f.place[0] not in self.hbm:
                    self.unread.setdefault(f.place[0], []).append(Arrived(f, self.rows(f)))
                if f.place[0] in self.filled:
                    self.filled[f.place[0]].add(f.place[1])

    def rows(self, f: Event) -> list[tuple[int, int]]:
        """The parts of a copy's target that have to be read, or all of it as one."""
        first, last = f.place[1][ROWS]
        return [(first + lo, first + hi) for lo, hi in self.parts(f.source)] or [(first, last)]

    # -- accesses ---------------------------------------------------------------------------------------------------------

    def read(self, e: Event) -> None:
        self.within(e, e.place)
        name, box = e.place
        for f in self.coming.get(name, ()):
            if overlap(f.place[1], box):
                self.bad(
                    e,
                    name,
                    f"reads {spot_text(e.place)} while a copy is on its way to {spot_text(f.place)}",
                    "it has not been waited for",
                )
        if name in self.filled and not any(overlap(held, box) for held in self.filled[name]):
            self.bad(e, name, f"reads {spot_text(e.place)}", "no copy has brought anything there")
        unread = self.unread.get(name)
        if unread:
            for a in unread:
                if overlap(a.copy.place[1], box):
                    first, last = box[ROWS]
                    a.left = [(lo, hi) for lo, hi in a.left if hi <= first or lo >= last]
            self.unread[name] = [a for a in unread if a.left]

    def write(self, e: Event) -> None:
        self.within(e, e.place)
        name, box = e.place
        for f in self.coming.get(name, ()):
            if overlap(f.place[1], box):
                self.bad(
                    e,
                    name,
                    f"writes {spot_text(e.place)} while a copy is on its way to {spot_text(f.place)}",
                    "the copy may come later and overwrite it",
                )
        for f in self.going.get(name, ()):
            if overlap(f.source[1], box):
                self.bad(
                    e,
                    name,
                    f"writes {spot_text(e.place)} while a copy reads {spot_text(f.source)}",
                    "the source of a copy changes on its way",
                )

    def finish(self) -> None:
        for (name, _), on_way in self.on.items():
            for f, waited in on_way:
                if not waited:
                    self.bad(
                        f,
                        name,
                        f"{spot_text(f.source)} -> {spot_text(f.place)} is outstanding at the end",
                        "a start without its wait",
                    )
        for (name, _), owed in self.owed.items():
            if owed:
                self.bad(
                    None,
                    name,
                    f"{owed} bytes of messages have not been waited for at the end",
                    "a semaphore is zero at exit",
                )
        for arrived in self.unread.values():
            for a in arrived:
                self.unused(a, "before the end")
