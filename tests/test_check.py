"""The plan's checker: silent on the plans that are built, loud on plans that were damaged."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from mkgen.check import Finding, check_plan
from mkgen.check.drift import Group, too_early
from mkgen.check.shorten import short_layers
from mkgen.graph.build import build_graph
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Advance, Branch, Collective, Loop, Seq, Start, Step, Wait, walk
from mkgen.prove.mini import mini_spec
from mkgen.targets import load_target


def small(plan: Plan) -> Plan:
    """The plan of the mini model of the same spec."""
    spec = mini_spec(plan.spec)
    return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


@pytest.fixture(scope="session")
def mini_kimi(kimi_plan) -> Plan:
    return small(kimi_plan)


@pytest.fixture(scope="session")
def mini_qwen(qwen_plan) -> Plan:
    return small(qwen_plan)


# -- tools of damage --------------------------------------------------------------------------------------------------


def edited(nodes, hit, change):
    """The nodes with `change(node)` (a tuple) in place of the first one that `hit` accepts; None: there is none."""
    for k, n in enumerate(nodes):
        if hit(n):
            return (*nodes[:k], *change(n), *nodes[k + 1 :])
        if isinstance(n, Loop):
            body = edited(n.body, hit, change)
            if body is not None:
                return (*nodes[:k], replace(n, body=body), *nodes[k + 1 :])
    return None


def damaged(plan: Plan, region: str, hit, change) -> Plan:
    body = edited(plan.regions[region].body.nodes, hit, change)
    assert body is not None, f"nothing to damage in {region}"
    return with_region(plan, region, body=Seq(body))


def with_region(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, regions={**plan.regions, name: replace(plan.regions[name], **changes)})


def with_transfer(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, transfers={**plan.transfers, name: replace(plan.transfers[name], **changes)})


def with_buffer(plan: Plan, name: str, **changes) -> Plan:
    return replace(plan, buffers={**plan.buffers, name: replace(plan.buffers[name], **changes)})


def with_chunk(plan: Plan, region: str, k: int, change) -> Plan:
    """`change`: the chunk's entries to other entries."""
    chunks = plan.regions[region].chunks
    new = replace(chunks[k], entries=tuple(change(list(chunks[k].entries))))
    return with_region(plan, region, chunks=(*chunks[:k], new, *chunks[k + 1 :]))


def first(plan: Plan, region: str, suffix: str) -> str:
    """The name of the region's transfer that ends so."""
    names = [
        n.transfer
        for n in walk(plan.regions[region].body)
        if isinstance(n, (Start, Wait)) and n.transfer.endswith(suffix)
    ]
    assert names, f"{region} has no transfer *{suffix}"
    return names[0]


def is_start(suffix: str):
    return lambda n: isinstance(n, Start) and n.transfer.endswith(suffix)


def is_wait(suffix: str):
    return lambda n: isinstance(n, Wait) and n.transfer.endswith(suffix)


def is_step(macro: str):
    return lambda n: isinstance(n, Step) and n.macro == macro


def is_loop(name: str):
    return lambda n: isinstance(n, Loop) and n.name == name


def is_part(kind: str, part: str):
    return lambda n: isinstance(n, Collective) and (n.kind, n.part) == (kind, part)


def nothing(_):
    return ()


def twice(n):
    return (n, n)


def moved_up(plan: Plan, region: str, hit) -> Plan:
    """The node that `hit` accepts in front of the node before it, in the same loop."""

    def go(nodes):
        for k, n in enumerate(nodes):
            if k and hit(n):
                return (*nodes[: k - 1], n, nodes[k - 1], *nodes[k + 1 :])
            if isinstance(n, Loop) and (body := go(n.body)) is not None:
                return (*nodes[:k], replace(n, body=body), *nodes[k + 1 :])
        return None

    body = go(plan.regions[region].body.nodes)
    assert body is not None, f"nothing to move in {region}"
    return with_region(plan, region, body=Seq(body))


def wait_first(plan: Plan, region: str, suffix: str) -> Plan:
    """The wait stands in front of its start."""
    return damaged(
        damaged(plan, region, is_wait(suffix), nothing),
        region,
        is_start(suffix),
        lambda n: (Wait(n.transfer, n.args), n),
    )


def late_wait_dropped(plan: Plan, region: str) -> Plan:
    """Without the waits at the region's end."""
    return with_region(plan, region, body=Seq(plan.regions[region].body.nodes[:-1]))


