"""Who lives in VMEM when: from the first write of a value to its last read, along the whole schedule.

A buffer that is first read in some sub-layer is carried (the residual stream, tables): only a pure write begins a new
value of it. Any other begins one with its first write of a sub-layer. The ring's slots, which are filled ahead of their use, and
what peers may write at any time are held throughout. The planner gives each buffer bytes of its own, so what is not live is room that it does not use.
"""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan
from mkgen.plan.vmem import item_bytes
from mkgen.show.report.places import Place, all_places

RING = "ring"


@dataclass(frozen=True)
class Life:
    """One VMEM buffer: its tile-padded bytes, the bytes without padding, and at which places it holds a value."""
    name: str
    type: str
    purpose: str
    bytes: int
    dense: int
    live: tuple[bool, ...]
    remote: bool

    @property
    def runs(self) -> list[tuple[int, int]]:
        """[first, last) of the stretches in which it lives."""
        out: list[list[int]] = []
        for i, on in enumerate(self.live):
            if on and out and out[-1][1] == i:
                out[-1][1] = i + 1
            elif on:
                out.append([i, i + 1])
        return [(a, b) for a, b in out]


@dataclass(frozen=True)
class Vmem:
    """The map of one row variant. `places`: (sub-layer, op) in program order; totals: live bytes at each."""
    places: tuple[tuple[str, str], ...]
    lives: tuple[Life, ...]              # largest first
    totals: tuple[int, ...]
    planned: int
    budget: int                          # usable, less the reserve for spills
    reserve: int
    usable: int

    @property
    def peak(self) -> int:
        return max(self.totals, default=0)

    @property
    def free(self) -> int:
        return self.budget - self.planned


def vmem(plan: Plan, rows: int) -> Vmem:
    """The VMEM map for `rows` rows, with the lives of its buffers."""
    by_region = all_places(plan)
    index = [(region, p.op) for region, ps in by_region.items() for p in ps]
    starts, at = {}, 0
    for region, ps in by_region.items():
        starts[region] = at
        at += len(ps)
    carried = carried_buffers(by_region)
    sizes = plan.vmem(rows)
    alive = lived(plan, by_region, starts, carried, at)
    lives = []
    for name, size in sizes.items():
        b = plan.buffers[name]
        dims = b.dims(rows)
        dense = item_bytes(b.dtype)
        for d in dims:
            dense *= d
        live = [True] * at if name == RING or b.remote else alive.get(name, [True] * at)    # never named in a region: the frame's
        lives.append(Life(name, f"{b.dtype} [{', '.join(map(str, dims))}]", b.purpose, size, dense, tuple(live), b.remote))
    lives.sort(key=lambda x: (-x.bytes, x.name))
    totals = tuple(sum(x.bytes for x in lives if x.live[i]) for i in range(at))
    usable, reserve = plan.target.vmem_usable_bytes, plan.spec.build.spill_kib * 1024
    return Vmem(tuple(index), tuple(lives), totals, sum(sizes.values()), usable - reserve, reserve, usable)


def carried_buffers(by_region: dict[str, list[Place]]) -> set[str]:
    """Those whose first access in some sub-layer reads only: another sub-layer made the value."""
    out: set[str] = set()
    for ps in by_region.values():
        first: set[str] = set()
        for t in (t for p in ps for t in p.touches):
            if not t.waits and t.buffer not in first:
                first.add(t.buffer)
                if not t.writes:
                    out.add(t.buffer)
    return out


def lived(plan: Plan, by_region: dict[str, list[Place]], starts: dict[str, int], carried: set[str], n: int) -> dict[str, list[bool]]:
    """buffer -> is it live at place i of its sub-layer, in any layer? Walks the schedule once, layer by layer."""
    trace: list[int] = []                # time -> place
    spans: dict[str, list[list[int]]] = {}
    for _, region in plan.sequence():
        written: set[str] = set()
        for i, place in enumerate(by_region[region.name]):
            now = len(trace)
            trace.append(starts[region.name] + i)
            for t in place.touches:
                values = spans.setdefault(t.buffer, [])
                new = t.writes and not t.waits and (not t.reads if t.buffer in carried else t.buffer not in written)
                if new or not values:
                    begins = 0 if not values and not t.writes else now       # made by the frame of the kernel
                    values.append([begins, now])
                values[-1][1] = now
                if t.writes and not t.waits:
                    written.add(t.buffer)
    out: dict[str, list[bool]] = {}
    for name, values in spans.items():
        live = out.setdefault(name, [False] * n)
        for begin, end in values:
            for place in set(trace[begin:end + 1]):
                live[place] = True
    return out
