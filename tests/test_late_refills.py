"""The order of copies: a step's first ones, a layer's experts one after another, refills of the ring that wait until these are done."""
from __future__ import annotations

from dataclasses import replace

import pytest
from small_specs import prove_kernel, spec

from mkgen.check import check_plan
from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, Loop, Start, Step, Wait, walk
from mkgen.prove.trace_code import check_code
from mkgen.spec.model import Gqa, Mlp, Moe, Rope, Spec
from mkgen.targets import load_target


def mixture(ranks: int = 1, gathered: bool = False, **build) -> Spec:
    """gathered: the experts' input comes out of an exchange, which the shared expert does not need."""
    latent = {"latent": 64} if gathered else {}
    moe = Moe(experts=8, top_k=2, width=48, shared_width=160, **latent)
    return spec(ranks, {"a": Gqa(4, 4, 32)}, {"m": moe}, "a*3", "m*3", 128, ends={"vocab": 4001}, **({"ring_depth": 6} | build))


def planned(made: Spec) -> Plan:
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def starts(plan: Plan) -> list[str]:
    """Copies that the mixture starts, in order."""
    return [n.transfer for n in walk(plan.regions["m"].body) if isinstance(n, Start)]


def late(plan: Plan) -> list[int]:
    """How many refills wait, of each group that does."""
    return [int(n.trips) for n in walk(plan.regions["m"].body) if isinstance(n, Loop) and n.name == "late_refills"]


def test_the_more_wait_the_fewer_come_first():
    plans = [planned(mixture(2, ring_depth=8, block_kib=40, late_refills=n)) for n in (1, 2, 3)]
    before = [starts(p)[:starts(p).index("expert_copy")].count("tape_copy") for p in plans]
    assert before == [2, 1, 0], "refills in front of the first expert"
    assert [late(p) for p in plans] == [[], [2], [3]], "one alone is no loop"
    assert not any(list(check_plan(p)) for p in plans) and len({layout_hash(p) for p in plans}) == 1, "the tape is the same"


def test_no_refill_meets_the_experts():
    """By default those behind the choice wait, as many as half of the ring."""
    plan = planned(mixture(ring_depth=8, expert_slots=4))
    order = starts(plan)
    first, last = order.index("expert_copy"), len(order) - 1 - order[::-1].index("expert_copy")
    assert order[first:first + 3].count("expert_copy") == 3, "the first, the others, then one a trip"
    assert "tape_copy" not in order[first:last] and "tape_copy" in order[last:] and not list(check_plan(plan))
    assert len(late(plan)) == 1 and 1 < late(plan)[0] <= plan.ring_depth // 2


def test_of_a_short_ring_half_waits():
    plan = planned(mixture(ring_depth=2, block_kib=48))
    order = starts(plan)
    assert order[order.index("expert_copy"):].count("tape_copy") > 1, "only one of them is late"
    assert not late(plan) and not list(check_plan(plan))


def test_an_expert_is_fetched_behind_a_wait():
    """One slot is computed, the others are under way: the next is started when one has come, not when it has been used."""
    plan = planned(mixture(expert_slots=3))
    trip = next(n for n in walk(plan.regions["m"].body) if isinstance(n, Loop) and n.name == "routed_expert")
    wait, start = trip.body[:2]
    assert isinstance(wait, Wait) and isinstance(start, Start) and start.args[-1] == "i + EXPERTS_AHEAD"
    assert plan.spec.build.experts_ahead == 2


@pytest.mark.parametrize("shared", [160, 0])
def test_others_are_fetched_when_some_time_has_passed(shared):
    """Where the shared expert hides the gather that the routed ones need, their further copies do not wait for it."""
    made = mixture(2, expert_slots=5, gathered=True, replicate=("m.router",))
    moe = replace(made.model.ffns["m"], shared_width=shared)
    plan = planned(replace(made, model=replace(made.model, ffns={"m": moe})))
    nodes = list(walk(plan.regions["m"].body))
    at = {n.name: i for i, n in enumerate(nodes) if isinstance(n, Loop)}
    finish = next(i for i, n in enumerate(nodes) if i > at["first_experts"] and isinstance(n, Collective) and n.part == "finish")
    order = [at["first_experts"], at["more"], finish, at["routed_expert"]]
    assert order == sorted(order) if shared else [order[0], order[2], order[1], order[3]] == sorted(order)
    assert not list(check_plan(plan))


@pytest.mark.parametrize("parallel", [1, 2])
def test_the_first_is_fetched_while_the_others_are_chosen(parallel):
    """Where each rank has a part of every expert: then it is one of its own for certain."""
    plan = planned(mixture(2, expert_parallel=parallel, tensor_parallel=2 // parallel, expert_slots=4))
    nodes = list(walk(plan.regions["m"].body))
    copies = [i for i, n in enumerate(nodes) if isinstance(n, Start) and n.transfer == "expert_copy"]
    route = next(i for i, n in enumerate(nodes) if isinstance(n, Step) and n.macro == "route")
    assert (copies[0] < route) == (parallel == 1) and not list(check_plan(plan)) and not check_code(plan).findings


@pytest.mark.parametrize("damage", ["not started", "started twice", "whether there is one or not", "the second in its place"])
def test_damage_to_the_first_is_found(damage):
    plan = planned(mixture(expert_slots=4))
    region = plan.regions["m"]
    start = next(n for n in region.body.nodes if isinstance(n, Start) and n.transfer == "expert_copy")
    loop = next(n for n in region.body.nodes if isinstance(n, Loop) and n.name == "first_experts")
    hit, other = {"not started": (start, []), "whether there is one or not": (start, [replace(start, when=None)]),
                  "started twice": (loop, [replace(loop, body=(loop.body[0], replace(loop.body[1], when=None)))]),
                  "the second in its place": (start, [replace(start, args=("m", "index", "1"))])}[damage]
    nodes = tuple(x for n in region.body.nodes for x in (other if n is hit else [n]))
    damaged = replace(plan, regions={**plan.regions, "m": replace(region, body=replace(region.body, nodes=nodes))})
    assert list(check_plan(damaged))


def test_one_refill_less_is_found():
    plan = planned(mixture(late_refills=6, ring_depth=8))
    region = plan.regions["m"]
    assert any(isinstance(n, Loop) and n.name == "late_refills" for n in region.body.nodes)
    fewer = tuple(replace(n, trips=str(int(n.trips) - 1)) if isinstance(n, Loop) and n.name == "late_refills" else n for n in region.body.nodes)
    damaged = replace(plan, regions={**plan.regions, "m": replace(region, body=replace(region.body, nodes=fewer))})
    assert list(check_plan(damaged))


def test_more_than_the_ring_holds_is_refused():
    with pytest.raises(MkgenError, match="late_refills: 6 of a ring of 6"):
        planned(mixture(late_refills=6, ring_depth=6))


@pytest.mark.slow
def test_the_kernel_gives_the_references_numbers():
    prove_kernel(mixture(2, late_refills=5))


def test_a_step_begins_with_its_copies():
    """Whatever op comes first: the embedding's rows, then the ring, which a rank alone reads for its rotary frequencies at once."""
    plan = planned(spec(1, {"a": Gqa(4, 4, 32, rope=Rope())}, {"m": Mlp(96)}, "a*2", "m*2", 128))
    nodes = plan.regions["begin"].body.nodes
    assert [n.name for n in nodes[:2]] == ["embed_rows", "fill_ring"] and "rope" in next(n for n in nodes if isinstance(n, Step)).op and not list(check_plan(plan))
