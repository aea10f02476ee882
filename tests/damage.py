"""Kinds of damage to a plan. Each takes (plan, random) and gives the plan with one place of it damaged, or None if it has no such place.

A kind damages only what cannot be harmless; where that depends on the place, the kind chooses among the harmful ones.
Nodes are found by `sites`: (region, path), the path as indices into the bodies of sequences and loops.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from mkgen.plan.plan import Plan
from mkgen.plan.regions import Advance, Collective, Loop, Node, Seq, Start, Step, Wait

Site = tuple[str, tuple[int, ...]]
KINDS: dict[str, Callable[[Plan, random.Random], Plan | None]] = {}


def kind(made: Callable) -> Callable:
    KINDS[made.__name__.replace("_", " ")] = made
    return made


# -- places -----------------------------------------------------------------------------------------------------------


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
    """The most items that a list of copies can have whose slots `text` names; a refill is alive if that is more than the slots."""
    rows, build = max(plan.spec.build.rows), plan.spec.build
    if "EXPERT_SLOTS" in text:
        image = next(i for i in plan.experts if i.kind == region)
        return image.pieces * min(image.local_experts, rows * plan.spec.model.ffns[region].top_k)
    kind = plan.spec.model.mixers[region]
    tiles, span = build.context // build.kv_tile, getattr(kind, "window", 0)
    chunk = getattr(kind, "chunk", 0)
    return rows * min(tiles, max(1, chunk // build.kv_tile) if chunk else -(-span // build.kv_tile) if span else tiles)


def alive(plan: Plan, region: str, n: Start | Wait, reached: int = 1) -> bool:
    """Is the copy made in some step? reached: by how many items the list must exceed the slots."""
    text = " ".join((*n.args, n.when or ""))
    slots = {"EXPERT_SLOTS": plan.spec.build.expert_slots, "KV_SLOTS": plan.spec.build.kv_slots}
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


# -- starts and waits -------------------------------------------------------------------------------------------------


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
    return swapped(
        plan,
        r,
        lambda a, b: (
            isinstance(a, Wait) and isinstance(b, Step) and bool(set(plan.transfers[a.transfer].writes) & {*b.reads})
        ),
    )


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
    return plan.spec.build.kv_slots > 3 or "i < " not in n.when


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


# -- what a transfer says -----------------------------------------------------------------------------------------------


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


# -- the tape -----------------------------------------------------------------------------------------------------------


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


# -- steps ----------------------------------------------------------------------------------------------------------------


@kind
def step_dropped(plan, r):
    return changed(
        plan, r, lambda n: isinstance(n, Step) and (n.template, n.macro) != ("attention", "item"), lambda n: ()
    )


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


def steps(nodes):
    for n in nodes:
        if isinstance(n, Step):
            yield n
        yield from steps(body_of(n))


# -- memory ---------------------------------------------------------------------------------------------------------------


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


# -- exchanges ------------------------------------------------------------------------------------------------------------


def is_part(part: str):
    return lambda n: isinstance(n, Collective) and n.part == part


@kind
def exchange_start_dropped(plan, r):
    return changed(plan, r, is_part("start"), lambda n: ())


@kind
def exchange_finish_dropped(plan, r):
    return changed(plan, r, is_part("finish"), lambda n: ())


def whole_exchanges(plan: Plan) -> list[tuple[Site, int]]:
    """(site, nodes) of exchanges whose rounds stand behind each other."""
    out = []
    for site in sites(plan, is_part("start")):
        nodes, k = siblings(plan, site), site[1][-1]
        if k and isinstance(nodes[k - 1], Collective):
            continue
        n = k
        while n < len(nodes) and isinstance(nodes[n], Collective) and nodes[n].kind == nodes[k].kind:
            n += 1
        count = 2 * len(plan.mesh.stages)
        out += [((site[0], (*site[1][:-1], at)), count) for at in range(k, n - count + 1, count)]
    return out


@kind
def exchange_dropped(plan, r):
    """All rounds: the step behind takes one rank's term, or piece, for the whole."""
    found = pick(r, whole_exchanges(plan))
    return None if found is None else put(plan, found[0], take=found[1])


@kind
def exchange_doubled(plan, r):
    """A sum that is summed once more counts each rank's whole."""
    found = pick(r, [(s, n) for s, n in whole_exchanges(plan) if node(plan, s).kind == "reduce"])
    if found is None:
        return None
    (region, path), n = found
    nodes = siblings(plan, (region, path))[path[-1] : path[-1] + n]
    return put(plan, (region, path), *nodes, *nodes, take=n)


@kind
def rounds_out_of_order(plan, r):
    names = [name for name, _, _ in plan.mesh.stages]
    if len(names) < 2:
        return None
    other = {names[0]: names[1], names[1]: names[0]}
    return changed(
        plan,
        r,
        lambda n: isinstance(n, Collective) and n.factor in other,
        lambda n: (replace(n, factor=other[n.factor]),),
    )


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
