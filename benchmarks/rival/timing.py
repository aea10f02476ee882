"""How long a scheduled module takes: the profile's cycles of its launches in their order, over one memory that all of them
share.

The static profile of an operation knows neither of the others. Asynchronous copies into VMEM run beside it, and both read HBM:
taken one by one, a dense step would read its weights faster than the memory gives them. So a launch that reads HBM itself takes
the memory for its bytes, and asynchronous copies move, in their order, with what is left of its time; who reads a copy waits
for its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from rival.hlo import COPY_DONE, COPY_START, HBM, Instruction, Module

SLICES = ("dynamic-slice", "slice", "gather")


@dataclass
class Clock:
    """Cycles so far, bytes that the memory has given, and copies under way: name -> bytes left, in the order of their start."""

    rate: float  # bytes a cycle
    now: float = 0.0
    bytes: float = 0.0
    queue: deque[str] = field(default_factory=deque)
    left: dict[str, float] = field(default_factory=dict)

    def run(self, cycles: float, own: float) -> None:
        """Something of so many cycles that takes `own` bytes itself."""
        cycles = max(cycles, own / self.rate)
        self.now += cycles
        self.bytes += own
        self.spend(cycles * self.rate - own)

    def spend(self, spare: float) -> None:
        while self.queue and spare > 0:
            first = self.queue[0]
            part = min(spare, self.left[first])
            self.left[first] -= part
            self.bytes += part
            spare -= part
            if self.left[first] <= 0:
                self.queue.popleft()

    def start(self, name: str, size: float) -> None:
        self.queue.append(name)
        self.left[name] = size

    def wait(self, name: str) -> None:
        """All that stands in front of it in the queue comes first."""
        if self.left.get(name, 0.0) > 0:
            ahead = sum(self.left[n] for n in list(self.queue)[: self.queue.index(name) + 1])
            self.now += ahead / self.rate
            self.spend(ahead)


Price = Callable[[Instruction], float]  # cycles of an exchange, in place of the profile's


def step(module: Module, rate: float, price: Price | None = None) -> dict:
    """cycles: of a step. profile: the launches' own figures, added up. bytes: what the memory gave. without: launches that the
    profile has no figure for, by op; they cost nothing here. price: of exchanges; None: as profiled."""
    done = [(i, times) for i, times in module.runs() if i.launch]
    without: dict[str, float] = {}
    for i, times in done:
        if i.cycles is None:
            without[i.op] = without.get(i.op, 0) + times
    clock = timed(module, module.entry, rate, price)
    return {"cycles": clock.now, "bytes": clock.bytes, "without": without, "profile": sum(t * (i.cycles or 0) for i, t in done)}


def timed(module: Module, computation: str, rate: float, price: Price | None) -> Clock:
    """A computation alone, from an idle memory."""
    clock, made = Clock(rate), {i.name: i for i in module.computations[computation]}
    for i in module.computations[computation]:
        if i.op in COPY_START:
            clock.start(i.name, i.moved)
        elif i.op in COPY_DONE:
            clock.wait(i.operands[0])
        elif i.op in ("while", "call"):
            inner = timed(module, module.body(i) if i.op == "while" else i.called[0], rate, price)
            often = module.often(i) if i.op == "while" else 1.0
            clock.run(often * inner.now, often * inner.bytes)
        elif i.launch and i.collective and price:
            clock.run(price(i), 0.0)
        elif i.launch:
            cycles = i.cycles or 0
            # bytes beyond what it could move in its time at twice the rate are no traffic: an operand that is read in part
            clock.run(cycles, min(traffic(module, made, i), 2 * cycles * rate))
    clock.run(0.0, 0.0)
    return clock


def traffic(module: Module, made: dict[str, Instruction], i: Instruction) -> float:
    """HBM bytes that a launch reads and writes: of an operand that is only sliced the slices, of a result that is updated in
    place the update."""
    inside = module.computations.get(i.called[0], []) if i.op == "fusion" and i.called else []
    updates = [x for x in inside if x.op == "dynamic-update-slice"] if inside else [i] if i.op == "dynamic-update-slice" else []
    total = sum(a.bytes for a in i.arrays if a.space == HBM) if not updates else 0.0
    for n, name in enumerate(i.operands):
        arrays = made[name].arrays if name in made else ()
        if len(arrays) != 1 or arrays[0].space != HBM or prod(arrays[0].dims) == 1:
            continue
        total += (
            min(arrays[0].bytes, read_of(module, i.called[0], n))
            if inside
            else (0.0 if updates and n == 0 else arrays[0].bytes)
        )
    return total


def read_of(module: Module, fusion: str, number: int) -> float:
    """Bytes that a fused computation reads of its parameter: all, unless every reader of it takes a slice or updates one."""
    inside = module.computations[fusion]
    names = {i.name for i in inside if i.op == "parameter" and i.number == number}
    total = 0.0
    for i in inside:
        if not names & set(i.operands):
            continue
        if i.op == "bitcast":
            names.add(i.name)
        elif i.op in SLICES and i.operands[0] in names:
            total += sum(a.bytes for a in i.arrays)
        elif i.op == "fusion":
            total += sum(read_of(module, i.called[0], n) for n, o in enumerate(i.operands) if o in names)
        elif i.op == "dynamic-update-slice" and i.operands[0] in names:
            continue
        else:
            return float("inf")
    return float("inf") if inside[-1].name in names else total
