"""From a plan to events, from events to a prediction: what must hold for any cycles, on made-up ones that need no compiler."""
from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from click.testing import CliRunner

import mkgen.profile as profile
from conftest import ROOT
from mkgen.check.model import Model, Text
from mkgen.check.scenario import Scenario, tokens
from mkgen.check.shorten import whole
from mkgen.cli import main
from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.plan.figures import figures
from mkgen.plan.planner import make_plan
from mkgen.profile.scoreboard import Cycles
from mkgen.prove.expansion import Copy
from mkgen.prove.expansion import Expansion as PlanExpansion
from mkgen.simulate import predict as predicting
from mkgen.simulate.draws import IDENTICAL, busiest, draw_experts, steps_for
from mkgen.simulate.engine import replay
from mkgen.simulate.events import Await, Fetch, Receive, Send, Work
from mkgen.simulate.expand import Expansion, expand
from mkgen.simulate.predict import predict, sensitivity
from mkgen.spec.model import Gqa, Moe
from mkgen.targets import load_target
from small_specs import spec

KIMI, QWEN = (str(ROOT / "model_specs" / f"{name}.yaml") for name in ("kimi_k3", "qwen3_30b_a3b"))


def made_up(job, asked) -> dict[str, Cycles]:
    """Cycles that depend on the piece alone; the loops that the compiler would find."""
    def loops(a) -> tuple[float, ...]:
        lists = a.function.count("list_kv_items(") * job.rows
        mixtures = len(re.findall(r"weigh_past\(.*m\.facts", a.function))
        return (10.0,) * lists or (30.0,) * mixtures or (200.0,) * ("lambda i, _: take_expert" in a.function)

    return {a.key: Cycles(100.0 + len(a.function), 50.0, loops(a)) for a in asked}


@pytest.fixture(autouse=True)
def cycles(monkeypatch):
    monkeypatch.setattr(profile, "measure", made_up)


@pytest.fixture(scope="module", params=["qwen", "kimi"])
def plan(request):
    return request.getfixturevalue(f"{request.param}_plan")


def events_of(plan, rows: int, position: int | None = None, steps: int = 1, seed: int = 0):
    drawn = draw_experts(plan, rows, steps, seed)
    expansion = Expansion(plan, rows, profile.profile_plan(plan, rows), position)
    return drawn, [expansion.step(d.tolist()) for d in drawn]


# -- draws --------------------------------------------------------------------------------------------------------------

def test_busiest_is_the_largest_of_the_groups():
    rng = np.random.default_rng(1)
    assert (busiest(rng, 50, 3, 8, 8, 8) == (8, 0)).all()                           # all experts, one group, every one for three rows
    assert (busiest(rng, 50, 1, 8, 8, 2) == (2, 2)).all()
    assert (busiest(rng, 200, 1, 64, 1, 8) == (1, 1)).all()


def test_one_group_is_what_chance_says():
    """Of 16 experts 4 a row, 3 rows: 16 (1 - (3/4)^3) distinct ones in the mean, 16 * 3 * 1/4 (3/4)^2 of them for one row."""
    distinct, alone = busiest(np.random.default_rng(0), 4000, 3, 16, 4, 16).mean(axis=0)
    assert distinct == pytest.approx(16 * (1 - 0.75 ** 3), abs=0.1)
    assert alone == pytest.approx(16 * 3 / 4 * 0.75 ** 2, abs=0.1)


def test_no_group_is_slower():
    """2 rows take 1 of 2 experts, each in a group of its own: together, or one in each group. With 3 rows, some two are together."""
    found = busiest(np.random.default_rng(0), 400, 2, 2, 1, 1)
    assert {tuple(x) for x in found.tolist()} == {(1, 0), (1, 1)}
    both = busiest(np.random.default_rng(0), 4000, 3, 2, 1, 1)
    assert (both == (1, 0)).all()


def test_groups_against_a_slow_count():
    """Every set of 2 of 4 experts in 2 groups of 2: the busiest has 2 in 2 of 6 cases."""
    assert busiest(np.random.default_rng(0), 6000, 1, 4, 2, 2)[:, 0].mean() == pytest.approx(1 + 2 / 6, abs=0.03)


