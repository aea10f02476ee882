"""Damage to starts, waits and what a transfer says."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from damage_tools import (
    changed,
    is_copy,
    kind,
    node,
    pick,
    put,
    siblings,
    sites,
    swapped,
    with_region,
    with_transfer,
)

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Loop, Seq, Start, Step, Wait


@kind
def start_dropped(plan, r):
    return changed(plan, r, lambda n: isinstance(n, Start), lambda n: ())


@kind
def wait_dropped(plan, r):
    return changed(plan, r, lambda n: isinstance(n, Wait), lambda n: ())


@kind
def start_doubled(plan, r):
    return changed(plan, r, lambda n: isinstance(n, Start), lambda n: (n, n))


@kind
def wait_doubled(plan, r):
    return changed(plan, r, lambda n: isinstance(n, Wait), lambda n: (n, n))


@kind
def use_before_its_wait(plan, r):
    """Not a turn's wait for a chunk behind that of its first step: it may come later."""
    return swapped(
        plan,
        r,
        lambda a, b: (
            isinstance(a, Wait)
            and isinstance(b, Step)
            and bool(set(plan.transfers[a.transfer].writes) & {*b.reads})
            and not (a.transfer == "tape_copy" and a.args[-1] != "g")
        ),
    )


@kind
def use_before_the_last_wait_of_its_turn(plan, r):
    """A turn waits for all its chunks, then computes: the last wait behind the step that reads the last chunk."""
    places = []
    for where, path in sites(plan, lambda n: isinstance(n, Wait) and n.transfer == "tape_copy" and n.args[-1] != "g"):
        steps = [k for k, n in enumerate(siblings(plan, (where, path))) if isinstance(n, Step) and "ring" in n.reads]
        waits = [k for k, n in enumerate(siblings(plan, (where, path))) if isinstance(n, Wait)]
        if steps and path[-1] == waits[-1] < steps[-1]:
            places.append(((where, path), steps[-1] - path[-1]))
    if not places:
        return None
    site, ahead = r.choice(places)
    first = site[1][-1]
    run = siblings(plan, site)[first : first + ahead + 1]
    return put(plan, site, *run[1:], run[0], take=len(run))


@kind
def refill_before_the_last_read(plan, r):
    return swapped(
        plan,
        r,
        lambda a, b: (
            isinstance(b, Start) and isinstance(a, Step) and bool(set(plan.transfers[b.transfer].writes) & {*a.reads})
        ),
    )


@kind
def write_back_before_its_step(plan, r):
    return swapped(
        plan,
        r,
        lambda a, b: (
            isinstance(b, Start) and isinstance(a, Step) and bool(set(plan.transfers[b.transfer].reads) & {*a.writes})
        ),
    )


@kind
def start_of_another_index(plan, r):
    return changed(
        plan, r, lambda n: isinstance(n, Start), lambda n: (replace(n, args=(*n.args[:-1], f"{n.args[-1]} + 1")),)
    )


@kind
def wait_for_another_index(plan, r):
    return changed(
        plan, r, lambda n: isinstance(n, Wait), lambda n: (replace(n, args=(*n.args[:-1], f"{n.args[-1]} + 1")),)
    )


def batched(plan: Plan, n: Start | Wait) -> bool:
    """Not a wait for a tile that is computed alone: there every item of a batch is a tile."""
    return plan.spec.build.tiles_at_once > 1 or "KV_BATCH + j < " not in n.when


@kind
def predicate_dropped(plan, r):
    return changed(
        plan, r, lambda n: is_copy(n) and n.when is not None and batched(plan, n), lambda n: (replace(n, when=None),), 0
    )


@kind
def predicate_off_by_one(plan, r):
    def wrong(n):
        text = n.when
        return (replace(n, when=text.replace(">= 0", "> 0") if ">= 0" in text else text.replace("<", "<=")),)

    return changed(
        plan,
        r,
        lambda n: is_copy(n) and n.when is not None and (">= 0" in n.when or "<" in n.when) and batched(plan, n),
        wrong,
        0,
    )


@kind
def copy_and_its_wait_dropped(plan, r):
    """Nothing is left of a transfer in a region: what it brings or takes is missing."""
    site = pick(r, sites(plan, lambda n: isinstance(n, Wait) and n.transfer != "tape_copy"))
    if site is None:
        return None
    name = node(plan, site).transfer

    def without(nodes):
        kept = (n for n in nodes if not (is_copy(n) and n.transfer == name))
        return tuple(replace(n, body=without(n.body)) if isinstance(n, Loop) else n for n in kept)

    return with_region(plan, site[0], body=Seq(without(plan.regions[site[0]].body.nodes)))


def retold(plan: Plan, r: random.Random, old: str, new: str, only: Callable = lambda t: True) -> Plan | None:
    """Some transfer's text with `new` for `old`: in its start and its wait alike."""
    used = {node(plan, s).transfer for s in sites(plan, is_copy)}
    fields = [
        (t.name, field)
        for t in plan.transfers.values()
        if t.name in used and only(t)
        for field in ("setup", "source", "target", "semaphore")
        if old in " ".join((getattr(t, field),) if field != "setup" else t.setup)
    ]
    found = pick(r, fields)
    if found is None:
        return None
    t, field = plan.transfers[found[0]], found[1]
    text = getattr(t, field)
    return with_transfer(
        plan,
        t.name,
        **{field: text.replace(old, new, 1) if field != "setup" else tuple(x.replace(old, new, 1) for x in text)},
    )


@kind
def wrong_slot(plan, r):
    """Of copies that have more than one."""
    name, var = r.choice(
        (("EXPERT_SLOTS", "i"), ("KV_SLOTS", "i"), *([("RING_DEPTH", "g")] if plan.ring_depth > 1 else []))
    )
    return retold(plan, r, f"lax.rem({var}, {name})", f"lax.rem({var} + 1, {name})")


@kind
def one_slot_too_few(plan, r):
    return None if plan.ring_depth == 1 else retold(plan, r, "lax.rem(g, RING_DEPTH)", "lax.rem(g, RING_DEPTH - 1)")


@kind
def offset_shifted(plan, r):
    return retold(plan, r, "m.chunks[2 * g]", "m.chunks[2 * g] + 8")


@kind
def copy_shortened(plan, r):
    return retold(plan, r, "m.chunks[2 * g + 1]", "m.chunks[2 * g + 1] - 8")


@kind
def state_of_another_layer(plan, r):
    return retold(plan, r, ".at[index", ".at[index + 1", lambda t: not t.name.startswith("expert_copy"))


@kind
def expert_of_another_number(plan, r):
    return retold(plan, r, "m.expert_ids[", "1 + m.expert_ids[")


@kind
def row_of_another_sequence(plan, r):
    """Where some variant has several rows."""
    if max(plan.spec.build.rows) == 1:
        return None
    return retold(plan, r, ".at[index, row", ".at[index, (row + 1) % m.rows", lambda t: "row" in t.params)


@kind
def one_semaphore_for_all_slots(plan, r):
    return None if plan.ring_depth == 1 else retold(plan, r, "m.ring_sem.at[slot]", "m.ring_sem.at[0]")


@kind
def bytes_understated(plan, r):
    name = r.choice(sorted({node(plan, s).transfer for s in sites(plan, is_copy)}))
    return with_transfer(plan, name, bytes=plan.transfers[name].bytes // 16)
