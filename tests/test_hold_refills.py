"""Refills of the ring that wait until a layer's first experts are on their way, or until its experts are done."""
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
from mkgen.plan.regions import Loop, Start, walk
from mkgen.spec.model import Gqa, Moe, Spec
from mkgen.targets import load_target


def mixture(ranks: int = 1, **build) -> Spec:
    moe = Moe(experts=8, top_k=2, width=48, shared_width=160)
    return spec(ranks, {"a": Gqa(4, 4, 32)}, {"m": moe}, "a*3", "m*3", 128, ends={"vocab": 4001}, **({"ring_depth": 6} | build))


def planned(made: Spec) -> Plan:
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def starts(plan: Plan) -> list[str]:
    """Copies that the mixture starts, in order; those of the ring until the first expert's."""
    return [n.transfer for n in walk(plan.regions["m"].body) if isinstance(n, Start)]


def test_experts_come_first():
    plain, held = (planned(mixture(2, hold_refills=hold)) for hold in (False, True))
    before = [starts(p)[:starts(p).index("expert_copy")].count("tape_copy") for p in (plain, held)]
    assert before[1] < before[0], "refills in front of the first expert"
    late = next(n for n in walk(held.regions["m"].body) if isinstance(n, Loop) and n.name == "held_refills")
    assert int(late.trips) < held.ring_depth and not list(check_plan(held))
    assert layout_hash(held) == layout_hash(plain), "the tape is the same"


def test_no_refill_meets_the_experts():
    plan = planned(mixture(ring_depth=8, expert_slots=3))
    order = starts(plan)
    first, last = order.index("expert_copy"), len(order) - 1 - order[::-1].index("expert_copy")
    assert order[:first + 3].count("expert_copy") == 3, "the first, the others, then one a trip"
    assert "tape_copy" not in order[first:last] and "tape_copy" in order[last:] and not list(check_plan(plan))
    late = next(n for n in walk(plan.regions["m"].body) if isinstance(n, Loop) and n.name == "late_refills")
    assert 1 < int(late.trips) <= plan.ring_depth // 2


def test_a_short_ring_is_refilled_at_once():
    plan = planned(mixture(ring_depth=2, block_kib=48))
    order = starts(plan)
    assert "tape_copy" in order[order.index("expert_copy"):] and not list(check_plan(plan))
    assert not any(isinstance(n, Loop) and n.name == "late_refills" for n in walk(plan.regions["m"].body))


@pytest.mark.parametrize("hold,loop", [(True, "held_refills"), (False, "late_refills")])
def test_one_refill_less_is_found(hold, loop):
    plan = planned(mixture(hold_refills=hold, ring_depth=8))
    region = plan.regions["m"]
    assert any(isinstance(n, Loop) and n.name == loop for n in region.body.nodes)
    fewer = tuple(replace(n, trips=str(int(n.trips) - 1)) if isinstance(n, Loop) and n.name == loop else n for n in region.body.nodes)
    damaged = replace(plan, regions={**plan.regions, "m": replace(region, body=replace(region.body, nodes=fewer))})
    assert list(check_plan(damaged))


def test_more_than_the_ring_holds_is_refused():
    with pytest.raises(MkgenError, match="while refills are held"):
        planned(mixture(ranks=2, hold_refills=True, ring_depth=2, block_kib=48))


@pytest.mark.slow
def test_the_kernel_gives_the_references_numbers():
    prove_kernel(mixture(2, hold_refills=True))
