"""How many cycles a listing takes: bundles in order, one a cycle, held back where a unit is busy or has no result yet.

The compiler counts on the hardware to hold a bundle back, and its listing does not show it. The numbers are those of libtpu's
own model of the chip: differences between neighbours on the critical paths that its static profiler prints (libtpu 0.0.52, tpu7x).
Copies cost their issue here and nothing else: waiting for memory is the simulator's affair.
"""
from __future__ import annotations

import copy
import re
from collections import deque
from dataclasses import dataclass

from mkgen.profile.listing import Listing, Loop, Op, delayed

PUSH, TURNED, LEFT = 4, 8, 8             # cycles that an MXU takes for a push of weights; of transposed ones; for 16 rows of the left operand
RESULT_8, RESULT_16 = 188, 211           # from the left operand to its product, 8 and 16 rows
REDUCE, PERMUTE, TRANSPOSE = 141, 127, 68            # XLU: lane reductions; lane shuffles; last push of a transpose
XLU_BUSY = 4                             # an XLU takes one operand in so many
TRANSCENDENTAL = 10                      # EUP: exp2, reciprocal, rsqrt, ...
TO_SCALAR = 49                           # vpush to spop
VECTOR = 2                               # a vector ALU's result to its next reader; selects, masks and moves have theirs at once
BUSY = {"push": PUSH, "turned": TURNED, "left": LEFT, "xlu": XLU_BUSY, "other": 1}
XLUS = (".xlu0", ".xlu1")
TRIPS = 4                                # a loop is replayed so often, and counted on from its last trip
UNIT = re.compile(r"\.(mxu|xlu)(\d)")
EUP = ("vrsqrt", "vexp2", "vrcp", "vlog2", "vtanh", "vpow2", "vsinq", "vcosq", "verf", "vsigmoid")
QUICK = ("vld", "vpop", "vstv", "vmov", "vlaneseq", "vphi", "vsel", "vcmp", "vnez", "vmand", "vmor", "vmxor", "vmneg", "vmmov", "vcmask")


@dataclass(frozen=True)
class Cycles:
    """Of one trip of a listing's last loop. idle: with all conditions false; loops: of one trip of each loop inside whose trips
    depend on data, in order, not counted in `all`; until: of `all`, what is over when its last wait for a copy is issued."""
    all: float
    idle: float
    loops: tuple[float, ...] = ()
    until: float = 0.0


def cycles_of_loop(listing: Listing) -> Cycles:
    if not listing.loops:                                # nothing is left of it: the compiler found no effect
        return Cycles(0.0, 0.0)
    loop = listing.loops[-1]
    every, idle = Board(listing, False), Board(listing, True)
    each = every.trips(loop)
    every.dynamic.clear()
    began = every.now
    every.run(loop.first, loop.last, loop.inside)        # once more: its loops, its last wait
    return Cycles(each, idle.trips(loop), tuple(every.dynamic), max(0.0, every.waited - began))


