"""The traces of all ranks against each other: every message is awaited, none comes too early, none too late.

Ranks run at any speed. What is certain is only what happens before what: a rank's own order, and a message or a signal
before the wait that it ends. Vector clocks over one run of all traces hold exactly that, whatever the speeds
(Fidge; Mattern: "Virtual time and global states of distributed systems", 1989). A message is safe if all that its target has done
with the place, and all its waits for earlier uses of the semaphore, happen before the message is sent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from dataclasses import dataclass, field
from operator import itemgetter

from mkgen.check.findings import Report
from mkgen.check.refs import Box, overlap
from mkgen.prove.agree import spot_bytes, spot_text
from mkgen.prove.machine import Event, Spot

RULE = "code ranks"


@dataclass
class Message:
    sender: int
    event: Event
    use: int  # of the semaphore, counted from 0
    clock: tuple[int, ...]  # of all ranks, as the sender knew them
    bytes: int


@dataclass
class Rank:
    """One rank's part of the run. at: its next event; clock[r]: how many of r's events are certain to be over."""

    number: int
    events: list[Event]
    clock: list[int]
    at: int = 0
    arrived: dict[Spot, list[Message]] = field(default_factory=lambda: defaultdict(list))
    signals: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    signalled: int = 0  # of them, taken
    entered: int | None = None  # when it first told anybody that it is here


class Ranks:
    """events: of each rank, those of `shared_events`. item: bytes of an element."""

    def __init__(self, events: list[list[Event]], item: dict[str, int], report: Report):
        self.item, self.report = item, report
        self.ranks = [Rank(r, e, [0] * len(events)) for r, e in enumerate(events)]
        self.use: dict[
            tuple[int, int], int
        ] = {}  # (rank, event) of a send or a wait -> which use of its semaphore it belongs to
        self.messages: list[list[Message]] = [[] for _ in events]  # to each rank
        self.ends: list[dict[tuple[Spot, int], int]] = [{} for _ in events]  # (semaphore, use) -> event that ends it
        self.waited: list[dict[tuple[Spot, int], int]] = [defaultdict(int) for _ in events]  # -> bytes
        self.total: dict[tuple[int, Spot, int], int] = defaultdict(int)  # (rank, semaphore, use) -> bytes sent
        self.find_uses()

    def bad(self, where: str, what: str, why: str) -> None:
        self.report.add(RULE, where, what, why)

    def find_uses(self) -> None:
        """A use of a semaphore: the shortest runs of messages, as many of each sender, and of waits that agree in bytes."""
        sent: dict[tuple[int, Spot], dict[int, list]] = defaultdict(lambda: defaultdict(list))
        waits: dict[tuple[int, Spot], list] = defaultdict(list)
        for rank in self.ranks:
            for n, e in enumerate(rank.events):
                if e.what == "send":
                    sent[e.peer, e.semaphore][rank.number].append(((rank.number, n), spot_bytes(e.place, self.item)))
                elif e.what == "wait":
                    waits[rank.number, e.semaphore].append(((rank.number, n), spot_bytes(e.place, self.item)))
        for key in sent.keys() | waits.keys():
            ends, total = {0: 0}, 0  # bytes -> waits so far
            for n, (_, size) in enumerate(waits[key], 1):
                total += size
                ends[total] = n
            use = given = done = 0
            for n in range(max(map(len, sent[key].values()), default=0)):
                now = [messages[n] for messages in sent[key].values() if n < len(messages)]
                given += sum(size for _, size in now)
                self.total[(*key, use)] += sum(size for _, size in now)
                self.use.update({at: use for at, _ in now})
                if given in ends:
                    self.use.update({at: use for at, _ in waits[key][done : ends[given]]})
                    use, done = use + 1, ends[given]
            self.use.update({at: use for at, _ in waits[key][done:]})

    def run(self) -> None:
        while True:
            moved = [rank for rank in self.ranks if self.go(rank)]
            if not moved:
                break
        stuck = [rank for rank in self.ranks if rank.at < len(rank.events)]
        if stuck:
            e = stuck[0].events[stuck[0].at]
            self.bad(
                spot_text(e.semaphore or e.place),
                f"{len(stuck)} ranks wait for ever, rank {stuck[0].number} for {spot_text(e.place)}",
                "every message that is awaited is sent",
            )
            return
        for rank in self.ranks:
            self.judge(rank)

    def go(self, rank: Rank) -> bool:
        """Runs a rank until it has to wait for another."""
        began = rank.at
        while rank.at < len(rank.events) and getattr(self, "on_" + rank.events[rank.at].what)(
            rank, rank.events[rank.at]
        ):
            rank.at += 1
            rank.clock[rank.number] = rank.at
        return rank.at > began

    # -- events -----------------------------------------------------------------------------------------------------------

    def on_read(self, rank: Rank, e: Event) -> bool:
        return True

    on_write = on_read

    def on_signal(self, rank: Rank, e: Event) -> bool:
        rank.entered = rank.at if rank.entered is None else rank.entered
        self.ranks[e.peer].signals.append((e.count, tuple(rank.clock)))
        return True

    def on_await(self, rank: Rank, e: Event) -> bool:
        """Ends when as many signals are here as are awaited so far; a wait for fewer than come is a finding at the end."""
        need, have = rank.signalled + e.count, 0
        for n, (count, clock) in enumerate(rank.signals):
            have += count
            if have >= need:
                for _, known in rank.signals[: n + 1]:
                    self.learn(rank, known)
                rank.signalled = need
                return True
        return False

    def on_send(self, rank: Rank, e: Event) -> bool:
        if not 0 <= e.peer < len(self.ranks) or e.peer == rank.number:
            self.bad(
                spot_text(e.place),
                f"rank {rank.number} sends to rank {e.peer}",
                f"a peer is another of {len(self.ranks)} ranks",
            )
            return True
        m = Message(rank.number, e, self.use[rank.number, rank.at], tuple(rank.clock), spot_bytes(e.place, self.item))
        self.messages[e.peer].append(m)
        self.ranks[e.peer].arrived[e.semaphore].append(m)
        return True

    def on_wait(self, rank: Rank, e: Event) -> bool:
        """Ends with as many bytes of its use as are awaited; which came first is not known before all are here."""
        key, use = e.semaphore, self.use[rank.number, rank.at]
        mine = [m for m in rank.arrived[key] if m.use == use]
        need, have = self.waited[rank.number][key, use] + spot_bytes(e.place, self.item), sum(m.bytes for m in mine)
        if have < need:
            return False
        if need == self.total[rank.number, key, use]:
            for m in mine:
                self.learn(rank, m.clock)
            rank.arrived[key] = [m for m in rank.arrived[key] if m.use != use]
        self.waited[rank.number][key, use] = need
        self.ends[rank.number][key, use] = rank.at
        return True

    @staticmethod
    def learn(rank: Rank, clock: tuple[int, ...]) -> None:
        rank.clock = [max(a, b) for a, b in zip(rank.clock, clock)]

    # -- verdicts ---------------------------------------------------------------------------------------------------------

    def judge(self, rank: Rank) -> None:
        """All messages to a rank against what it does itself."""
        ends, mine = self.ends[rank.number], self.messages[rank.number]
        given: dict[tuple[Spot, int], int] = defaultdict(int)
        for m in mine:
            given[m.event.semaphore, m.use] += m.bytes
        for key in given.keys() | self.waited[rank.number].keys():
            if given[key] != self.waited[rank.number][key]:
                self.bad(
                    spot_text(key[0]),
                    f"rank {rank.number} is sent {given[key]} bytes in use {key[1]}, "
                    f"and waits for {self.waited[rank.number][key]}",
                    "a semaphore is zero behind each use",
                )
        touched: dict[tuple, list[tuple[int, Event]]] = defaultdict(list)
        for n, e in enumerate(rank.events):
            if e.what in ("read", "write", "send"):
                touched[slot_of(e.source if e.what == "send" else e.place)].append((n, e))
        for m in mine:
            name, slot = slot_of(m.event.place)
            for key in [(name, slot), (name, None)] if slot else [k for k in touched if k[0] == name]:
                self.judge_message(rank, m, ends, touched[key])
        self.judge_places(rank, mine, ends)
        if (given_signals := sum(count for count, _ in rank.signals)) != rank.signalled:
            self.bad(
                "barrier",
                f"rank {rank.number} is signalled {given_signals} times, and waits for {rank.signalled}",
                "a semaphore is zero at exit",
            )

    def judge_message(self, rank: Rank, m: Message, ends: dict, touched: list) -> None:
        key, knew, place = m.event.semaphore, m.clock[rank.number], m.event.place
        who = f"rank {m.sender}'s message into {spot_text(place)} (use {m.use} of {spot_text(key)})"
        if rank.entered is None or knew < rank.entered:
            self.bad(spot_text(place), who, f"rank {rank.number} may not be in the kernel yet")
        before = ends.get((key, m.use - 1))
        if before is not None and knew <= before:
            self.bad(
                spot_text(key),
                who,
                "may come while the target still waits for the use before: the semaphore cannot tell them apart",
            )
        until = ends.get((key, m.use))
        if until is None:
            return
        for n, e in touched[
            bisect_left(touched, knew, key=itemgetter(0)) : bisect_left(touched, until, key=itemgetter(0))
        ]:
            box = e.source[1] if e.what == "send" else e.place[1]
            if overlap(box, place[1]):
                self.bad(
                    spot_text(place),
                    who,
                    f"may overwrite what rank {rank.number} is about to {'send' if e.what == 'send' else e.what}",
                )
                break

    def judge_places(self, rank: Rank, mine: list[Message], ends: dict) -> None:
        """No message may meet another in one place; those of other slots (the two leading dimensions) do not."""
        by_slot: dict[tuple, list[Message]] = defaultdict(list)
        slotted = {m.event.place[0]: True for m in mine}
        for m in mine:
            slotted[m.event.place[0]] &= all(hi == lo + 1 for lo, hi in m.event.place[1][:2])
        for m in mine:
            buffer, box = m.event.place
            by_slot[buffer, box[:2] if slotted[buffer] else ()].append(m)
        for messages in by_slot.values():
            last: dict = {}
            for m in messages:
                box = m.event.place[1]
                for other, n in last.items():
                    if overlap(other, box) and m.clock[rank.number] <= n:
                        self.bad(
                            spot_text(m.event.place),
                            f"rank {m.sender}'s message (use {m.use} of {spot_text(m.event.semaphore)})",
                            "may meet an earlier one that has not been waited for",
                        )
                last[box] = ends.get((m.event.semaphore, m.use), len(rank.events))


def slot_of(spot: Spot) -> tuple[str, Box | None]:
    """(buffer, its two leading indices), or None for them if the box spans several: boxes of other slots do not overlap."""
    buffer, box = spot
    return buffer, box[:2] if len(box) > 1 and all(hi == lo + 1 for lo, hi in box[:2]) else None


def shared_events(events: list[Event]) -> list[Event]:
    """Of a rank's trace, what concerns others: messages, signals, waits for them, and accesses of the places that peers write.

    A message's source is read until it has left: the wait for that stands as another read of it."""
    sends = [e for e in events if e.what == "send"]
    arrivals, leaving = {e.semaphore for e in sends}, {e.sent for e in sends}
    remote = {e.place[0] for e in sends}
    out: list[Event] = []
    on_way: dict[Spot, list[Event]] = defaultdict(list)
    left: dict[Spot, int] = defaultdict(int)
    for e in events:
        if e.what in ("signal", "await"):
            out.append(e)
        elif e.what == "send":
            out.append(e)
            on_way[e.sent].append(e)
        elif e.what == "wait":
            if e.semaphore in arrivals:
                out.append(e)
            elif e.semaphore in leaving:
                out += [Event("read", f.source) for f in on_way[e.semaphore] if f.source[0] in remote]
                left[e.semaphore] += 1
                if left[e.semaphore] == len(on_way[e.semaphore]):
                    left[e.semaphore], on_way[e.semaphore] = 0, []
        elif e.place[0] in remote:
            out.append(e)
    return out
