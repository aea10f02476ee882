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

SCRATCH, OUTPUT, SPILL = "scratch operand", "output window allocation for operator output ", "SPILL"
WINDOW = re.compile(re.escape(OUTPUT) + r"(\d+)\. The window shape is \w+(\[[\d,]*\])")


class NoReport(Exception):
    """libtpu left no report, or one that reads differently."""


@dataclass(frozen=True)
class Allocation:
    """One piece of a kernel's VMEM. shape: [8,128], without padding; None if the compiler names none."""
    tag: str
    shape: str | None
    bytes: int


@dataclass(frozen=True)
class BufferBytes:
    """A buffer's tile-padded bytes: as planned, and as the compiler allocated it. None: the other does not know it."""
    name: str
    planned: int | None
    actual: int | None


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
        window, shape = WINDOW.match(a["tag"]), re.search(r"\[[\d,]*\]", a.get("shape", ""))
        tag = f"{OUTPUT}{window[1]}" if window else a["tag"]
        found.append(Allocation(tag, window[2] if window else shape and shape[0], a["size"]))
    return found


def spilled(allocations: Sequence[Allocation]) -> int:
    return sum(a.bytes for a in allocations if a.tag == SPILL)


def compare(allocations: Sequence[Allocation], scratch: Mapping[str, tuple[tuple[int, ...], int]],
            outputs: Mapping[str, tuple[tuple[int, ...], int]]) -> list[BufferBytes]:
    """Buffer by buffer. scratch, outputs: name -> (dims, planned bytes), in the order in which the kernel declares them.

    The compiler names no scratch operand, but keeps their order and drops those that nothing reads: its shapes are matched
    to the plan's in order."""
    left = [a for a in allocations if a.tag == SCRATCH]
    rows = []
    for name, (dims, planned) in scratch.items():
        found = left.pop(0) if left and left[0].shape == text(dims) else None
        rows.append(BufferBytes(name, planned, found.bytes if found else None))
    rows += [BufferBytes(f"scratch {a.shape}", None, a.bytes) for a in left]
    windows = {a.tag: a for a in allocations if a.tag.startswith(OUTPUT)}
    for n, (name, (_, planned)) in enumerate(outputs.items()):
        found = windows.pop(f"{OUTPUT}{n}", None)
        rows.append(BufferBytes(name, planned, found.bytes if found else None))
    others = [a for a in allocations if a.tag not in (SCRATCH, SPILL) and not a.tag.startswith(OUTPUT)]
    return rows + [BufferBytes(a.tag, None, a.bytes) for a in (*windows.values(), *others)]


def text(dims: Sequence[int]) -> str:
    return f"[{','.join(map(str, dims))}]"
