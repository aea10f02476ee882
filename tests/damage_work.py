"""Damage to the tape, the steps and their order."""

from __future__ import annotations

import re
from dataclasses import replace

from damage_tools import (
    changed,
    kind,
    most,
    node,
    pick,
    put,
    sites,
    steps,
    swapped,
    with_region,
)

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Advance, Loop, Step
from mkgen.plan.tape import Matrix

SLICE = re.compile(r"m\.(\w+)\[:, (\d+):(\d+)\]")


@kind
def advance_dropped(plan, r):
    return changed(plan, r, lambda n: isinstance(n, Advance), lambda n: ())


@kind
def advance_doubled(plan, r):
    return changed(plan, r, lambda n: isinstance(n, Advance), lambda n: (n, n))


@kind
def one_trip_too_few(plan, r):
    """Of a loop of fixed length, or over the rows."""

    def fewer(n):
        return (replace(n, trips=str(int(n.trips) - 1) if n.trips.isdigit() else f"{n.trips} - 1"),)

    return changed(plan, r, lambda n: isinstance(n, Loop) and (n.trips.isdigit() or n.trips == "m.rows"), fewer)


@kind
def one_trip_too_many(plan, r):
    def more(n):
        return (replace(n, trips=str(int(n.trips) + 1) if n.trips.isdigit() else f"{n.trips} + 1"),)

    return changed(plan, r, lambda n: isinstance(n, Loop) and (n.trips.isdigit() or n.trips == "m.rows"), more)


@kind
def loop_begins_too_late(plan, r):
    return changed(
        plan, r, lambda n: isinstance(n, Loop) and n.name.endswith("_block"), lambda n: (replace(n, first=n.first + 1),)
    )


def chunked(plan: Plan) -> list[str]:
    return sorted({region.name for _, region in plan.sequence() if region.chunks})


@kind
def entry_shifted(plan, r):
    name = r.choice(chunked(plan))
    chunks = list(plan.regions[name].chunks)
    k = r.randrange(len(chunks))
    entries = list(chunks[k].entries)
    e = r.randrange(len(entries))
    entries[e] = replace(entries[e], row=entries[e].row + 8)
    chunks[k] = replace(chunks[k], entries=tuple(entries))
    return with_region(plan, name, chunks=tuple(chunks))


@kind
def entry_of_other_length(plan, r):
    name = r.choice(chunked(plan))
    chunks = list(plan.regions[name].chunks)
    k = r.randrange(len(chunks))
    *front, last = chunks[k].entries
    chunks[k] = replace(chunks[k], entries=(*front, replace(last, rows=last.rows + r.choice((-8, 8)))))
    return with_region(plan, name, chunks=tuple(chunks))


@kind
def chunks_swapped(plan, r):
    """Two neighbours; they never hold the same."""
    places = [(name, k) for name in chunked(plan) for k in range(len(plan.regions[name].chunks) - 1)]
    found = pick(r, places)
    if found is None:
        return None
    chunks = list(plan.regions[found[0]].chunks)
    k = found[1]
    chunks[k], chunks[k + 1] = chunks[k + 1], chunks[k]
    return with_region(plan, found[0], chunks=tuple(chunks))


@kind
def entries_swapped(plan, r):
    """Two of one size in one chunk: equal vectors or blocks under each other's name."""
    places = []
    for name in chunked(plan):
        for k, c in enumerate(plan.regions[name].chunks):
            places += [
                (name, k, a, b)
                for a, x in enumerate(c.entries)
                for b, y in enumerate(c.entries[:a])
                if x.rows == y.rows
            ]
    found = pick(r, places)
    if found is None:
        return None
    name, k, a, b = found
    chunks = list(plan.regions[name].chunks)
    entries = list(chunks[k].entries)
    x, y = entries[a], entries[b]
    entries[a], entries[b] = replace(y, row=x.row), replace(x, row=y.row)
    chunks[k] = replace(chunks[k], entries=tuple(entries))
    return with_region(plan, name, chunks=tuple(chunks))