def other_group(plan: Plan, region: str, kind: str) -> Plan:
    """An exchange over one mesh factor instead of all ranks."""
    name = plan.mesh.stages[0][0]

    def swap(nodes):
        return tuple(replace(n, stage=name) if isinstance(n, Collective) and n.kind == kind else n for n in nodes)

    return with_region(plan, region, body=Seq(swap(plan.regions[region].body.nodes)))


def in_a_loop(plan: Plan, region: str) -> Plan:
    """The first exchange of the region moves into a loop over data."""
    nodes = plan.regions[region].body.nodes
    at = next(k for k, n in enumerate(nodes) if isinstance(n, Collective))
    count = 2 * nodes[at].rounds
    loop = Loop("some", "i", "m.tokens[0] % 2", nodes[at : at + count], bound=1)
    return with_region(plan, region, body=Seq((*nodes[:at], loop, *nodes[at + count :])))


def placed(plan: Plan, name: str, onto: str) -> Plan:
    """Explicit addresses, with one buffer put on another."""
    at, offsets = 0, {}
    for buffer, size in plan.vmem(max(plan.spec.build.rows)).items():
        offsets[buffer] = at
        at += size
    out = replace(plan)
    object.__setattr__(out, "vmem_offsets", offsets | {name: offsets[onto]})
    return out


def setup(plan: Plan, transfer: str, old: str, new: str) -> Plan:
    lines = plan.transfers[transfer].setup
    assert any(old in line for line in lines)
    return with_transfer(plan, transfer, setup=tuple(line.replace(old, new) for line in lines))


# -- damage -----------------------------------------------------------------------------------------------------------
# name: (what is done to the mini plan of Kimi K3, the rule that must notice)

