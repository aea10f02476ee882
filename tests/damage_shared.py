"""Damage to the memory and the exchanges."""

from __future__ import annotations

from dataclasses import replace

from damage_tools import (
    Site,
    changed,
    kind,
    node,
    pick,
    put,
    siblings,
    sites,
    steps,
    with_buffer,
)

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Collective, Loop, Step


@kind
def buffer_too_large(plan, r):
    name = r.choice([b.name for b in plan.buffers.values() if b.space == "vmem"])
    *lead, last = plan.buffers[name].shape
    return with_buffer(plan, name, shape=(*lead, last * 2**24))


@kind
def lifetime_shortened(plan, r):
    """One slot fewer in the ring than the copies use."""
    name = r.choice(("ring", "ring_sem"))
    first, *rest = plan.buffers[name].shape
    return with_buffer(plan, name, shape=(first - 1, *rest))


@kind
def table_too_short(plan, r):
    """Fewer tiles than rows."""
    found = pick(r, [b.name for b in plan.buffers.values() if b.space == "smem" and b.name.startswith("kv_items")])
    return None if found is None else with_buffer(plan, found, shape=(max(plan.spec.build.rows) - 1,))


@kind
def table_of_two_dimensions(plan, r):
    name = pick(r, [b.name for b in plan.buffers.values() if b.space == "smem"])
    return None if name is None else with_buffer(plan, name, shape=(1, *plan.buffers[name].shape))


@kind
def buffer_not_declared(plan, r):
    used = {
        name for region in plan.regions.values() for n in steps(region.body.nodes) for name in (*n.reads, *n.writes)
    }
    name = r.choice(sorted(used & plan.buffers.keys()))
    return replace(plan, buffers={k: b for k, b in plan.buffers.items() if k != name})


def is_part(part: str):
    return lambda n: isinstance(n, Collective) and n.part == part


@kind
def exchange_start_dropped(plan, r):
    return changed(plan, r, is_part("start"), lambda n: ())


@kind
def exchange_finish_dropped(plan, r):
    return changed(plan, r, is_part("finish"), lambda n: ())


def ends(n: Collective) -> tuple[bool, bool]:
    """(does an exchange begin here, does it end here?)"""
    return n.part == "start" and n.round == 0, n.part == "finish" and n.round == n.rounds - 1


def whole_exchanges(plan: Plan) -> list[tuple[Site, list[int]]]:
    """(its first start, where among its siblings all its starts and finishes stand)."""
    out = []
    for site in sites(plan, lambda n: isinstance(n, Collective) and ends(n)[0]):
        nodes, found = siblings(plan, site), []
        for k in range(site[1][-1], len(nodes)):
            if isinstance(nodes[k], Collective) and nodes[k].kind == node(plan, site).kind:
                found.append(k)
                if ends(nodes[k])[1]:
                    out.append((site, found))
                    break
    return out


def with_siblings(plan: Plan, site: Site, nodes: list) -> Plan:
    return put(plan, (site[0], (*site[1][:-1], 0)), *nodes, take=len(siblings(plan, site)))


@kind
def exchange_dropped(plan, r):
    """All rounds: the step behind takes one rank's term, or piece, for the whole."""
    found = pick(r, whole_exchanges(plan))
    if found is None:
        return None
    site, all_ = found
    return with_siblings(plan, site, [n for k, n in enumerate(siblings(plan, site)) if k not in all_])


@kind
def sum_taken_twice(plan, r):
    """A sum in place that is summed once more counts each rank's whole."""
    found = pick(r, [(s, all_) for s, all_ in whole_exchanges(plan) if node(plan, s).kind == "reduce"])
    if found is None:
        return None
    site, all_ = found
    nodes = list(siblings(plan, site))
    return with_siblings(plan, site, [*nodes[: all_[-1] + 1], *(nodes[k] for k in all_), *nodes[all_[-1] + 1 :]])


@kind
def rounds_out_of_order(plan, r):
    """Of an exchange with a round for each mesh factor."""
    names = [name for name, _, _ in plan.mesh.stages]
    if len(names) < 2:
        return None
    other = {names[0]: names[1], names[1]: names[0]}

    def hit(n):
        return isinstance(n, Collective) and n.stage in other and n.rounds > 1

    return changed(plan, r, hit, lambda n: (replace(n, stage=other[n.stage]),))


@kind
def exchange_in_a_loop_over_data(plan, r):
    site = pick(r, sites(plan, is_part("start")))
    return None if site is None else put(plan, site, Loop("some", "i", "m.tokens[0] % 2", (node(plan, site),), bound=1))


@kind
def peers_place_aliased(plan, r):
    """What peers write is no longer marked so: it may be given to others."""
    name = pick(r, [b.name for b in plan.buffers.values() if b.remote])
    return None if name is None else with_buffer(plan, name, remote=False)


@kind
def missing_half(plan, r):
    """One half of a place where peers write: they can run a phase ahead into it."""
    name = pick(r, [b.name for b in plan.buffers.values() if b.remote])
    return None if name is None else with_buffer(plan, name, shape=(1, *plan.buffers[name].shape[1:]))


@kind
def semaphores_without_parity(plan, r):
    name = "arrived"
    return None if name not in plan.buffers else with_buffer(plan, name, shape=(1, *plan.buffers[name].shape[1:]))


@kind
def step_touches_what_peers_write(plan, r):
    name = pick(r, [b.name for b in plan.buffers.values() if b.remote])
    if name is None:
        return None
    return changed(
        plan,
        r,
        lambda n: isinstance(n, Step) and n.template != "exchange",
        lambda n: (replace(n, writes=(*n.writes, name)),),
    )