def test_draws(kimi_plan):
    one, many = draw_experts(kimi_plan, 1, 11), draw_experts(kimi_plan, 8, 11)
    assert one.shape == (11, 92, 2) and one.size >= 2000 and steps_for(kimi_plan) == 11
    assert 6.0 < one.mean() < 6.3                        # 16 of 896 in 4 groups: 4 in the mean, the busiest has about 6.1
    assert (one[..., 0] == one[..., 1]).all() and many[..., 0].mean() > one.mean()
    assert 0.9 < many[..., 1].sum() / many[..., 0].sum() < 0.96
    same = draw_experts(kimi_plan, 8, 11, tokens=IDENTICAL)
    assert (same[..., 0] == one[..., 0]).all() and not same[..., 1].any()
    assert (draw_experts(kimi_plan, 8, 2, seed=3) != draw_experts(kimi_plan, 8, 2, seed=4)).any()


# -- events -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [1, 8])
def test_bytes_are_those_of_the_plan(plan, rows):
    (drawn,), (events,) = events_of(plan, rows)
    copied = Counter()
    for e in events:
        if isinstance(e, Fetch):
            copied[e.stream] += e.bytes
    assert copied["tape"] == plan.tape_rows * 512
    assert copied["experts"] == sum(int(n) for n, _ in drawn) * plan.experts[0].expert_bytes
    written = sum(e.bytes for e in events if isinstance(e, Fetch) and e.writes)
    whole = sum(e.bytes for e in events if isinstance(e, Fetch) and e.stream == "states")
    assert 0 <= written and whole == 2 * sum(e.bytes for e in events if isinstance(e, Fetch) and e.stream == "states" and e.writes)


def test_every_copy_is_waited_for_and_every_message(plan):
    _, (events,) = events_of(plan, 8)
    started = Counter(e.key for e in events if isinstance(e, (Fetch, Send)))
    waited = Counter(e.key for e in events if isinstance(e, (Await, Receive)))
    assert started == waited
    tape = [e.key[1] for e in events if isinstance(e, Await) and e.key[0] == "tape"]
    assert tape == list(range(plan.chunks))


def test_a_step_begins_with_its_embedding_rows_and_meets_its_peers_before_the_first_message(plan):
    """The ring's copies, behind which a token would queue, and the wait of the barrier come later."""
    _, [events] = events_of(plan, 1)
    fetches = [e for e in events if isinstance(e, Fetch)]
    assert [e.stream for e in fetches[:1 + plan.ring_depth]] == ["embedding", *["tape"] * plan.ring_depth]
    told, met = ([e.key for e in events if isinstance(e, kind)].index("barrier") for kind in (Send, Receive))
    assert (told, met) == (0, 0) and [e.key for e in events if isinstance(e, (Send, Receive))][:2] == ["barrier"] * 2
    assert events.index(fetches[plan.ring_depth]) < next(i for i, e in enumerate(events) if isinstance(e, Receive))


def test_regions_are_the_same_when_they_are_not_repeated(plan):
    """A layer that is replayed has the events of one that is walked."""
    drawn, _ = events_of(plan, 1)
    cost = profile.profile_plan(plan, 1)
    repeated, walked = Expansion(plan, 1, cost), Expansion(plan, 1, cost)

    class Forgets(dict):
        def __contains__(self, key):
            return False

    walked.recorded = Forgets()
    assert repeated.step(drawn[0].tolist()) == walked.step(drawn[0].tolist())


def test_a_longer_context_reads_more_tiles(kimi_plan):
    sizes = []
    for position in (0, 256, 257, 4095):
        _, (events,) = events_of(kimi_plan, 1, position)
        sizes.append(sum(isinstance(e, Fetch) and e.stream == "cache" and not e.writes for e in events))
    mla = sum(mixer == "mla" for mixer, _ in kimi_plan.graph.layers)
    assert sizes == [0, mla, 2 * mla, 16 * mla]             # the new token is in no tile that is read


def small_plan(batch: int, slots: int, first: int):
    """Two ranks that share all experts, of which a layer has none to eight."""
    made = spec(2, {"a": Gqa(2, 1, 32)}, {"f": Moe(8, 3, 64)}, "a*6", "f*6", hidden=512, expert_parallel=1, tensor_parallel=2, expert_batch=batch,
                expert_slots=slots, first_experts=first, formats={"experts": "mxfp4"}, ends={"vocab": 700})
    return make_plan(made, build_graph(made), load_target(made.build.chip))


