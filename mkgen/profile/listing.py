"""A kernel's final VLIW listing, as libtpu leaves it with `--xla_jf_dump_llo_text`: bundles, and the loops they stand in.

A bundle is what a core issues in one cycle. A branch takes effect up to `DELAY` bundles later, or where the next control target is;
a branch backwards closes a loop, whose number of trips is in its exit test if it is known. Nothing here says how long a bundle is held back: see `scoreboard`.
"""
from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

DELAY = 6                                # bundles that are issued behind a branch, at most
HEAD = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*((?:[A-Z]{2}\s*)*):\s*>*\s*\{(.*)$")
STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
REGISTER = re.compile(r"%\w*?_((?:vm|v)\d+)\b")
NUMBER = re.compile(r"%(\d+)\b(?!_)")
OPCODE = re.compile(r"(?:= )?\b([a-z_]+[a-z0-9_.]*(?:\[\d+\][a-z0-9_.]*)?)")
TARGET = re.compile(r"target = \$region(\d+)")
TEST = re.compile(r"scmp\.\S+ (%\w+), (-?\d+|%\w+) .*loop exit test")
PHI = re.compile(r"= sphi (%\w+), (%\w+)")
NUMBERS = re.compile(r"(%\w+) = smov\.u32(?: \(!?%\w+\),)? (\d+)\b")


@dataclass(frozen=True)
class Op:
    """One instruction: its name with unit and result register (`vpop.f32.mrb[3].mxu0`), vector and mask registers in and out.
    queued: the number under which a queue keeps the result, of the instruction that puts it there and of the one that takes it."""
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    queued: str | None = None


@dataclass
class Bundle:
    ops: tuple[Op, ...]
    branch: int | None = None            # the bundle that a branch here goes to
    always: bool = False                 # no predicate: the branch is taken
    target: bool = False                 # control can come from elsewhere


@dataclass
class Loop:
    """Bundles first..last, both included. trips: None if they depend on data."""
    first: int
    last: int
    trips: int | None
    inside: list["Loop"] = field(default_factory=list)


@dataclass
class Listing:
    bundles: list[Bundle]
    loops: list[Loop]                    # outermost, in order


class UnreadableListing(Exception):
    """The file is not what this libtpu was known to write."""


def read_listing(path: Path) -> Listing:
    """Parses one `*-final_bundles.txt`."""
    return parse(path.read_text(errors="replace"))


def parse(text: str) -> Listing:
    parts = text.split("control target key end", 1)
    if len(parts) != 2:
        raise UnreadableListing("no 'control target key end'")
    bodies: list[list[str]] = []
    marked: list[bool] = []
    for line in parts[1].split("\n"):
        if head := HEAD.match(line):
            bodies.append([head.group(2)])
            marked.append(bool(head.group(1)))
        elif bodies:
            bodies[-1].append(line)
    texts = [" ".join(b) for b in bodies]
    starts: dict[str, int] = {}
    for n, body in enumerate(texts):
        for region in STARTS.findall(body):
            starts.setdefault(region, n)
    bundles, tests = [], {}
    for n, body in enumerate(texts):
        bundles.append(bundle(body, starts, marked[n]))
        if found := TEST.search(body):
            tests[n] = found.group(1), found.group(2)
    known = dict(NUMBERS.findall(parts[1]))
    first = {again: int(known[start]) for start, again in PHI.findall(parts[1]) if start in known}
    trips = {n: None if bound.startswith("%") else int(bound) - first.get(counter, 0) for n, (counter, bound) in tests.items()}
    loops = nest(bundles, trips)
    if not loops and re.search(r"^\s*0x[0-9a-f]+\s+(?:[A-Z]{2}\s+)*L[BH]", parts[1], re.M):
        raise UnreadableListing("a loop is marked, but no branch goes back")
    return Listing(bundles, loops)


def delayed(bundles: list[Bundle], at: int) -> int:
    """The last bundle that is issued before the branch in bundle `at` takes effect."""
    last = at
    while last - at < DELAY and last + 1 < len(bundles) and not bundles[last + 1].target:
        last += 1
    return last


def bundle(body: str, starts: dict[str, int], target: bool) -> Bundle:
    ops, branch, always = [], None, False
    for text in body.split(";;"):
        if "sbr.rel" in text:
            found = TARGET.search(text)
            if not found or found.group(1) not in starts:
                raise UnreadableListing(f"a branch without a known target: {text.strip()[:120]}")
            branch, always = starts[found.group(1)], "sbr.rel target" in text
        elif op := instruction(text):
            ops.append(op)
    return Bundle(tuple(ops), branch, always, target)


def instruction(text: str) -> Op | None:
    text = re.sub(r"/\*.*?\*/", "", text.split(" } ")[0]).strip().rstrip("}")
    left, equals, right = text.partition(" = ")
    if not equals:
        left, right = "", text
    name = OPCODE.match(right.strip())
    if not name or name.group(1) in ("sphi", "vphi"):
        return None
    pops = name.group(1).startswith(("vpop", "spop"))
    number = NUMBER.findall(right if pops else left)
    return Op(name.group(1), tuple(REGISTER.findall(right)), tuple(REGISTER.findall(left)), number[0] if number else None)


def nest(bundles: list[Bundle], trips: dict[int, int | None]) -> list[Loop]:
    """The loops, each in the one around it. trips: by the bundle of the exit test, the last in a loop that is in no inner one."""
    found = [Loop(b.branch, delayed(bundles, n), None) for n, b in enumerate(bundles)
             if b.branch is not None and b.branch <= n]
    outer: list[Loop] = []
    for loop in sorted(found, key=lambda x: (x.first, -x.last)):
        place = outer
        while inner := next((x for x in place if x.first <= loop.first and loop.last <= x.last), None):
            place = inner.inside
        place.append(loop)
    used: set[int] = set()
    for loop in sorted(found, key=lambda x: x.last - x.first):
        at = max((n for n in trips if loop.first <= n <= loop.last and n not in used), default=None)
        if at is not None:
            used.add(at)
            loop.trips = trips[at]
    return outer
