"""XLA's scheduled module as data: instructions in the order in which a core runs them, and what they add up to.

Reads the text of a compiled module. How often a loop runs is not in it: `trips` says so, by the scope that the source gave the
loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import prod

BYTES = {
    "pred": 1,
    "s8": 1,
    "u8": 1,
    "f8e4m3fn": 1,
    "s16": 2,
    "u16": 2,
    "bf16": 2,
    "f16": 2,
    "s64": 8,
    "u64": 8,
    "f64": 8,
}  # others: 4
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
COPY_START, COPY_DONE = (
    ("copy-start", "slice-start"),
    ("copy-done", "slice-done"),
)  # between memories, beside the core's own work
NAMES = ("bitcast", "tuple", "get-tuple-element", "opt-barrier", "add-dependency")  # another name for what is there already
NO_WORK = (
    *NAMES,
    *COPY_START,
    *COPY_DONE,
    "parameter",
    "constant",
    "after-all",
    "partition-id",
    "replica-id",
    "while",
    "conditional",
    "call",
    "async-update",
)
HBM, VMEM = 0, 1
LINE = re.compile(r"\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>\(.*?\)|\S+) (?P<op>[a-z][a-z0-9\-]*)\((?P<rest>.*)$")
SHAPE = re.compile(r"(?P<dtype>[a-z][a-z0-9]*)\[(?P<dims>[\d,]*)\](?:\{(?P<layout>[^}]*)\})?")
CYCLES = re.compile(r'"bundle_analysis_data":\{"estimated_cycles":"(-?\d+)"')
CALLED = re.compile(r"(?:body|condition|to_apply|calls|true_computation|false_computation)=%([\w.\-]+)")


@dataclass(frozen=True)
class Array:
    dtype: str
    dims: tuple[int, ...]
    space: int  # HBM 0, VMEM 1, SMEM 6, …

    @property
    def bytes(self) -> int:
        return prod(self.dims) * BYTES.get(self.dtype, 4)


@dataclass(frozen=True)
class Instruction:
    name: str
    op: str
    arrays: tuple[Array, ...]  # of its result, tuples flattened
    operands: tuple[str, ...]
    scope: str  # op_name of its metadata: the source's scopes, then the primitive
    called: tuple[str, ...]  # computations: body and condition of a while, what a call calls
    cycles: int | None  # of the static LLO profile, where one was asked for
    number: int = -1  # of a parameter

    @property
    def scalar(self) -> bool:
        """The scalar unit's, in between: address arithmetic, loop counters."""
        return self.op not in ("fusion", "custom-call", *COLLECTIVES) and all(prod(a.dims) == 1 for a in self.arrays)

    @property
    def launch(self) -> bool:
        """An operation of its own for the core: a fusion, a lone compute op, a copy within a memory, a kernel, an exchange. The
        second half of an asynchronous one is none."""
        return self.op not in NO_WORK and not self.op.endswith("-done") and not self.scalar

    @property
    def collective(self) -> bool:
        return self.op.removesuffix("-start") in COLLECTIVES or (self.op == "async-start" and self.name.startswith(COLLECTIVES))

    @property
    def moved(self) -> int:
        """Bytes of an asynchronous copy: of the smaller of its ends, since a slice's source is whole."""
        return min(a.bytes for a in self.arrays if a.dims)


def arrays_of(text: str) -> tuple[Array, ...]:
    found = []
    for m in SHAPE.finditer(text):
        space = re.search(r"S\((\d+)\)", m["layout"] or "")
        found.append(Array(m["dtype"], tuple(int(d) for d in m["dims"].split(",") if d), int(space[1]) if space else HBM))
    return tuple(found)


def instruction(line: str) -> Instruction | None:
    m = LINE.match(line)
    if not m:
        return None
    depth, end = 0, 0
    for end, c in enumerate(m["rest"]):
        depth += (c == "(") - (c == ")")
        if depth < 0:
            break
    inside, said, op = m["rest"][:end], m["rest"][end:], m["op"]
    if "ConcatBitcast" in said:  # slices that were copied one by one, under one name
        op = "bitcast"
    if op.startswith("async-") and m["name"].startswith("slice-"):
        op = "slice-" + op.removeprefix("async-")
    scope, cycles = re.search(r'op_name="([^"]*)"', said), CYCLES.search(said)
    return Instruction(
        m["name"],
        op,
        arrays_of(m["type"]),
        tuple(re.findall(r"%([\w.\-]+)", inside)),
        scope[1].replace("\\", "") if scope else "",
        tuple(CALLED.findall(said)),
        int(cycles[1]) if cycles else None,
        int(inside) if op == "parameter" else -1,
    )