@pytest.mark.parametrize("batch, slots, first", [(1, 3, 2), (2, 2, 1), (2, 3, 2), (4, 7, 3), (4, 5, 9)])
def test_copies_of_a_step_are_those_of_the_plan(monkeypatch, batch, slots, first):
    """In its order, with their bytes, and as many batches are computed: of layers with no expert, few and all of them."""
    def measured(job, asked) -> dict[str, Cycles]:
        runs = {a.key for a in asked if re.search(r"\n *run_experts?\(m, ", a.function)}
        return {key: replace(c, all=1e6) if key in runs else c for key, c in made_up(job, asked).items()}

    monkeypatch.setattr(profile, "measure", measured)
    plan, rows, counts = small_plan(batch, slots, first), 3, (5, 0, 8, 1, 4, 3)
    last = plan.spec.build.context - 1
    events = Expansion(plan, rows, profile.profile_plan(plan, rows)).step([(n, 0) for n in counts])
    scenario = Scenario("simulated", 0, rows, (last,) * rows, tokens(plan, 0, rows), counts)
    said = [c for c in PlanExpansion(Model(plan, rows, Text(plan), whole(plan)), scenario).expand() if isinstance(c, Copy)]
    copies = [e for e in events if isinstance(e, (Fetch, Await))]
    assert [isinstance(e, Fetch) for e in copies] == [c.starts for c in said]
    assert [e.bytes for e in copies if isinstance(e, Fetch)] == [c.source.bytes for c in said if c.starts]
    slots_of = [(isinstance(e, Fetch), e.key[1]) for e in copies if e.key[0] == "expert_copy"]
    assert slots_of == [(c.starts, c.semaphore.box) for c in said if c.semaphore.buffer == "expert_sem"] and len(slots_of) == 2 * sum(counts)
    computed = Counter(e.where.layer for e in events if isinstance(e, Work) and e.cycles == 1e6)
    assert [computed[n] for n in range(6)] == [-(-count // batch) for count in counts]


def test_too_few_experts_are_refused(qwen_plan):
    with pytest.raises(MkgenError, match="more layers route"):
        expand(qwen_plan, 1, cycles=profile.profile_plan(qwen_plan, 1), experts=[(3, 3)] * 7)


# -- predictions --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("rows", [1, 8])
def test_a_prediction_adds_up(plan, rows):
    found = predict(plan, rows, draws=100)
    step = found.predicted_ms * 1e3
    assert sum(found.budget.values()) == pytest.approx(step)
    assert sum(k.us for k in found.kinds) == pytest.approx(step)
    assert sum(k.work_us for k in found.kinds) == pytest.approx(found.budget["compute"])
    assert sum(found.waits.values()) == pytest.approx(sum(us for what, us in found.budget.items() if what.startswith("wait: ")))
    assert found.floor_ms * 1e-3 * plan.target.hbm_bytes_per_s >= figures(plan, rows)["true_bytes_per_step"]
    assert 0 < found.floor_ms <= found.predicted_ms and 0 < found.hbm_busy <= 1
    assert found.tokens_per_s == pytest.approx(rows / found.predicted_ms * 1e3)
    assert found.budget["dispatch"] == pytest.approx(plan.target.host_dispatch_s * 1e6)


@pytest.mark.parametrize("steps", [2, 16])
def test_a_call_of_several_steps_shares_its_dispatch(qwen_plan, steps):
    """All else is as in a call of one: barrier, priming, layers."""
    target = qwen_plan.target
    one, many = (predict(qwen_plan, 1, draws=50, steps_a_call=n) for n in (1, steps))
    rest = [{what: us for what, us in p.budget.items() if what not in ("dispatch", "loop")} for p in (one, many)]
    assert rest[0] == pytest.approx(rest[1]) and "loop" not in one.budget
    assert many.budget["dispatch"] == pytest.approx(target.host_dispatch_s / steps * 1e6)
    assert many.budget["loop"] == pytest.approx(target.loop_trip_s * 1e6)
    gain = target.host_dispatch_s * (1 - 1 / steps) - target.loop_trip_s
    assert one.predicted_ms - many.predicted_ms == pytest.approx(gain * 1e3) and gain > 0
    assert many.tokens_per_s == pytest.approx(1e3 / many.predicted_ms) and (one.steps_a_call, many.steps_a_call) == (1, steps)
    assert target.mark("loop_trip_s") == "assumed"


def test_more_steps_a_call_than_positions(qwen_plan):
    positions = qwen_plan.spec.build.context
    with pytest.raises(MkgenError, match=f"{positions + 1} steps a call; a row has {positions} positions"):
        predict(qwen_plan, 1, steps_a_call=positions + 1)


def test_faster_parts_make_no_slower_step(plan):
    _, (events,) = events_of(plan, 8)
    base = replay(events, plan.target).seconds
    assert replay(events, plan.target, hbm=1.3).seconds < base
    assert replay(events, plan.target, latency=0.5).seconds < base
    assert replay(events, plan.target, host_latency=2.0).seconds >= base
    quick = [Work(e.where, e.cycles / 2) if isinstance(e, Work) else e for e in events]
    assert replay(quick, plan.target).seconds < base


def test_sensitivity_has_signs(qwen_plan, monkeypatch):
    monkeypatch.setattr(predicting, "PROBES", 1)
    found = sensitivity(qwen_plan, 1)
    assert all(us < 0 for what, us in found.items() if "slot" not in what)
    assert isinstance(found["one more expert slot"], (float, str))


def test_a_slot_is_judged_beside_the_variant_alone(qwen_plan, monkeypatch):
    """What the variants together cost (here: as if they had made copies slower) is no gain of the slot."""
    monkeypatch.setattr(predicting, "PROBES", 1)
    assert len(qwen_plan.spec.build.rows) > 1
    build = replace(qwen_plan.spec.build, rows=(1,), ring_depth=8)
    alone = predicting.make_plan(replace(qwen_plan.spec, build=build), qwen_plan.graph, qwen_plan.target)
    together = replace(alone, spec=replace(alone.spec, build=replace(build, rows=(1, 8))), target=replace(alone.target, dma_latency_s=5e-6))
    real = predicting.make_plan
    monkeypatch.setattr(predicting, "make_plan", lambda spec, graph, target: real(spec, graph, alone.target))
    found, meant = (sensitivity(p, 1)["one more ring slot"] for p in (together, alone))
    assert found == pytest.approx(meant) and abs(predict(together, 1).predicted_ms - predict(alone, 1).predicted_ms) > 0.01


def test_more_slots_that_do_not_fit_say_so(qwen_plan, monkeypatch):
    def refuses(spec, graph, target):
        raise MkgenError(f"{spec.path}: needs more VMEM than there is\n  fix: less")

    monkeypatch.setattr(predicting, "make_plan", refuses)
    monkeypatch.setattr(predicting, "PROBES", 1)
    found = sensitivity(qwen_plan, 1)
    assert found["one more expert slot"] == found["one more ring slot"] == "needs more VMEM than there is"


def test_a_context_that_the_plan_has_not(qwen_plan):
    with pytest.raises(MkgenError, match="--set build.context=9999"):
        predict(qwen_plan, 1, context=9999)


def test_the_command():
    said = CliRunner().invoke(main, ["simulate", KIMI, "--rows", "1", "--at", "1152", "--host-latency", "1,2", "--draws", "90", "--no-sensitivity", "--json"])
    assert said.exit_code == 0, said.output
    found = json.loads(said.output)
    assert found["verdict"] == "pass" and found["predicted_ms"] > found["floor_ms"] > 0
    assert [p["host_latency"] for p in found["predictions"]] == [1, 2]
    assert found["predictions"][1]["predicted_ms"] > found["predicted_ms"]
    assert sum(found["budget"].values()) == pytest.approx(found["predicted_ms"] * 1e3)
    text = CliRunner().invoke(main, ["simulate", QWEN, "--rows", "1", "--draws", "40"]).output
    assert "what would change it" in text and "where the step goes" in text and "verdict of the checker: pass" in text
    assert found["steps_a_call"] == 1 and "loop" not in found["budget"] and "a call" not in text
    several = ["simulate", QWEN, "--rows", "1", "--draws", "40", "--no-sensitivity", "--steps", "16"]
    found = json.loads(CliRunner().invoke(main, [*several, "--json"]).output)
    assert found["steps_a_call"] == 16 and found["budget"]["loop"] > found["budget"]["dispatch"] > 0
    assert "16 steps a call" in " ".join(CliRunner().invoke(main, several).output.split())


def test_the_profile_command():
    found = json.loads(CliRunner().invoke(main, ["profile", QWEN, "--json"]).output)
    assert set(found["variants"]) == {"1", "8"}
    one = found["variants"]["1"]
    assert one["cycles"] == pytest.approx(sum(o["cycles"] * o["times"] for o in one["ops"]))
    assert {"attention", "moe", "begin", "end", "prologue"} == {o["region"] for o in one["ops"]}
