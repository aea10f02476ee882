"""Copies on their way: what each semaphore stands for, what each box holds, and what must not be touched meanwhile."""

from __future__ import annotations

from typing import NamedTuple

from mkgen.check.findings import Report
from mkgen.check.refs import Box, View, inside, overlap


class Flying:
    """A started copy. It is over when every copy on its semaphore element has been waited for."""

    __slots__ = ("name", "source", "target", "where", "waited")

    def __init__(self, name: str, source: View, target: View, where: str):
        self.name, self.source, self.target, self.where, self.waited = name, source, target, where, False


class Held:
    """What a finished copy left in a box of VMEM or HBM, and whether a step has read it."""

    __slots__ = ("box", "origin", "where", "used")

    def __init__(self, box: Box, origin: View, where: str, used: bool):
        self.box, self.origin, self.where, self.used = box, origin, where, used


class Made(NamedTuple):
    """What a step made in a box: in which run of a sub-layer, and where it may be written back to."""

    turn: int
    where: str
    homes: list[View]


class Flight:
    """What is on its way, what lies where, and what steps have made that has to be written back."""

    def __init__(self, report: Report):
        self.report = report
        self.semaphores: dict[tuple[str, Box], list[Flying]] = {}
        self.coming: dict[str, list[Flying]] = {}
        self.going: dict[str, list[Flying]] = {}
        self.held: dict[str, list[Held]] = {}
        self.made: dict[str, dict[Box, Made]] = {}

    # -- copies -------------------------------------------------------------------------------------------------------

    def start(self, name: str, source: View, target: View, semaphore: View, limit: int, where: str) -> None:
        add = self.report.add
        if source.shape != target.shape or source.dtype != target.dtype:
            add(
                "pairing",
                where,
                f"{source} {source.dtype} is copied to {target} {target.dtype}",
                "source and target differ in shape or type",
            )
        if target.bytes > limit:
            add("pairing", where, f"copies {target.bytes} bytes", f"the plan says at most {limit}")
        for f in self.coming.get(target.buffer, ()):
            if overlap(f.target.box, target.box):
                add(
                    "flight",
                    where,
                    f"starts into {target} while {f.name} ({f.where}) is on its way to {f.target}",
                    "two copies into one place",
                )
        for f in self.going.get(target.buffer, ()):
            if overlap(f.source.box, target.box):
                add(
                    "flight",
                    where,
                    f"starts into {target} while {f.name} ({f.where}) reads {f.source}",
                    "the source of a copy is overwritten",
                )
        for f in self.coming.get(source.buffer, ()):
            if overlap(f.target.box, source.box):
                add(
                    "flight",
                    where,
                    f"reads {source} while {f.name} ({f.where}) is on its way there",
                    "the source has not arrived",
                )
        if source.space == "vmem":
            self.leave(source, target, where)
        held = self.held.get(target.buffer)
        if held:
            for h in held:
                if not h.used and overlap(h.box, target.box):
                    self.unused(target.buffer, h)
            self.held[target.buffer] = [h for h in held if not overlap(h.box, target.box)]
        f = Flying(name, source, target, where)
        self.semaphores.setdefault((semaphore.buffer, semaphore.box), []).append(f)
        self.coming.setdefault(target.buffer, []).append(f)
        self.going.setdefault(source.buffer, []).append(f)

    def leave(self, source: View, target: View, where: str) -> None:
        """A write-back: what leaves must have been made, and goes to its own place."""
        made = self.made.get(source.buffer, {})
        ready = [box for box in made if inside(source.box, box)]
        if not ready:
            self.report.add(
                "state",
                where,
                f"writes {source} back to {target}",
                "no step has made it since it was last written back",
            )
        for box in ready:
            homes = made.pop(box).homes
            if target not in homes:
                self.report.add(
                    "state",
                    where,
                    f"{source} is written to {target}, its place is {homes[0]}",
                    "a state goes back where it came from",
                )

    def wait(self, name: str, source: View, target: View, semaphore: View, where: str) -> None:
        key = (semaphore.buffer, semaphore.box)
        on_way = self.semaphores.get(key, [])
        open_ones = [f for f in on_way if not f.waited]
        match = next((f for f in open_ones if f.source == source and f.target == target), None)
        if match is None:
            if not open_ones:
                self.report.add(
                    "pairing",
                    where,
                    f"waits on {semaphore} for {source} -> {target}",
                    "no copy was started on this semaphore: the wait never ends",
                )
                return
            match = open_ones[0]
            self.report.add(
                "pairing",
                where,
                f"waits on {semaphore} for {source} -> {target}; started was {match.source} -> {match.target}",
                "start and wait name different copies",
            )
        match.waited = True
        if all(f.waited for f in on_way):
            del self.semaphores[key]
            for f in on_way:
                self.coming[f.target.buffer].remove(f)
                self.going[f.source.buffer].remove(f)
                self.held.setdefault(f.target.buffer, []).append(
                    Held(f.target.box, f.source, f.where, f.target.space != "vmem")
                )

    def unused(self, buffer: str, h: Held) -> None:
        self.report.add("data", h.where, f"{h.origin} is copied to {buffer}{list(h.box)}", "no step reads it there")

    # -- steps --------------------------------------------------------------------------------------------------------

    def read(self, buffer: str, box: Box, where: str) -> None:
        for f in self.coming.get(buffer, ()):
            if overlap(f.target.box, box):
                self.report.add(
                    "flight",
                    where,
                    f"reads {buffer}{list(box)} while {f.name} ({f.where}) is on its way to {f.target}",
                    f"{f.name} has not been waited for",
                )

    def holds(self, buffer: str, box: Box, source: View) -> bool:
        """A finished copy of `source` lies within the box; it counts as read."""
        for h in self.held.get(buffer, ()):
            if h.origin == source and inside(h.box, box):
                h.used = True
                return True
        return False

    def write(self, buffer: str, box: Box, homes: list[View], turn: int, where: str) -> None:
        """homes: where it has to be written back to, if anywhere; turn: which run of a sub-layer this is."""
        for f in self.coming.get(buffer, ()):
            if overlap(f.target.box, box):
                self.report.add(
                    "flight",
                    where,
                    f"writes {buffer}{list(box)} while {f.name} ({f.where}) is on its way to {f.target}",
                    f"the copy {f.name} may come later and overwrite it",
                )
        for f in self.going.get(buffer, ()):
            if overlap(f.source.box, box):
                self.report.add(
                    "flight",
                    where,
                    f"writes {buffer}{list(box)} while {f.name} ({f.where}) reads {f.source}",
                    f"the source of {f.name} changes on its way",
                )
        if homes:
            made = self.made.setdefault(buffer, {})
            if box in made and made[box].turn != turn:
                self.report.add(
                    "state",
                    where,
                    f"makes {buffer}{list(box)} anew",
                    f"what {made[box].where} made there was never written back",
                )
            made[box] = Made(turn, where, homes)

    # -- the end ------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        for (buffer, _), on_way in self.semaphores.items():
            for f in on_way:
                self.report.add(
                    "pairing",
                    f.where,
                    f"{f.source} -> {f.target} on {buffer} is outstanding at the end",
                    f"a start of {f.name} without its wait",
                )
        for buffer, held in self.held.items():
            for h in held:
                if not h.used:
                    self.unused(buffer, h)
        for buffer, made in self.made.items():
            for box, m in made.items():
                self.report.add(
                    "state", m.where, f"{buffer}{list(box)} is made and stays in VMEM", "it was never written back"
                )
