"""Reads what libtpu says about VMEM: the allocations of a kernel, by the names that the plan gave them.

With `--xla_jf_dump_to=DIR` libtpu leaves one `*vmem_report.html`, a page with its data as JSON in a script. The flag is
undocumented: whoever asks for a report must cope with `NoReport`.
"""
from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mkgen.plan.regions import Buffer
from mkgen.plan.vmem import vmem_bytes

SCRATCH, OUTPUT, SPILL = "scratch operand", "output window allocation for operator output ", "SPILL"
WINDOW = re.compile(re.escape(OUTPUT) + r"(\d+)\. The window shape is (\w+\[[\d,]*\])")
TYPES = {"f32": "f32", "bf16": "bf16", "u32": "s32", "i32": "s32"}       # the report knows no unsigned words


class NoReport(Exception):
    """libtpu left no report, or one that reads differently."""


@dataclass(frozen=True)
class Allocation:
    """One piece of a kernel's VMEM. shape: bf16[8,128], without padding; None if the compiler names none."""
    tag: str
    shape: str | None
    bytes: int


@dataclass(frozen=True)
class BufferBytes:
    """A buffer's tile-padded bytes: as planned, and as the compiler allocated it.

    planned None: the plan does not know it; actual None: it lives in registers (or is spilled), or nothing reads it."""
    name: str
    planned: int | None
    actual: int | None


@dataclass(frozen=True)
class Planned:
    """A buffer as the plan has it: shape as the report writes it, bytes with padding."""
    name: str
    shape: str
    bytes: int


def planned(b: Buffer, rows: int) -> Planned:
    return Planned(b.name, f"{TYPES[b.dtype]}[{','.join(map(str, b.dims(rows)))}]", vmem_bytes(b, rows))


def read_report(directory: Path) -> list[Allocation]:
    """The allocations of the one kernel that has scratch operands. Raises `NoReport`."""
    pages = sorted(directory.glob("*vmem_report.html"))
    for text in (page.read_text(encoding="utf-8") for page in pages):
        at = text.find("const DATA")
        try:
            data, _ = json.JSONDecoder().raw_decode(text, text.index("{", at))
            kernels = [parsed(each) for name, each in data["hlo_breakdowns"].items() if not name.startswith("<")]
        except (ValueError, KeyError, TypeError) as error:
            raise NoReport(f"libtpu's VMEM report reads differently than expected ({error!r})") from error
        kernels = [k for k in kernels if any(a.tag == SCRATCH for a in k)]
        if kernels:
            return max(kernels, key=len)
    raise NoReport(f"libtpu left no VMEM report of the kernel ({len(pages)} pages): is --xla_jf_dump_to gone?")


def parsed(breakdown: Mapping) -> list[Allocation]:
    found = []
    for a in (a for block in breakdown["blocks"] for a in block["allocations"]):
        window = WINDOW.match(a["tag"])
        tag, shape = (f"{OUTPUT}{window[1]}", window[2]) if window else (a["tag"], a.get("shape"))
        found.append(Allocation(tag, shape, a["size"]))
    return found


def spilled(allocations: Sequence[Allocation]) -> int:
    return sum(a.bytes for a in allocations if a.tag == SPILL)


def lifted(buffers: Sequence[BufferBytes]) -> int:
    """Planned bytes of the buffers that the compiler needs no memory for."""
    return sum(b.planned for b in buffers if b.actual is None)


def compare(allocations: Sequence[Allocation], scratch: Sequence[Planned],
            outputs: Sequence[Planned]) -> list[BufferBytes]:
    """Buffer by buffer. scratch, outputs: in the order in which the kernel declares them.

    The compiler names no scratch operand, but keeps their order; those that it lifts into registers are missing. So
    types and shapes are matched in order: of two alike side by side, the first counts as the one that is there."""
    left = [a for a in allocations if a.tag == SCRATCH]
    rows = []
    for b in scratch:
        found = left.pop(0).bytes if left and left[0].shape == b.shape else None
        rows.append(BufferBytes(b.name, b.bytes, found))
    rows += [BufferBytes(f"unknown scratch {a.shape}", None, a.bytes) for a in left]
    windows = {a.tag: a for a in allocations if a.tag.startswith(OUTPUT)}
    for n, b in enumerate(outputs):
        found = windows.pop(f"{OUTPUT}{n}", None)
        rows.append(BufferBytes(b.name, b.bytes, found.bytes if found and found.shape == b.shape else 0))
    others = [a for a in allocations if a.tag not in (SCRATCH, SPILL) and not a.tag.startswith(OUTPUT)]
    return rows + [BufferBytes(a.tag, None, a.bytes) for a in (*windows.values(), *others)]
