"""A small model of two ranks that drift apart: no message may reach a place, or a semaphore, that its target still uses.

Both run the same exchanges. Of its peer in a group a rank knows for certain only what the messages of that group say: whoever
sent the message of use j has done all that stands before its start of use j, the reading of use j - 1 among it. Use k lies
in part k mod H of the place and of the semaphores, H parts each. So the message of use k is safe if every earlier use of
its part has been read before the start of the last use that the sender has finished. One exchange at a time needs H = 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mkgen.check.findings import Report
from mkgen.plan.plan import Plan


@dataclass
class Group:
    """Positions, in the sequence of exchanges, of the starts and the finishes of a group's uses."""

    starts: list[int] = field(default_factory=list)
    finishes: list[int] = field(default_factory=list)


def check_drift(plan: Plan, trace: list[tuple], report: Report) -> None:
    """trace: (kind, part, group, ...) a start or finish, as `Exchanges` has written them down."""
    groups: dict[str, Group] = {}
    for n, (_, part, name, *_) in enumerate(trace):
        group = groups.setdefault(name, Group())
        (group.starts if part == "start" else group.finishes).append(n)
    for name, group in groups.items():
        for what, parts in halves(plan, name):
            k = too_early(group, parts)
            if k is not None:
                report.add(
                    "exchange",
                    f"group {name}",
                    f"the message of use {k} takes part {k % parts} of {parts} of {what}",
                    "a peer that is a phase behind still uses it: it was used before, and nothing says that it has been read",
                )


def halves(plan: Plan, name: str) -> list[tuple[str, int]]:
    """(buffer, parts) of the place where peers write and of its semaphores; `exchange` says if they are not there."""
    found = [b for b in (plan.buffers.get(f"inbox_{name}"), plan.buffers.get("arrived")) if b is not None and b.shape]
    return [(b.name, int(b.shape[0])) for b in found]


def too_early(group: Group, parts: int) -> int | None:
    """The first use whose message may come while an earlier use of its part is still read; None: there is none."""
    for k, start in enumerate(group.starts):
        finished = sum(f < start for f in group.finishes)  # uses whose message the sender has
        known = group.starts[finished - 1] if finished else -1  # what its sender had done by then
        earlier = [j for j in range(k % parts, k, parts) if j >= len(group.finishes) or group.finishes[j] > known]
        if earlier:
            return k
    return None
