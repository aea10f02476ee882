"""A mixture of snapshots: what is known of it before the running sum is made beside the exchange in front of it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from small_specs import prove_kernel, spec

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, Loop, Seq, Start, Step, Wait, walk
from mkgen.prove.trace_code import check_code
from mkgen.spec.model import Gqa, Mlp, Norm, Residual
from mkgen.targets import load_target


def planned(ranks: int, norm: Norm = Norm(), ffn: str = "m*3") -> Plan:
    made = spec(ranks, {"a": Gqa(4, 4, 32)}, {"m": Mlp(96)}, "a*3", ffn, 128, residual=Residual("block_softmax", block=2))
    made = replace(made, model=replace(made.model, norm=norm))
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def steps(plan: Plan, region: str) -> list[str]:
    return [n.macro for n in walk(plan.regions[region].body) if isinstance(n, Step)]


def tape_waits(plan: Plan, region: str) -> int:
    """Chunks that a region waits for."""
    def count(n) -> int:
        if isinstance(n, Loop):
            return int(n.trips) * sum(map(count, n.body)) if any(isinstance(x, Wait) and x.transfer == "tape_copy" for x in walk(n)) else 0
        return sum(map(count, n.nodes)) if isinstance(n, Seq) else isinstance(n, Wait) and n.transfer == "tape_copy"
    return count(plan.regions[region].body)


@pytest.mark.parametrize("ranks, ffn", [(1, "m*3"), (2, "m*3"), (2, "m - m")])
def test_each_sublayer_weighs_for_the_next_one(ranks, ffn):
    plan = planned(ranks, ffn=ffn)
    for name, region in plan.regions.items():
        assert steps(plan, name).count("weigh_past") == (name != "end")
        assert region.awaited == (name != "begin")
        assert tape_waits(plan, name) == len(region.chunks) + (name == "begin") - (name == "end")
    assert steps(plan, "a").index("block_mixture") < steps(plan, "a").index("open_block") < steps(plan, "a").index("weigh_past")
    assert not list(check_plan(plan)) and not check_code(plan).findings


def test_it_is_done_while_the_last_exchange_is_under_way():
    plan = planned(2)
    for name in ("a", "m"):
        nodes = list(plan.regions[name].body.nodes)
        at = next(i for i, n in enumerate(nodes) if isinstance(n, Step) and n.macro == "weigh_past")
        around = [[n.part for n in some if isinstance(n, Collective)] for some in (nodes[:at], nodes[at:])]
        assert around[0][-1] == "start" and around[1][0] == "finish"


@pytest.mark.parametrize("norm, step", [(Norm(), 0), (Norm(offset=1.0), 0), (Norm("layer"), 1), (Norm(weight="before"), 1), (Norm(weight="none"), 1)])
def test_the_norm_is_made_of_the_same_sums_if_it_is_an_rms_norm(norm, step):
    plan = planned(2, norm)
    assert steps(plan, "m").count("norm") == step and not list(check_plan(plan))


@pytest.mark.parametrize("damage", ["the next chunk is not waited for", "in front of the last product", "waited for twice"])
def test_damage_is_found(damage):
    plan = planned(2)
    region = plan.regions["m"]
    nodes = list(region.body.nodes)
    at = next(i for i, n in enumerate(nodes) if isinstance(n, Step) and n.macro == "weigh_past")
    wait, weigh = nodes[at - 1:at + 1]
    assert wait == Wait("tape_copy", ("m", "g"))
    if damage == "in front of the last product":
        first = next(i for i, n in enumerate(nodes) if isinstance(n, Step) and n.macro == "block_mixture")
        nodes = [*nodes[:first], wait, weigh, *nodes[first:at - 1], *nodes[at + 1:]]
    else:
        nodes[at - 1:at] = [] if damage == "the next chunk is not waited for" else [wait, wait]
    assert list(check_plan(replace(plan, regions={**plan.regions, "m": replace(region, body=Seq(tuple(nodes)))})))


def test_messages_leave_before_copies_are_started(kimi_plan):
    """A copy of the tape has time; what an exchange brings is waited for."""
    for region in kimi_plan.regions.values():
        for before, n in zip(region.body.nodes, region.body.nodes[1:]):
            starts = [x for x in walk(before) if not isinstance(x, Loop)]
            if isinstance(n, Collective) and n.part == "start":
                assert not all(isinstance(x, Start) and x.transfer == "tape_copy" for x in starts), region.name


@pytest.mark.slow
@pytest.mark.parametrize("norm", [Norm(), Norm("layer")])
def test_against_the_reference(norm):
    made = spec(2, {"a": Gqa(4, 4, 32)}, {"m": Mlp(96)}, "a*3", "m - m", 192, residual=Residual("block_softmax", block=2))
    prove_kernel(replace(made, model=replace(made.model, norm=norm)))
