"""Rows shared out over the ranks: where a plan does so, that it is right, and that what is wrong with it is found."""
from __future__ import annotations

import random
from dataclasses import replace

import damage
import pytest
from conftest import ROOT
from small_specs import prove_kernel, spec

from mkgen.check import check_plan
from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.plan.exchange import is_rows
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, Seq, Step, walk
from mkgen.prove.compile import compile_spec
from mkgen.prove.coverage import pieces
from mkgen.prove.mini import mini_spec
from mkgen.prove.trace_code import check_code
from mkgen.spec.load import load_spec
from mkgen.spec.model import Gqa, Moe, Norm, Router, Spec
from mkgen.targets import load_target
from mkgen.tune.space import exchanges as ways_to_try

BEFORE = Moe(experts=8, top_k=4, width=96, latent=136, expert_norm=Norm(eps=1e-8, offset=1.0, weight="before"),
             router=Router("sigmoid", bias=True, renorm_eps=1e-15))
AFTER = Moe(experts=8, top_k=4, width=96, bias=True, shared_width=64, expert_norm=Norm(), router=Router("logits", after="sigmoid", scale_input=True))


def normed(ranks: int = 4, rows: tuple[int, ...] = (4,), moe: Moe = BEFORE, **build) -> Spec:
    """Experts that all ranks share and that are normed: their outputs are summed apart."""
    mesh = {2: {"core": 2}, 4: {"chip": 2, "core": 2}}[ranks]
    build = {"expert_parallel": 1, "tensor_parallel": ranks} | build
    return spec(ranks, {"a": Gqa(4, 4, 32)}, {"f": moe}, "a", "f", 256, rows=rows, mesh=mesh, **build)


def planned(made: Spec) -> Plan:
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def full(*rows: int, wire: str = "bf16", **reduce: str) -> Plan:
    made = load_spec(ROOT / "model_specs/muse_spark_1_2.yaml")
    return planned(replace(made, build=replace(made.build, rows=rows, wire=wire, reduce=reduce)))


def by_rows(plan: Plan) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(n.kind, n.part, n.sources) for r in plan.regions.values() for n in walk(r.body) if isinstance(n, Collective) and n.rows]


