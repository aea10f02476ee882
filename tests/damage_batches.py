"""Damage to the control of routed experts: the copies that fill their slots, the places of a batch, how often loops turn.

Each kind here lists all places and ways (`ALL`); what one of them does is asked of `moves`, which runs the control of a layer with
a number of experts. A change that makes no difference for any number that can be harms nothing, and is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace

from damage_copies import retold
from damage_tools import KINDS, Site, alive, kind, most, node, pick, put, siblings, sites, with_buffer

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Loop, Node, Start, Step, Wait

LOOPS = ("first_experts", "more", "expert_batch", "routed_expert")
SIZES = ("EXPERT_BATCH", "EXPERTS_AHEAD", "FIRST_EXPERTS", "EXPERT_SLOTS")
RUN = (("experts", "expert"), ("experts", "batch"))
COUNT = "m.expert_count[0]"
Change = tuple[Site, tuple[Node, ...], int]  # new nodes in place of so many from the site on
ALL: dict[str, Callable[[Plan], Iterator[Plan]]] = {}


def every(made: Callable[[Plan], Iterator[Change]]) -> Callable:
    """A kind that lists its changes."""

    def harmful(plan: Plan, changes) -> Iterator[Plan]:
        for site, new, take in changes:
            damaged = put(plan, site, *new, take=take)
            if differs(plan, damaged, site[0]):
                yield damaged

    def one(plan: Plan, r) -> Plan | None:
        changes = list(made(plan))
        return next(harmful(plan, r.sample(changes, len(changes))), None)

    name = made.__name__.replace("_", " ")
    ALL[name] = lambda plan: harmful(plan, made(plan))
    KINDS[name] = one
    return made


# -- what a layer does -----------------------------------------------------------------------------------------------------


def expert_kinds(plan: Plan) -> list[str]:
    """Those that some layer has."""
    return sorted({image.kind for image in plan.experts} & {region.name for _, region in plan.sequence()})


def moves(plan: Plan, region: str, count: int) -> list[tuple]:
    """What the loops over experts start, wait for and compute, in order, where a layer has `count` experts."""
    build, out = plan.spec.build, []
    known = dict(zip(SIZES, (build.expert_batch, build.experts_ahead, build.experts_at_once, build.expert_slots))) | {
        "jnp": SimpleNamespace(minimum=min),
        "lax": SimpleNamespace(div=lambda a, b: a // b, rem=lambda a, b: a % b),
        "index": 0,
        "m": SimpleNamespace(expert_count=[count]),
        **{f"PIECES{image.suffix.upper()}": image.pieces for image in plan.experts},
    }

    def go(nodes, scope: dict) -> None:
        for n in nodes:
            if isinstance(n, Loop):
                for i in range(n.first, n.first + eval(n.trips, known, dict(scope))):
                    go(n.body, scope | {n.var: i})
            elif isinstance(n, Step):
                if (n.template, n.macro) in RUN:
                    out.append(("computes", scope.get("batch", scope.get("i"))))
            elif n.when is None or eval(n.when, known, dict(scope)):
                out.append((type(n).__name__, *(eval(a, known, dict(scope)) for a in n.args[1:])))

    go([n for n in plan.regions[region].body.nodes if isinstance(n, Loop) and n.name in LOOPS], {})
    return out


def differs(plan: Plan, damaged: Plan, region: str) -> bool:
    return any(moves(plan, region, n) != moves(damaged, region, n) for n in range(most(plan, region, "EXPERT") + 1))


def in_loops(plan: Plan, hit) -> list[Site]:
    """Sites within the loops over experts, and these."""
    kinds = expert_kinds(plan)
    tops = {s for s in sites(plan, lambda n: isinstance(n, Loop) and n.name in LOOPS) if s[0] in kinds}
    return [s for s in sites(plan, hit) if any(s[0] == top[0] and s[1][: len(top[1])] == top[1] for top in tops)]


def places(plan: Plan, *parts: type) -> list[Site]:
    """Starts or waits of the places of a batch."""
    return in_loops(plan, lambda n: isinstance(n, parts) and n.when is not None and "EXPERT_BATCH" in n.when)


def only(n: Node, ask: str) -> Node:
    return replace(n, when=f"({n.when}) & ({ask})")


# -- places of a batch -----------------------------------------------------------------------------------------------------


@every
def copy_of_one_place_dropped(plan):
    for site in places(plan, Start, Wait):
        for p in range(plan.spec.build.expert_batch):
            yield site, (only(node(plan, site), f"j != {p}"),), 1


@every
def copy_of_one_place_doubled(plan):
    for site in places(plan, Start, Wait):
        for p in range(plan.spec.build.expert_batch):
            yield site, (node(plan, site), only(node(plan, site), f"j == {p}")), 1


@every
def copy_of_one_place_moved(plan):
    """A wait behind the batch's step; a start in front of it, where it overwrites what is still read, or in front of the waits."""
    for site in places(plan, Start, Wait):
        outer = site[0], site[1][:-1]
        around, at = siblings(plan, outer), outer[1][-1]
        for p in range(plan.spec.build.expert_batch):
            rest, one = (replace(around[at], body=(only(node(plan, site), f"j {ask} {p}"),)) for ask in ("!=", "=="))
            for to in range(len(around) + 1):
                if to in (at, at + 1):
                    continue
                nodes = [*around[:at], rest, *around[at + 1 :]]
                nodes.insert(to, one)
                yield (site[0], (*outer[1][:-1], 0)), tuple(nodes), len(around)