DAMAGE = {
    "wait dropped": (lambda p: damaged(p, "moe", is_wait("tape_copy"), nothing), "flight data"),
    "start dropped": (lambda p: damaged(p, "kda", is_start("matrix_read"), nothing), "pairing"),
    "start doubled": (lambda p: damaged(p, "kda", is_start("window_read"), twice), "flight"),
    "wait doubled": (lambda p: damaged(p, "kda", is_wait("window_read"), twice), "pairing"),
    "wait before its start": (lambda p: wait_first(p, "kda", "window_read"), "pairing"),
    "state used before its wait": (lambda p: moved_up(p, "kda", is_step("row")), "data flight"),
    "write-back before the step": (lambda p: moved_up(p, "kda", is_start("matrix_write")), "state"),
    "wrong chunk": (
        lambda p: damaged(p, "mla", is_wait("tape_copy"), lambda n: (replace(n, args=("m", "g + 1")),)),
        "pairing data",
    ),
    "wrong ring slot": (lambda p: setup(p, "tape_copy", "lax.rem(g,", "lax.rem(g + 1,"), "data"),
    "wrong tile slot": (lambda p: setup(p, first(p, "mla", "tile_copy"), "lax.rem(i,", "lax.rem(i + 1,"), "data"),
    "wrong expert": (
        lambda p: with_transfer(p, "expert_copy", source=p.transfers["expert_copy"].source.replace("ids[i]", "ids[0]")),
        "data",
    ),
    "wrong layer's state": (
        lambda p: with_transfer(
            p,
            first(p, "kda", "matrix_write"),
            target=p.transfers[first(p, "kda", "matrix_write")].target.replace("index", "index // 2"),
        ),
        "state",
    ),
    "too few bytes": (lambda p: with_transfer(p, "expert_copy", bytes=512), "pairing"),
    "Advance missing": (lambda p: damaged(p, "dense", lambda n: isinstance(n, Advance), nothing), "tape"),
    "Advance too many": (lambda p: damaged(p, "dense", lambda n: isinstance(n, Advance), twice), "tape"),
    "peers not met": (lambda p: damaged(p, "begin", is_step("await_peers"), nothing), "exchange"),
    "ring filled too little": (
        lambda p: damaged(p, "begin", is_loop("fill_ring"), lambda n: (replace(n, trips="RING_DEPTH - 1"),)),
        "pairing data",
    ),
    "refill dropped": (lambda p: damaged(p, "dense", is_start("tape_copy"), nothing), "pairing"),
    "refill before the read": (lambda p: moved_up(p, "dense", is_start("tape_copy")), "flight"),
    "refill past the end": (
        lambda p: damaged(
            p,
            "end",
            lambda n: isinstance(n, Loop) and not any(isinstance(x, Start) for x in n.body),
            lambda n: (replace(n, body=(Start("tape_copy", ("m", "g + RING_DEPTH")), *n.body)),),
        ),
        "expression",
    ),
    "trips of a tape loop": (
        lambda p: damaged(
            p,
            "kda",
            lambda n: isinstance(n, Loop) and n.name.endswith("_block"),
            lambda n: (replace(n, trips=str(int(n.trips) - 1)),),
        ),
        "tape",
    ),
    "entry shifted": (
        lambda p: with_chunk(p, "kda", 0, lambda es: [es[0], replace(es[1], row=es[1].row + 8), *es[2:]]),
        "tape",
    ),
    "entry of other rows": (
        lambda p: with_chunk(p, "kda", 0, lambda es: [replace(es[0], rows=es[0].rows + 8), *es[1:]]),
        "tape",
    ),
    "blocks out of order": (lambda p: with_chunk(p, "dense", 1, lambda es: [replace(es[0], block=1)]), "tape"),
    "chunk dropped": (lambda p: with_region(p, "moe", chunks=p.regions["moe"].chunks[:-1]), "tape"),
    "weight not read": (lambda p: damaged(p, "mla", is_step("norm"), nothing), "tape"),
    "buffer too large": (lambda p: with_buffer(p, "logits", shape=(8, 2**22)), "memory"),
    "address taken twice": (lambda p: placed(p, "logits", "running"), "memory"),
    "table too large": (lambda p: with_buffer(p, "kv_items", shape=(2**20,)), "memory"),
    "table of two dimensions": (lambda p: with_buffer(p, "kv_items", shape=(64, 2)), "memory"),
    "buffer not declared": (
        lambda p: replace(p, buffers={k: b for k, b in p.buffers.items() if k != "running"}),
        "memory",
    ),
    "semaphores too many": (lambda p: with_buffer(p, "ring_sem", shape=(4096,)), "memory"),
    "late wait dropped": (lambda p: late_wait_dropped(p, "mla"), "pairing"),
    "late wait of a state dropped": (lambda p: late_wait_dropped(p, "kda"), "pairing"),
    "write-back forgotten": (
        lambda p: damaged(
            damaged(p, "kda", is_start("window_write"), nothing), "kda", is_wait("window_write"), nothing
        ),
        "state",
    ),
    "finish dropped": (lambda p: damaged(p, "kda", is_part("scatter", "finish"), nothing), "exchange"),
    "start of an exchange dropped": (lambda p: damaged(p, "mla", is_part("gather", "start"), nothing), "exchange"),
    "group of too few": (lambda p: other_group(p, "mla", "gather"), "exchange"),
    "payload too wide": (
        lambda p: damaged(p, "kda", is_part("scatter", "start"), lambda n: (replace(n, widths=(99999,)),)),
        "exchange",
    ),
    "sum used too early": (lambda p: moved_up(p, "dense", is_step("add")), "exchange"),
    "source of another width": (
        lambda p: damaged(p, "moe", is_part("gather", "start"), lambda n: (replace(n, sources=("m.h[...]", *n.sources[1:])),)),
        "exchange",
    ),
    "remote buffer touched": (
        lambda p: damaged(p, "moe", is_step("add"), lambda n: (replace(n, writes=(*n.writes, next(b for b in p.buffers if b.startswith("inbox_")))),)),
        "exchange",
    ),
    "exchange in a loop over data": (lambda p: in_a_loop(p, "begin"), "exchange"),
    "predicate dropped": (
        lambda p: damaged(p, "kda", is_start("matrix_read"), lambda n: (replace(n, when=None),)),
        "pairing",
    ),
    "predicate too narrow": (
        lambda p: damaged(p, "kda", is_wait("matrix_read"), lambda n: (replace(n, when="m.positions[row] > 0"),)),
        "data flight",
    ),
    "predicate off by one": (
        lambda p: damaged(
            p,
            "moe",
            lambda n: is_start("expert_copy")(n) and n.when is not None,
            lambda n: (replace(n, when=n.when.replace("<", "<=")),),
        ),
        "expression",
    ),
    "predicate of unknown names": (
        lambda p: damaged(p, "kda", is_start("matrix_read"), lambda n: (replace(n, when="rwo >= 0"),)),
        "expression",
    ),
    "bound too small": (
        lambda p: damaged(
            p, "moe", lambda n: isinstance(n, Loop) and n.name == "routed_expert", lambda n: (replace(n, bound=1),)
        ),
        "loop",
    ),
    "paths of two lengths": (
        lambda p: damaged(
            p,
            "dense",
            lambda n: isinstance(n, Advance),
            lambda n: (Branch("m.facts[0] * 0", (("a", Seq((n,))), ("b", Seq(())))),),
        ),
        "tape",
    ),
    "step dropped": (lambda p: damaged(p, "mla", is_step("attend"), nothing), "data"),
    "activation dropped": (lambda p: damaged(p, "dense", is_step("gated_activation"), nothing), "value"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found(mini_kimi, name):
    damage, rules = DAMAGE[name]
    found = check_plan(damage(mini_kimi), rows=max(mini_kimi.spec.build.rows))
    assert {f.rule for f in found} & set(rules.split()), f"{rules} expected, found: {[str(f) for f in found][:4]}"


# -- sound plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi_plan", "qwen_plan", "mini_kimi", "mini_qwen"])
def test_sound_plans_have_no_findings(request, name):
    plan = request.getfixturevalue(name)
    began = time.process_time()
    assert [str(f) for f in check_plan(plan)] == []
    assert time.process_time() - began < 2


def test_one_variant_only(mini_kimi):
    assert check_plan(mini_kimi, rows=3) == check_plan(mini_kimi, rows=[1, 2]) == []


def test_damage_of_the_other_model_is_found(mini_qwen):
    """Attention alone: the tiles of the cache, started in a loop over data and refilled behind the batch."""
    for hit in (is_start("tile_copy"), is_wait("tile_copy"), is_start("word_copy"), is_step("attend"), is_step("words")):
        assert check_plan(damaged(mini_qwen, "attention", hit, nothing))


def test_every_dropped_copy_of_a_full_plan_is_found(qwen_plan):
    for region in qwen_plan.regions:
        for target in {n for n in walk(qwen_plan.regions[region].body) if isinstance(n, (Start, Wait))}:
            assert check_plan(damaged(qwen_plan, region, lambda n, t=target: n == t, nothing), rows=8), (region, target)


# -- the rest ---------------------------------------------------------------------------------------------------------


def test_a_broken_plan_gives_findings_and_no_exception(mini_kimi):
    for broken in (
        replace(mini_kimi, regions={}),
        replace(mini_kimi, transfers={}),
        replace(mini_kimi, buffers={}),
        replace(mini_kimi, ring_depth=0),
        replace(mini_kimi, matrices={}),
        with_transfer(mini_kimi, "tape_copy", source="m."),
    ):
        found = check_plan(broken)
        assert found and all(isinstance(f, Finding) for f in found)


def test_a_finding_names_rule_place_and_reason(mini_kimi):
    found = check_plan(damaged(mini_kimi, "kda", is_start("matrix_read"), nothing))
    assert found[0].where == "kda/" + first(mini_kimi, "kda", "matrix_read")
    assert str(found[0]).startswith("[pairing] kda/") and found[0].why in str(found[0])


def test_the_short_schedule_takes_every_step_of_the_real_one():
    kinds = list("abbbcbbbcbbc") + ["c"]
    short = [kinds[n] for n in short_layers(kinds)]
    assert set(zip(short, short[1:])) == set(zip(kinds, kinds[1:]))
    assert short[0] == kinds[0] and short[-1] == kinds[-1] and len(short) < len(kinds)


def drifting(order: str) -> Group:
    """`s` and `f`: the starts and finishes of a group's uses, in order."""
    return Group([n for n, c in enumerate(order) if c == "s"], [n for n, c in enumerate(order) if c == "f"])


def test_a_peer_that_is_a_phase_ahead_meets_nobody_in_a_place():
    """One exchange at a time needs two parts, two at a time four: the message of use k says that its sender has read use k - 2."""
    assert too_early(drifting("sfsfsfsf"), 1) == 1 and too_early(drifting("sfsfsfsf"), 2) is None
    assert [too_early(drifting("ssffssffssff"), n) for n in (1, 2, 3, 4)] == [1, 2, 3, None]