KERNELS = {
    "a row to each rank, a part a run": lambda: normed(wire="bf16", reduce={"f.parts": "rows all"}),
    "one row or two, by the core": lambda: normed(rows=(4, 8), wire="bf16", activations="f32", reduce={"rest": "rows core chip"}),
    "four rows, two parts a run": lambda: normed(2, (8,), AFTER, reduce={"f.parts": "rows"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_kernel_is_right(name):
    prove_kernel(KERNELS[name]())


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_the_chips_compiler_takes_it(name):
    assert {r.verdict for r in compile_spec(planned(KERNELS[name]()))} == {"pass"}


def test_eight_rows_are_shared_out_and_one_is_not():
    """Where that is faster over what the module is for; a message is as large as one of columns."""
    assert [k for k, *_ in by_rows(full(8))] == ["scatter"] * 4 + ["gather"] * 2 and dict(full(8).ways)["moe.parts"] == "rows core chip"
    assert by_rows(full(1)) == by_rows(full(1, 8)) == by_rows(full(8, **{"moe.parts": "scatter"})) == []
    sizes = {way: [n.message_bytes(8) for n in walk(full(8, **{"moe.parts": way}).regions["moe"].body) if isinstance(n, Collective) and n.part == "start"]
             for way in ("rows all", "rows", "scatter")}
    assert sizes["scatter"][1] == sizes["scatter"][2] == sizes["rows all"][1] == 8 * sizes["rows all"][2]
    assert sizes["rows"][1:4] == [4 * sizes["rows all"][1], *sizes["rows all"][1:3]]


def test_the_tape_does_not_depend_on_it():
    assert len({layout_hash(planned(normed(reduce={"f.parts": way}))) for way in ("rows", "rows core chip", "scatter", "flat")}) == 1
    assert layout_hash(full(8)) == layout_hash(full(1))


@pytest.mark.parametrize("made", [normed(rows=(4, 6)), normed(moe=replace(BEFORE, top_k=3)), normed(moe=replace(BEFORE, latent=66))])
def test_where_it_can_not_be(made):
    """Rows that the ranks do not divide; parts that do not lie in whole runs; a result that has no equal runs."""
    assert by_rows(planned(made)) == [] and by_rows(planned(replace(made, build=replace(made.build, reduce={"rest": "rows"})))) == []
    with pytest.raises(MkgenError, match="f.parts can not be shared out by rows.*\n.*power of two"):
        planned(replace(made, build=replace(made.build, reduce={"f.parts": "rows"})))


def test_a_way_that_leads_nowhere_is_refused():
    with pytest.raises(MkgenError, match="'chip' does not lead to all 4 ranks\n  fix: one of rows all, rows core chip"):
        planned(normed(reduce={"f.parts": "rows chip"}))


def test_the_mini_of_it_does_so_too():
    made = load_spec(ROOT / "model_specs/muse_spark_1_2.yaml")
    made = replace(made, build=replace(made.build, rows=(8,), wire="bf16"))
    for whole_mesh in (False, True):
        mini = planned(mini_spec(made, whole_mesh))
        assert {kind for kind, *_ in by_rows(mini)} == {"scatter", "gather"}
    assert {p for p in pieces(planned(made)) if "rows" in p} == {"scatter of rows of one value, 2 rounds, bf16", "gather of rows of one value, 1 rounds, bf16",
                                                                 "experts.mix_rows"}


def test_the_search_tries_it_where_it_may_be():
    tried = {d.name: d.values for d in ways_to_try(planned(normed()))}
    assert {name: ways[-2:] for name, ways in tried.items() if any(map(is_rows, ways))} == {"reduce f.parts": ("rows all", "rows core chip")}
    assert not any(is_rows(way) for d in ways_to_try(planned(normed(rows=(4, 6)))) for way in d.values)


# -- what is wrong with it is found ---------------------------------------------------------------------------------------


def changed(plan: Plan, change) -> Plan:
    """The plan with other nodes in its routed sub-layer: change(node) -> nodes."""
    region = plan.regions["f"]
    body = Seq(tuple(x for n in region.body.nodes for x in change(n)))
    return replace(plan, regions=plan.regions | {"f": replace(region, body=body)})


def of_rows(n, kind: str) -> bool:
    return isinstance(n, Collective) and n.rows and n.kind == kind


def is_mix(n) -> bool:
    return isinstance(n, Step) and n.macro == "mix_rows"


WRONG = {
    "columns are shared out, rows taken": lambda n: (replace(n, rows=False),) if of_rows(n, "scatter") else (n,),
    "rows are gathered as columns": lambda n: (replace(n, rows=False),) if of_rows(n, "gather") else (n,),
    "columns are gathered as rows": lambda n: (replace(n, rows=True),) if isinstance(n, Collective) and n.kind == "gather" else (n,),
    "rows are not gathered": lambda n: () if of_rows(n, "gather") else (n,),
    "rows are not shared out": lambda n: () if of_rows(n, "scatter") else (n,),
    "another rank's rows are mixed": lambda n: (replace(n, macro="mix"),) if is_mix(n) else (n,),
    "with its neighbour alone": lambda n: (replace(n, path=("core",)),) * (n.round == 0) if of_rows(n, "scatter") else (n,),
    "runs of another width": lambda n: (replace(n, widths=(n.widths[0] - 128,)),) if of_rows(n, "scatter") else (n,),
    "gathered in two rounds": lambda n: (replace(n, path=("core", "chip"), stage="core"),) if of_rows(n, "gather") else (n,),
    "the outer group first": lambda n: (replace(n, path=n.path[::-1], stage=n.path[1 - n.round]),) if of_rows(n, "scatter") else (n,),
    "what is mixed is shared out once more": lambda n: (n, *SHARED(n)) if of_rows(n, "gather") and n.part == "finish" else (n,),
}


def SHARED(n: Collective) -> tuple[Collective, ...]:
    return tuple(replace(n, kind="scatter", part=part, sources=n.targets, targets=n.sources) for part in ("start", "finish"))


@pytest.mark.parametrize("wrong", WRONG)
def test_damage_is_found(wrong):
    plan = planned(normed(reduce={"f.parts": "rows core chip"}))
    assert not list(check_plan(plan))
    assert list(check_plan(changed(plan, WRONG[wrong])))


def test_rows_that_the_ranks_do_not_divide_are_found():
    plan = planned(normed(reduce={"f.parts": "rows"}))
    assert any("rows that 4 ranks divide" in str(f) for f in check_plan(replace(plan, spec=replace(plan.spec, build=replace(plan.spec.build, rows=(3,))))))


def test_no_damage_of_any_kind_is_accepted():
    plan = planned(normed(wire="bf16", reduce={"f.parts": "rows core chip"}))
    made = [(name, damaged) for name, kind in damage.KINDS.items() for seed in range(4)
            if (damaged := kind(plan, random.Random(f"{seed} {name}"))) not in (None, plan)]
    assert by_rows(plan) and len(made) > 60 and [name for name, damaged in made if not check_plan(damaged)] == []


def test_the_code_does_what_the_plan_says():
    plan = planned(normed(rows=(4, 8), wire="bf16", reduce={"f.parts": "rows core chip"}))
    done = check_code(plan)
    assert done.findings == [] and done.messages > 0