@every
def batch_of_another_number(plan):
    """Its copies are waited for, or its slots are filled again, for the batch behind it, or for the first one again."""
    for site in places(plan, Start, Wait):
        n = node(plan, site)
        for new in ("(batch + 1) *", "0 *"):
            yield site, (replace(n, args=(*n.args[:-1], n.args[-1].replace("batch *", new)), when=n.when.replace("batch *", new)),), 1


def across_a_step(plan: Plan, r, part: type) -> Plan | None:
    """A whole batch's waits behind its step, or its starts in front of it, where there are enough items to make that wrong."""
    found = []
    for site in sites(plan, lambda n: isinstance(n, Loop) and n.unroll and isinstance(n.body[0], part)):
        around, at = siblings(plan, site), site[1][-1]
        beside = at + (1 if part is Wait else -1)
        if 0 <= beside < len(around) and isinstance(around[beside], Step) and alive(plan, site[0], around[at].body[0]):
            found.append((site, min(at, beside)))
    picked = pick(r, found)
    if picked is None:
        return None
    (region, path), first = picked
    two = siblings(plan, (region, path))[first : first + 2]
    return put(plan, (region, (*path[:-1], first)), two[1], two[0], take=2)


@kind
def batch_before_its_waits(plan, r):
    """Of experts or of tiles."""
    return across_a_step(plan, r, Wait)


@kind
def refills_before_their_batch(plan, r):
    return across_a_step(plan, r, Start)


# -- how much and how often --------------------------------------------------------------------------------------------------


@every
def experts_computed_twice_or_never(plan):
    for site in in_loops(plan, lambda n: isinstance(n, Step) and (n.template, n.macro) in RUN):
        n = node(plan, site)
        yield from ((site, (n, n), 1), (site, (), 1))


@every
def other_number_of_batches(plan):
    texts = (
        f"lax.div({COUNT}, EXPERT_BATCH)",
        f"lax.div({COUNT} + EXPERT_BATCH, EXPERT_BATCH)",
        f"lax.div({COUNT} + 1, EXPERT_BATCH)",
        COUNT,
    )
    for site in in_loops(plan, lambda n: isinstance(n, Loop) and n.name == "expert_batch"):
        for text in texts:
            yield site, (replace(node(plan, site), trips=text),), 1


@every
def expert_loop_off_by_one(plan):
    """A loop over experts or over the places of a batch turns once more, once less, or begins with its second trip."""
    for site in in_loops(plan, lambda n: isinstance(n, Loop)):
        n = node(plan, site)
        for change in ({"trips": f"{n.trips} + 1"}, {"trips": f"{n.trips} - 1"}, {"first": n.first + 1}):
            yield site, (replace(n, **change),), 1


@every
def sizes_of_experts_confused(plan):
    """One of a batch, the slots, those ahead and those that are first stands for another."""

    def others(text: str) -> Iterator[str]:
        for found in re.finditer("|".join(SIZES), text):
            for name in SIZES:
                if name != found[0]:
                    yield text[: found.start()] + name + text[found.end() :]

    for site in in_loops(plan, lambda n: isinstance(n, (Loop, Start, Wait))):
        n = node(plan, site)
        if isinstance(n, Loop):
            changes = [{"trips": text} for text in others(n.trips)]
        else:
            changes = [{"when": text} for text in others(n.when or "")]
            changes += [{"args": (*n.args[:-1], text)} for text in others(n.args[-1])]
        yield from ((site, (replace(n, **change),), 1) for change in changes)


@kind
def one_expert_slot_too_few(plan, r):
    """Where a layer may fill them all."""
    if not any(most(plan, name, "EXPERT") >= plan.spec.build.expert_slots for name in expert_kinds(plan)):
        return None
    name = r.choice(("expert_slot", "expert_sem"))
    first, *rest = plan.buffers[name].shape
    return with_buffer(plan, name, shape=(first - 1, *rest))


@kind
def one_semaphore_for_all_experts(plan, r):
    """Where experts of another batch are on their way while one is waited for."""
    build = plan.spec.build
    kinds = [name for name in expert_kinds(plan) if min(most(plan, name, "EXPERT"), build.experts_ahead) > build.expert_batch]
    copies = {f"expert_copy{image.suffix}" for image in plan.experts if image.kind in kinds}
    return retold(plan, r, "m.expert_sem.at[slot]", "m.expert_sem.at[0]", lambda t: t.name in copies)