@kind
def chunk_dropped(plan, r):
    name = r.choice(chunked(plan))
    chunks = list(plan.regions[name].chunks)
    del chunks[r.randrange(len(chunks))]
    return with_region(plan, name, chunks=tuple(chunks))


@kind
def place_in_the_chunk_shifted(plan, r):
    """A step reads its matrix eight rows further down."""
    return changed(
        plan,
        r,
        lambda n: isinstance(n, Step) and isinstance(n.args.get("at"), int) and "matrix" in n.args,
        lambda n: (replace(n, args=n.args | {"at": n.args["at"] + 8}),),
    )


@kind
def heads_of_another_block(plan, r):
    """Of a matrix that is read in several blocks of whole heads."""

    def wrong(n):
        size = n.args["end"] - n.args["begin"]
        at = 0 if n.args["begin"] else size
        return (replace(n, args=n.args | {"begin": at, "end": at + size}),)

    return changed(
        plan,
        r,
        lambda n: isinstance(n, Step) and n.args.get("begin") is not None and n.args["matrix"].blocks > 1,
        wrong,
    )


@kind
def step_dropped(plan, r):
    """But one that only names a cache (Python finds that), and one that lists experts where there never are more than the first."""

    def hit(n):
        if not isinstance(n, Step) or (n.template, n.macro) == ("attention", "cache"):
            return False
        rest = (n.template, n.macro) == ("experts", "take_rest")
        return not rest or most(plan, n.args["image"].kind, "EXPERT_SLOTS") > plan.spec.build.experts_at_once

    return changed(plan, r, hit, lambda n: ())


@kind
def use_before_it_is_made(plan, r):
    """A step in front of the one that makes what it reads; of an op of its own, and no other has made it before."""
    carried = {
        v.name.replace(".", "_")
        for sub in plan.graph.sublayers()
        for op in sub.ops
        for v in (*op.inputs(), *op.outputs())
        if v.carried
    }

    def fits(a, b):
        if not (isinstance(a, Step) and isinstance(b, Step)) or a.op == b.op:
            return False
        return any(x in b.reads and x not in b.writes and x not in carried and x not in made[id(a)] for x in a.writes)

    made: dict[int, set[str]] = {}
    for region in plan.regions.values():
        before: set[str] = set()
        for n in steps(region.body.nodes):
            made[id(n)] = set(before)
            before |= set(n.writes)
    return swapped(plan, r, fits)


@kind
def columns_of_another_value(plan, r):
    """Where a product's results lie side by side, a step reads one column further to the right."""
    for region in r.sample(sorted(plan.regions), len(plan.regions)):
        sub = next(s for s in plan.graph.sublayers() if s.name == region)
        made = {y.name for op in sub.ops for y in getattr(op, "ys", ())}
        ops = {op.name: op for op in sub.ops}
        buffers = {
            n.args["y"][2:]
            for n in steps(plan.regions[region].body.nodes)
            if isinstance(n.args.get("matrix"), Matrix)
            and n.template in ("linear", "coded")
            and len(n.args["matrix"].parts) > 1
        }
        places = []
        for site in sites(plan, lambda n: isinstance(n, Step) and n.op in ops):
            if site[0] != region:
                continue
            n = node(plan, site)
            for arg, text in n.args.items():
                found = SLICE.search(text) if isinstance(text, str) else None
                if found and found[1] in buffers and getattr(getattr(ops[n.op], arg, None), "name", None) in made:
                    places.append(
                        (site, arg, text.replace(found[0], f"m.{found[1]}[:, {int(found[2]) + 1}:{int(found[3]) + 1}]"))
                    )
        if places:
            site, arg, text = r.choice(places)
            return put(plan, site, replace(node(plan, site), args=node(plan, site).args | {arg: text}))
    return None
