"""What kinds of damage are made of: where nodes of a plan are, how one is replaced, which copies are ever made.

A site is (region, path): the path as indices into the bodies of sequences and loops.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Loop, Node, Seq, Start, Step, Wait

Site = tuple[str, tuple[int, ...]]
KINDS: dict[str, Callable[[Plan, random.Random], Plan | None]] = {}


def kind(made: Callable) -> Callable:
    KINDS[made.__name__.replace("_", " ")] = made
    return made


def body_of(n) -> tuple[Node, ...]:
    return n.nodes if isinstance(n, Seq) else n.body if isinstance(n, Loop) else ()


def sites(plan: Plan, hit: Callable[[Node], bool]) -> list[Site]:
    """Where the regions that run have such a node."""
    out: list[Site] = []

    def go(region: str, nodes, path):
        for k, n in enumerate(nodes):
            if hit(n):
                out.append((region, (*path, k)))
            go(region, body_of(n), (*path, k))

    for _, region in {r.name: (0, r) for _, r in plan.sequence()}.values():
        go(region.name, region.body.nodes, ())
    return out


def node(plan: Plan, site: Site) -> Node:
    nodes = plan.regions[site[0]].body.nodes
    for k in site[1][:-1]:
        nodes = body_of(nodes[k])
    return nodes[site[1][-1]]


def siblings(plan: Plan, site: Site) -> tuple[Node, ...]:
    nodes = plan.regions[site[0]].body.nodes
    for k in site[1][:-1]:
        nodes = body_of(nodes[k])
    return nodes


def put(plan: Plan, site: Site, *new: Node, take: int = 1) -> Plan:
    """`new` in place of `take` nodes from the site on."""

    def go(nodes, path):
        k = path[0]
        if len(path) == 1:
            return (*nodes[:k], *new, *nodes[k + take :])
        inner = go(body_of(nodes[k]), path[1:])
        n = nodes[k]
        return (*nodes[:k], Seq(inner) if isinstance(n, Seq) else replace(n, body=inner), *nodes[k + 1 :])

    region = plan.regions[site[0]]
    return with_region(plan, site[0], body=Seq(go(region.body.nodes, site[1])))


def with_region(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, regions={**plan.regions, name: replace(plan.regions[name], **changes)})


def with_transfer(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, transfers={**plan.transfers, name: replace(plan.transfers[name], **changes)})


def with_buffer(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, buffers={**plan.buffers, name: replace(plan.buffers[name], **changes)})


def pick(r: random.Random, places: list):
    return r.choice(places) if places else None


def changed(
    plan: Plan,
    r: random.Random,
    hit: Callable[[Node], bool],
    change: Callable[[Node], tuple[Node, ...]],
    reached: int = 1,
) -> Plan | None:
    places = sites(plan, hit)
    site = pick(r, [s for s in places if not is_copy(node(plan, s)) or alive(plan, s[0], node(plan, s), reached)])
    return None if site is None else put(plan, site, *change(node(plan, site)))


def is_copy(n: Node) -> bool:
    return isinstance(n, (Start, Wait))


def most(plan: Plan, region: str, text: str) -> int:
    """The most items that the list can have whose slots `text` names; a refill is alive if they are more than the slots."""
    rows, build = max(plan.spec.build.rows), plan.spec.build
    if "EXPERT" in text:
        image = next(i for i in plan.experts if i.kind == region)
        return image.pieces * min(image.local_experts, rows * plan.spec.model.ffns[region].top_k)
    kind = plan.spec.model.mixers[region]
    tiles, span = build.context // build.kv_tile, getattr(kind, "window", 0)
    chunk = getattr(kind, "chunk", 0)
    return rows * min(tiles, max(1, chunk // build.kv_tile) if chunk else -(-span // build.kv_tile) if span else tiles)


def alive(plan: Plan, region: str, n: Start | Wait, reached: int = 1) -> bool:
    """Is the copy made in some step? reached: by how many items the list must exceed the slots."""
    text = " ".join((*n.args, n.when or ""))
    build = plan.spec.build
    slots = {"EXPERTS_AHEAD": build.experts_ahead, "FIRST_EXPERTS": build.experts_at_once, "KV_SLOTS": build.kv_slots}
    return all(most(plan, region, name) >= size + reached for name, size in slots.items() if name in text)


def pairs(plan: Plan, fits: Callable[[Node, Node], bool]) -> list[Site]:
    """Sites of nodes that stand right in front of another, the two being as wanted."""
    out = []
    for site in sites(plan, lambda n: True):
        nodes, k = siblings(plan, site), site[1][-1]
        two = nodes[k : k + 2]
        if len(two) == 2 and fits(*two) and all(alive(plan, site[0], n) for n in two if is_copy(n)):
            out.append(site)
    return out


def swapped(plan: Plan, r: random.Random, fits: Callable[[Node, Node], bool]) -> Plan | None:
    site = pick(r, pairs(plan, fits))
    if site is None:
        return None
    nodes, k = siblings(plan, site), site[1][-1]
    return put(plan, site, nodes[k + 1], nodes[k], take=2)


def steps(nodes):
    for n in nodes:
        if isinstance(n, Step):
            yield n
        yield from steps(body_of(n))