@dataclass
class Module:
    """Computations by name. trips(scope): how often the body of a loop runs, None if nobody knows."""

    computations: dict[str, list[Instruction]]
    entry: str
    trips: Callable[[str], float | None]
    untold: set[str] = field(default_factory=set)  # scopes of loops whose trips nobody knew: counted once

    @classmethod
    def parse(cls, text: str, trips: Callable[[str], float | None] = lambda scope: None) -> Module:
        computations, entry, name = {}, "", None
        for line in text.split("\n"):
            head = re.match(r"(ENTRY )?%([\w.\-]+) .*\{$", line)
            if head:
                name = head[2]
                computations[name] = []
                entry = name if head[1] else entry
            elif line.startswith("}"):
                name = None
            elif name and (made := instruction(line)):
                computations[name].append(made)
        if not entry:
            raise ValueError("no ENTRY computation: is this the text of an HLO module?")
        return cls(computations, entry, trips)

    def often(self, loop: Instruction) -> float:
        told = self.trips(loop.scope)
        if told is None:
            self.untold.add(loop.scope)
        return 1.0 if told is None else told

    def body(self, loop: Instruction) -> str:
        """Of a while: the one of its computations that gives more than a predicate."""
        return next(c for c in loop.called if [a.dtype for a in self.computations[c][-1].arrays] != ["pred"])

    def runs(self, computation: str | None = None, times: float = 1.0) -> Iterator[tuple[Instruction, float]]:
        """Every instruction that is executed, in order, with how often."""
        for i in self.computations[computation or self.entry]:
            if i.op == "while":
                yield from self.runs(self.body(i), times * self.often(i))
            elif i.op == "call":
                yield from self.runs(i.called[0], times)
            else:
                yield i, times

    def counts(self) -> dict:
        """Launches of a step and what they are; bytes that copies within HBM write a step; the size of the program."""
        done = [(i, times) for i, times in self.runs() if i.launch]
        return {
            "launches": sum(t for _, t in done),
            "collectives": sum(t for i, t in done if i.collective),
            "kernels": sum(t for i, t in done if i.op == "custom-call"),
            "launches_in_program": len(done),
            "instructions": sum(map(len, self.computations.values())),
            "copied_bytes": sum(
                t * a.bytes for i, t in done if i.op == "copy" or i.name.startswith("copy") for a in i.arrays if a.space == HBM
            ),
        }

    # -- weights on their way ------------------------------------------------------------------------------------------

    def prefetch(self, layers: int) -> dict:
        """Weights that the entry copies into VMEM ahead of their use: bytes a step, bytes of these that are started in an
        earlier layer than the one that reads them, and bytes that are under way, or there and not read, when a layer ends (mean
        and most over the layers). What a loop's body starts it also reads: nothing crosses its back edge."""
        layer, names, copies, waiting, ends = -1, {}, {}, set(), []
        for i in self.computations[self.entry]:
            if i.op == "parameter" and i.scope.startswith("weights"):
                names[i.name] = i.scope
                continue
            if i.op == "bitcast" and i.operands[0] in names:
                names[i.name] = names[i.operands[0]]
                continue
            if i.op in COPY_START and i.operands[0] in names and any(a.space == VMEM for a in i.arrays):
                copies[i.name] = {(i.name, i.moved, layer, layer_of(names[i.operands[0]], layers))}
                waiting |= copies[i.name]
                continue
            found = set().union(*(copies.get(o, ()) for o in i.operands))
            if found and (i.op in COPY_DONE or i.op in NAMES and i.op != "tuple"):
                copies[i.name] = found
                continue
            waiting -= found
            here = re.search(r"/layer_(\d+)/|/(ends)/", i.scope)
            now = layer if here is None else layers if here[2] else int(here[1])
            if now > layer:
                ends += [sum(size for _, size, _, _ in waiting)] * (now - max(layer, 0))
                layer = now
        made = {copy for some in copies.values() for copy in some}
        return {
            "into_vmem_bytes": sum(size for _, size, _, _ in made),
            "across_layers_bytes": sum(size for _, size, at, read in made if 0 <= at < read),
            "in_flight_mean_bytes": sum(ends) / len(ends) if ends else 0.0,
            "in_flight_most_bytes": max(ends, default=0),
        }


def layer_of(argument: str, layers: int) -> int:
    """The layer whose weight an argument is; those of the ends come after the last."""
    m = re.search(r"\['layers'\]\[(\d+)\]", argument)
    return int(m[1]) if m else layers
