"""Cycles of a kernel's one rolled loop, out of the bundles that libtpu leaves with `--xla_jf_dump_llo_text`.

A bundle a cycle, in order, but for what the listing does not show: the hardware holds a bundle back while an MXU takes weights
(4 cycles a push), rows of the left operand (8 cycles for 16 rows), or has no result yet (about 200 cycles). With these three
numbers the replay agrees with libtpu's own profiler, where that works, to a per cent; it says nothing about memory.
"""
from __future__ import annotations

import re
from pathlib import Path

PUSH, LEFT, RESULT = 4, 8, 200
BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s*(?:[A-Z]{2}\s*)*:\s*(>*)\s*\{(.*)$")
Op = tuple[str, str, int | None]         # push | left | result, MXU, the result's register


def bundles_of(dump: Path, kernel: str) -> Path:
    """The final listing of a kernel."""
    found = [p for p in dump.glob(f"*-{kernel}.1-*final_bundles.txt") if "schedule" not in p.name]
    if not found:
        raise FileNotFoundError(f"{dump}: no bundles of {kernel}: has libtpu another way to name its dumps?")
    return max(found)


def loop_body(listing: Path) -> list[list[Op]]:
    """The MXU's operations of each bundle inside the loop."""
    bundles: list[list[str]] = []
    for line in listing.read_text(errors="replace").split("control target key end", 1)[1].split("\n"):
        head = BUNDLE.match(line)
        if head:
            bundles.append([head.group(1), head.group(2)])
        elif bundles:
            bundles[-1][1] += " " + line
    return [[op for text in body.split(";;") if (op := mxu_op(text))] for depth, body in bundles if depth]


def mxu_op(text: str) -> Op | None:
    name = re.search(r"\b(vmatpush|vmatmul|vpop)\S*", text)
    unit = name and re.search(r"\.mxu(\d)", name.group())
    if not unit:
        return None
    register = re.search(r"mrb\[(\d+)\]", name.group())
    return {"vmatpush": "push", "vmatmul": "left", "vpop": "result"}[name.group(1)], unit.group(1), register and int(register.group(1))


def cycles(listing: Path) -> float:
    """Of one trip, when several follow one another."""
    body = loop_body(listing)
    return (replay(body, 6) - replay(body, 3)) / 3


def replay(body: list[list[Op]], trips: int) -> int:
    now, free = 0, {}
    for ops in body * trips:
        now = max([now + 1, *(free.get((kind, unit, register and register // 4) if kind == "result" else (kind, unit), 0)
                              for kind, unit, register in ops)])
        for kind, unit, register in ops:
            if kind == "push":
                free[kind, unit] = now + PUSH
            elif kind == "left":
                free[kind, unit] = now + LEFT
                free["result", unit, register and register // 4] = now + RESULT
    return now