class Board:
    """When each unit, queue and register is free or ready, while bundles are issued."""

    def __init__(self, listing: Listing, skip: bool):
        self.bundles, self.skip, self.now, self.waited = listing.bundles, skip, 0.0, 0.0
        self.free: dict[str, float] = {}
        self.ready: dict[str, float] = {}
        self.queues: dict[str | None, float] = {}        # when a result can be taken
        self.transposed: dict[str, deque[float]] = {}    # likewise, of transposes: in order, a register each
        self.dynamic: list[float] = []
        wide = any(int(m.group(1)) % 4 >= 2 for b in self.bundles for o in b.ops if (m := re.search(r"^vpop\S*mrb\[(\d+)\]", o.name)))
        self.result = RESULT_16 if wide else RESULT_8
        self.registers = {unit: count_of(listing, "vpop.trf", unit) // max(1, count_of(listing, "vxpose", unit, ".end")) for unit in XLUS}

    def trips(self, loop: Loop) -> float:
        """Cycles of a trip among others."""
        marks = [self.now]
        for _ in range(TRIPS):
            self.run(loop.first, loop.last, loop.inside)
            marks.append(self.now)
        return (marks[-1] - marks[-3]) / 2

    def __deepcopy__(self, memo) -> "Board":
        made = copy.copy(self)
        made.free, made.ready, made.queues = dict(self.free), dict(self.ready), dict(self.queues)
        made.transposed = {unit: waiting.copy() for unit, waiting in self.transposed.items()}
        made.dynamic = []
        return made

    def run(self, first: int, last: int, loops: list[Loop]) -> None:
        """Issues bundles first..last, following branches forward, and the loops among them as often as they turn."""
        at = first
        heads = {x.first: x for x in loops}
        while at <= last:
            loop = heads.get(at)
            if loop:
                self.loop(loop)
                at = loop.last + 1
                continue
            self.issue(self.bundles[at].ops)
            goal = self.bundles[at].branch
            if goal is not None and at < goal <= last + 1 and (self.bundles[at].always or self.skip):
                for n in range(at + 1, min(delayed(self.bundles, at), goal - 1, last) + 1):
                    self.issue(self.bundles[n].ops)
                at = goal
            else:
                at += 1

    def loop(self, loop: Loop) -> None:
        if loop.trips is None:
            apart = copy.deepcopy(self)
            self.dynamic.append(apart.trips(loop))
        else:
            turns = min(loop.trips, TRIPS)
            entered = began = self.now
            for _ in range(turns):
                began = self.now
                self.run(loop.first, loop.last, loop.inside)
            more = (loop.trips - turns) * (self.now - began)
            self.now += more
            self.waited += more if self.waited > entered else 0.0

    def issue(self, ops: tuple[Op, ...]) -> None:
        now = self.now + 1
        for op in ops:
            now = max(now, self.earliest(op))
        self.now = now
        for op in ops:
            self.take(op, now)
            if op.name == "dma.done.wait":
                self.waited = now

    def earliest(self, op: Op) -> float:
        when = max((self.ready.get(r, 0.0) for r in op.reads), default=0.0)
        name = op.name
        if name.startswith("vpop.trf"):
            waiting = self.transposed.get(name[-5:])
            return max(when, waiting[0]) if waiting else when
        if name.startswith(("vpop", "spop")):
            return max(when, self.queues.get(slot(op), 0.0))
        if unit := UNIT.search(name):
            return max(when, self.free.get(port(name) + unit.group(), 0.0))
        return when

    def take(self, op: Op, now: float) -> None:
        name = op.name
        latency = 1 if name.startswith(QUICK) or not name.startswith("v") else VECTOR
        for r in op.writes:
            self.ready[r] = now + latency
        if name.startswith("vpop.trf") and self.transposed.get(name[-5:]):
            self.transposed[name[-5:]].popleft()
        if name.startswith(("vpop", "spop")):
            return
        unit = UNIT.search(name)
        if unit:
            turned = "turned" if ".xpose." in name else port(name)
            self.free[port(name) + unit.group()] = now + BUSY[turned]
        if name.startswith("vmatmul"):
            self.queues[slot(op)] = now + self.result
        elif name.startswith("vxpose"):
            if name.endswith(".end"):                    # a transpose has no result before its last push
                self.transposed.setdefault(unit.group(), deque(maxlen=4096)).extend([now + TRANSPOSE] * self.registers[unit.group()])
        elif unit and unit.group(1) == "xlu":
            self.queues[slot(op)] = now + (REDUCE if ".xlane." in name else PERMUTE)
        elif name.startswith(EUP):
            self.queues[slot(op)] = now + TRANSCENDENTAL
        elif name.startswith("vpush"):
            self.queues[slot(op)] = now + TO_SCALAR


def count_of(listing: Listing, begins: str, unit: str, ends: str = "") -> int:
    return sum(o.name.startswith(begins) and unit in o.name and o.name.endswith(ends) for b in listing.bundles for o in b.ops)


def port(name: str) -> str:
    """What an instruction keeps busy of its unit."""
    return "left" if name.startswith("vmatmul") else "push" if name.startswith("vmatpush") else "xlu" if ".xlu" in name else "other"


def slot(op: Op) -> str | None:
    """Where a result waits to be taken: the MXU's result registers in fours, else the number of the instruction that made it."""
    found = re.search(r"mrb\[(\d+)\]", op.name)
    return f"mrb{int(found.group(1)) // 4}{UNIT.search(op.name).group()}" if found else op.queued
