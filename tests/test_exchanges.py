"""Exchanges between ranks: which ones a plan makes, in what order, and that every way to make them gives the reference's numbers."""
from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from ml_dtypes import bfloat16
from small_specs import prove_kernel, spec

from mkgen.check import check_plan
from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.pack.image import put_weight
from mkgen.pack.places import TapePlaces
from mkgen.pack.unpack import weight_from_tapes
from mkgen.plan.figures import families
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, Step, walk
from mkgen.spec.load import load_spec
from mkgen.spec.model import Gqa, Mlp, Moe, Norm, Spec
from mkgen.spec.validate import validate
from mkgen.targets import load_target

MESH = {"chip": 2, "core": 2}
HOSTS = {"host": 2, "chip": 2, "core": 2}


def latent(mesh: dict = MESH, hidden: int = 128, **build) -> Spec:
    """Latent experts beside shared ones: every kind of exchange meets every other."""
    ranks = 1
    for size in mesh.values():
        ranks *= size
    moe = Moe(experts=8, top_k=2, width=48, latent=64, latent_norm=Norm(), shared_width=64)
    build = {"expert_parallel": min(ranks, 4), "tensor_parallel": max(1, ranks // 4)} | build
    if mesh is not HOSTS:
        return spec(ranks, {"a": Gqa(4, 4, 32)}, {"d": Mlp(96), "m": moe}, "a*2", "d m", hidden, mesh=mesh, **build)
    made = latent({"chip": 4, "core": 2}, hidden, **build | {"over": {}})          # a mesh that exists, and then a small one of three factors
    return replace(made, build=replace(made.build, mesh=mesh, over=build.get("over", {})))


def planned(made: Spec) -> Plan:
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def exchanges(plan: Plan, region: str) -> list[Collective]:
    return [n for n in walk(plan.regions[region].body) if isinstance(n, Collective) and (n.part, n.round) == ("start", 0)]


def between(plan: Plan, region: str, first: Collective) -> list[str]:
    """Ops between an exchange's start and its finish."""
    out, inside = [], False
    for n in walk(plan.regions[region].body):
        if n is first:
            inside = True
        elif inside and isinstance(n, Collective):
            return out
        elif inside and isinstance(n, Step):
            out.append(n.op)
    raise AssertionError("it is not finished")


def changed(node, kind="gather", **fields):
    """The tree with other fields in all gathers, or scatters."""
    if isinstance(node, Collective):
        return replace(node, **fields) if node.kind == kind else node
    inner = {f: getattr(node, f) for f in ("nodes", "body") if hasattr(node, f)}
    tree = {f: tuple(changed(x, kind, **fields) for x in v) if isinstance(v, tuple) else changed(v, kind, **fields) for f, v in inner.items()}
    return replace(node, **tree) if tree else node


def test_exchanges_that_meet_are_one():
    """Router logits and latent travel together; so do the routed and the shared sum, which is delayed until then."""
    found = exchanges(planned(latent(add="runs", reduce={"rest": "scatter"})), "m")
    assert [(n.kind, len(n.sources)) for n in found] == [("gather", 2), ("scatter", 2), ("gather", 1), ("gather", 1)]
    whole = exchanges(planned(latent(add="whole", reduce={"rest": "staged"})), "m")
    assert [(n.kind, len(n.sources)) for n in whole] == [("gather", 2), ("reduce", 2), ("gather", 1)]


def test_the_shared_expert_runs_while_the_routers_logits_travel():
    plan = planned(latent())
    ops = between(plan, "m", exchanges(plan, "m")[0])
    assert {"m.shared_gate_up", "m.shared_act", "m.shared_down"} <= set(ops) and "m.route" not in ops


def test_the_tape_does_not_depend_on_the_ways():
    base = layout_hash(planned(latent()))
    for ways in (dict(reduce={"rest": "flat"}), dict(reduce={"rest": "scatter"}), dict(gather="staged", scatter="staged"), dict(add="whole"),
                 dict(add="runs"), dict(wire="bf16"), dict(rows=(1,))):
        assert layout_hash(planned(latent(**ways))) == base, ways


@pytest.mark.parametrize("mesh", [{"core": 2}, {"chip": 3}, MESH, {"host": 2, "chip": 4, "core": 2}])
def test_every_path_reaches_all_ranks_and_passes_the_checker(mesh):
    for path in planned(latent(mesh)).mesh.paths:
        text = " ".join(path)
        for build in (dict(reduce={"rest": text}, add="whole"), dict(reduce={"rest": "scatter"}, scatter=text, add="runs"),
                      dict(reduce={"rest": text}, wire="bf16")):
            plan = planned(latent(mesh, gather=text, **build))
            assert not list(check_plan(plan)), (path, build)
            assert {n.path for r in plan.regions for n in exchanges(plan, r)} <= {path, path[::-1]} | {p for p in plan.mesh.paths}


@pytest.mark.parametrize("build, hidden, wires", [
    (dict(), 640, {"out": "bf16"}),                                    # bf16 values lose nothing
    (dict(activations="f32"), 640, {"out": "f32"}),
    (dict(activations="f32", wire="bf16"), 640, {"out": "bf16"}),      # a sum, whose terms are rounded anyway
])
def test_what_a_gather_travels_as(build, hidden, wires):
    plan = planned(latent(hidden=hidden, reduce={"rest": "scatter"}, add="whole", **build))
    gathers = [n for n in exchanges(plan, "a") if n.kind == "gather"]
    assert {n.wire for n in gathers} == set(wires.values()) and not list(check_plan(plan))
    assert all(n.wire == "f32" for n in exchanges(plan, "m") if any("router" in s for s in n.sources))


def test_a_gather_that_rounds_what_nobody_allowed_is_found():
    """Float32 values must not travel as bf16 unless they are a sum under build.wire: bf16."""
    plan = planned(latent(hidden=640, reduce={"rest": "scatter"}, add="whole", activations="f32"))

    region = plan.regions["a"]
    damaged = replace(plan, regions=plan.regions | {"a": replace(region, body=changed(region.body, wire="bf16"))})
    assert any("gathers" in str(f) and "as bf16" in str(f) for f in check_plan(damaged))


NEAR = {"m.latent_up": "chip_core"}
COPIES = {"m.latent_up": "core", "m.latent_down": "core", "m.router": "core"}


def test_what_is_cut_over_a_group_is_gathered_within_it():
    plan = planned(latent(add="whole", over=COPIES))
    assert not list(check_plan(plan))
    gathers = {n.sources: n.path for n in exchanges(plan, "m") if n.kind == "gather"}
    assert set(gathers.values()) == {("core",)} and plan.matrices["m.latent_up"].over == 2
    whole, cut = (next(f for f in families(p).items() if f[0] == "m.latent_up")[1] for p in (plan, planned(latent(add="whole"))))
    assert whole.true == 2 * cut.true and whole.replicated == cut.true and cut.replicated == 0
    assert layout_hash(plan) != layout_hash(planned(latent(add="whole")))


def test_a_sum_added_to_a_groups_columns_is_shared_out_within_the_group():
    """And the sum that is needed whole goes beside it, in the same rounds; or is shared out and gathered within the group too."""
    for asked, want in (("beside", [("gather", 1), ("scatter", 2), ("gather", 1)]), ("scatter", [("gather", 1), ("scatter", 2), ("gather", 1), ("gather", 1)])):
        plan = planned(latent(HOSTS, add="runs", over=NEAR, reduce={"m.routed": asked, "rest": "scatter"}))
        found = exchanges(plan, "m")
        scatter = next(n for n in found if n.kind == "scatter")
        assert not list(check_plan(plan)) and [(n.kind, len(n.sources)) for n in found][1:] == want[1:]
        assert (scatter.over, scatter.beside, scatter.path[-1]) == (4, int(asked == "beside"), "host")
        assert all(n.path in (("chip_core",), ("core", "chip")) for n in found[1:] if n.kind == "gather")
        assert layout_hash(plan) == layout_hash(planned(latent(HOSTS, add="whole", over=NEAR)))


@pytest.mark.parametrize("fields, message", [
    (dict(over=0), "reads|spread over|needed|lead|reaches"), (dict(beside=0), "columns|needed"), (dict(over=2), "columns|needed|reaches"),
    (dict(path=("host", "chip_core"), stage="host"), "goes by")])
def test_a_scatter_that_shares_out_otherwise_is_found(fields, message):
    plan = planned(latent(HOSTS, add="runs", over=NEAR, reduce={"m.routed": "beside", "rest": "scatter"}))
    region = plan.regions["m"]
    damaged = replace(plan, regions=plan.regions | {"m": replace(region, body=changed(region.body, "scatter", **fields))})
    found = [str(f) for f in check_plan(damaged)]
    assert any(re.search(message, f) for f in found), found


def test_a_gather_over_too_few_ranks_is_found():
    """What is cut over all ranks, gathered within a group; and the other way round."""
    for over, group, message in (({}, ("core",), "spread over 4"), (COPIES, ("all",), "spread over 2")):
        plan = planned(latent(add="whole", gather="flat", over=over))
        region = plan.regions["m"]
        damaged = replace(plan, regions=plan.regions | {"m": replace(region, body=changed(region.body, path=group, stage=group[0]))})
        assert any(message in str(f) for f in check_plan(damaged))


@pytest.mark.parametrize("over, message", [
    ({"m.latent_up": "chip"}, "no group of neighbouring ranks"), ({"m.shared_up": "core"}, "cannot be cut over some ranks"),
    ({"m.nothing": "core"}, "unknown weight family"), ({"m.router": "all"}, "no group of neighbouring ranks")])
def test_over_names_a_family_and_a_group(over, message):
    made = latent()
    assert any(message in str(p) for p in validate(replace(made, build=replace(made.build, over=over))))
    both = replace(made.build, over={"m.router": "core"}, replicate=("m.router",))
    assert any("is in build.replicate too" in str(p) for p in validate(replace(made, build=both)))


def test_copies_hold_the_same_bits():
    plan, rng = planned(latent(over=COPIES)), np.random.default_rng(3)
    places, tapes = TapePlaces(plan), [np.zeros((plan.tape_rows, 128), np.uint32) for _ in range(4)]
    for name in COPIES:
        value = rng.standard_normal(plan.weights[name].shape).astype(bfloat16)
        for rank, tape in enumerate(tapes):
            put_weight(places, rank, tape, 1, name, value)
        assert np.array_equal(weight_from_tapes(places, tapes, 1, name), value)
        assert np.array_equal(weight_from_tapes(places, tapes[2:], 1, name), value)          # the second group has all of it


def test_a_path_that_leads_nowhere_is_refused():
    with pytest.raises(MkgenError, match="does not lead to all 4 ranks"):
        planned(latent(gather="core"))
    with pytest.raises(MkgenError, match="is no sum over the ranks"):
        planned(latent(reduce={"m.rooted": "flat"}))


def test_payload_decides():
    """One row of a large model is reduced at once or in stages; many rows are scattered and gathered."""
    few, many = (planned(load_spec("model_specs/kimi_k3.yaml", sets=[f"build.rows=[{rows}]"])) for rows in (1, 8))
    assert dict(few.ways)["kda.out"] != "scatter" == dict(many.ways)["kda.out"]
    assert layout_hash(few) == layout_hash(many)
    rounds = [sum(len(exchanges(p, r.name)) for _, r in p.sequence()) for p in (few, many)]
    assert rounds[0] < rounds[1] < 700


@pytest.mark.slow
@pytest.mark.parametrize("ways", [
    dict(reduce={"rest": "staged"}, gather="staged", add="whole", wire="bf16"),
    dict(reduce={"rest": "scatter"}, gather="staged", scatter="staged", add="runs"),
    dict(reduce={"rest": "scatter"}, gather="flat", scatter="flat", wire="bf16", activations="f32"),
], ids=["reduced", "scattered", "flat"])
def test_every_way_gives_the_references_numbers(ways):
    prove_kernel(latent(**ways))


@pytest.mark.slow
@pytest.mark.parametrize("mesh, build", [
    (MESH, dict(over=COPIES, reduce={"rest": "staged"}, add="whole")),
    (HOSTS, dict(over=NEAR, reduce={"m.routed": "beside"}, add="runs", wire="bf16")),
    (HOSTS, dict(over=NEAR, reduce={"rest": "scatter"}, add="runs")),
], ids=["gathered", "beside", "scattered"])
def test_copies_in_other_groups_give_the_references_numbers(mesh, build):
    prove_kernel(latent(mesh, **build))


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["bf16", "f32"])
def test_gathers_of_bf16_pairs(activations):
    prove_kernel(latent(hidden=640, reduce={"rest": "scatter"}, gather="staged", add="whole", wire="bf16", activations=activations))
