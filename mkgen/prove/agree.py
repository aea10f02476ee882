"""The trace of the generated code against its plan: the same copies, in the same order, on the same semaphores."""

from __future__ import annotations

from math import prod

from mkgen.check.findings import Report
from mkgen.check.refs import Box
from mkgen.prove.expansion import Copy, Stage
from mkgen.prove.machine import Event, Spot

RULE = "code"


def check_agreement(said: list[Copy | Stage], done: list[Event], item: dict[str, int], report: Report) -> None:
    """said: of the plan; done: of the code. item: bytes of a buffer's element. Stops at the
    first difference: all behind it is shifted.

    A stage of an exchange is as many messages of as many bytes as the plan says; where they go is `ranks`' question.
    Waits for messages to have left are the code's own affair, as long as none is left at the end."""
    arrivals = {e.semaphore[0] for e in done if e.what == "send"}
    leaving = {e.sent[0] for e in done if e.what == "send"}
    moves = iter([e for e in done if e.what in ("start", "send") or e.what == "wait" and e.semaphore[0] not in leaving])
    for n, event in enumerate(said):
        if isinstance(event, Copy):
            found, wanted = next(moves, None), copy_text(event)
            if found is None or move_text(found) != wanted:
                return differ(report, event.where, n, wanted, found)
            continue
        for k in range(event.peers):
            found = next(moves, None)
            what = "send" if event.starts else "wait"
            if found is None or found.what != what or what == "wait" and found.semaphore[0] not in arrivals:
                return differ(
                    report,
                    event.where,
                    n,
                    f"message {k + 1} of {event.peers} of {event.bytes} bytes {'out' if event.starts else 'in'}",
                    found,
                )
            if spot_bytes(found.place, item) != event.bytes:
                return differ(report, event.where, n, f"{event.bytes} bytes in message {k + 1} of {event.peers}", found)
    extra = next(moves, None)
    if extra is not None:
        differ(report, "end", len(said), "nothing more", extra)


def copy_text(c: Copy) -> str:
    return text("start" if c.starts else "wait", *((v.buffer, v.box) for v in (c.source, c.target, c.semaphore)))


def move_text(e: Event) -> str:
    return text(e.what, e.source, e.place, e.semaphore)


def text(what: str, source: Spot, target: Spot, semaphore: Spot) -> str:
    return f"{what} {spot_text(source)} -> {spot_text(target)} on {spot_text(semaphore)}"


def spot_text(spot: Spot) -> str:
    return f"{spot[0]}[{box_text(spot[1])}]" if spot[1] else spot[0]


def box_text(box: Box) -> str:
    return ", ".join(str(lo) if hi == lo + 1 else f"{lo}:{hi}" for lo, hi in box)


def spot_bytes(spot: Spot, item: dict[str, int]) -> int:
    return item.get(spot[0], 4) * prod(hi - lo for lo, hi in spot[1])


def differ(report: Report, where: str, n: int, wanted: str, found: Event | None) -> None:
    told = "ends" if found is None else f"does: {move_text(found)}"
    report.add(
        RULE,
        where,
        f"move {n} of the plan is: {wanted}; the code {told}",
        "the code does what the plan says, move for move",
    )
