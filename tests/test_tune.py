"""The search for a better build, on a small spec with made-up cycles: it is the way of the search that is tested, not the chip."""
from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import yaml
from click.testing import CliRunner

import mkgen.profile as profile
from conftest import ROOT
from mkgen.check.findings import Finding
from mkgen.cli import main
from mkgen.graph.build import build_graph
from mkgen.plan.layout import layout_hash
from mkgen.plan.planner import DoesNotFit, make_plan
from mkgen.profile.scoreboard import Cycles
from mkgen.simulate.predict import predict
from mkgen.spec.load import load_spec
from mkgen.targets import load_target
from mkgen.tune import run as running
from mkgen.tune import space
from mkgen.tune import trial as trials
from mkgen.tune.decisions import decide
from mkgen.tune.run import run
from mkgen.tune.search import GAIN, descend, search, simplified
from mkgen.tune.space import dimensions
from mkgen.tune.trial import Bench, Clock

KNOBS = {"rows", "ring_depth", "expert_slots", "expert split", "reduce moe.routed", "kv_slots"}
ROLES = ("q", "k", "v", "o", "q_norm", "k_norm")
SMALL = {
    "model": {
        "name": "small", "hidden": 256, "vocab": 512, "layers": 2, "mixer": "attention*2", "ffn": "moe*2",
        "mixers": {"attention": {"kind": "gqa", "heads": 8, "kv_heads": 4, "head_dim": 64, "rope": {"base": 10000.0}, "qk_norm": {"eps": 1e-6}}},
        "ffns": {"moe": {"kind": "moe", "experts": 16, "top_k": 4, "width": 4096}},
        "checkpoint": {"embed": "embed", "head": "head", "norm": "norm", "mixer.norm": "m.{layer}", "ffn.norm": "f.{layer}", "moe.router": "r.{layer}",
                       **{f"attention.{r}": r + ".{layer}" for r in ROLES},
                       **{f"moe.expert_{r}": r + ".{layer}.{expert}" for r in ("gate", "up", "down")}},
    },
    "build": {"chip": "tpu7x", "mesh": {"chip": 2, "core": 2}, "expert_parallel": 4, "tensor_parallel": 1, "block_kib": 64, "rows": [1, 8],
              "context": 256, "kv_tile": 64, "ring_depth": 3, "expert_slots": 2},
}


def made_up(job, asked) -> dict[str, Cycles]:
    """Cycles that depend on the piece alone; the loops that the compiler would find."""
    def loops(a) -> tuple[float, ...]:
        lists = a.function.count("list_kv_items(") * job.rows
        return (10.0,) * lists or (200.0,) * ("lambda i, _: take_expert" in a.function)

    return {a.key: Cycles(100.0 + len(a.function), 50.0, loops(a)) for a in asked}


@pytest.fixture(autouse=True)
def cycles(monkeypatch):
    monkeypatch.setattr(profile, "measure", made_up)


@pytest.fixture
def few(monkeypatch):
    """Few values of each knob: the way is the same, and shorter."""
    for name, values in {"DEPTHS": (0.7, 2), "SLOTS": (2, 4), "SIZES": (0.5,), "TILES": (64, 128), "KV_SLOTS": (4, 8)}.items():
        monkeypatch.setattr(space, name, values)
    monkeypatch.setattr(running, "dimensions", lambda *a: [d for d in dimensions(*a) if d.name in KNOBS])


@pytest.fixture
def path(tmp_path):
    file = tmp_path / "small.yaml"
    file.write_text(yaml.safe_dump(SMALL, sort_keys=False))
    return file


@pytest.fixture
def spec(path):
    return load_spec(path)


def bench_of(spec, rows=(1,), seconds=1000.0, **more) -> Bench:
    return Bench(spec, rows, Clock(seconds), **more)


def dims_of(spec, bench, rows=(1,), allow=()):
    return running.dimensions(spec.model, spec.build, bench.plan(spec.build), rows, allow)


def named(dims, name):
    return next(d for d in dims if d.name == name)


def planned(spec):
    return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


# -- the space ----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["kimi_k3", "qwen3_30b_a3b", "qwen3_8b"])
def test_a_dimension_writes_what_it_reads(name):
    whole = load_spec(ROOT / "model_specs" / f"{name}.yaml")
    for d in dimensions(whole.model, whole.build, planned(whole), (1,), ("activations", "wire")):
        assert d.of(d.to(whole.build, d.of(whole.build))) == d.of(whole.build)
        for value, build in d.neighbours(whole.build):
            assert d.of(build) == value != d.of(whole.build)
            same = {k for k, v in vars(build).items() if v == getattr(whole.build, k)}
            assert same | set(d.keys) == set(vars(build)), f"{d.name} writes more than {d.keys}"
            back = d.to(build, d.of(whole.build))
            follows = {"block_kib": "ring_depth", "expert_batch": "expert_slots", "kv_batch": "kv_slots"}.get(d.name)         # to what the value needs, one way
            assert all(getattr(back, k) == getattr(whole.build, k) for k in d.keys if k != follows)


def test_numerics_are_searched_only_if_they_are_allowed(spec):
    bench = bench_of(spec)
    names = {d.name for d in dims_of(spec, bench)}
    assert names >= {"rows", "ring_depth", "expert_slots", "expert split", "hold moe.router", "reduce moe.routed", "gather", "block_kib", "kv_tile"}
    assert not any(key in ("activations", "wire", "formats") for d in dims_of(spec, bench) for key in d.keys)
    assert {d.name for d in dims_of(spec, bench, allow=("activations", "wire"))} == names | {"activations", "wire"}


def written(path, moe=None, **build):
    """The small spec with narrow experts, read from a file; moe: more keys of its ffn."""
    model = {**SMALL["model"], "ffns": {"moe": {**SMALL["model"]["ffns"]["moe"], "width": 256, **(moe or {})}}}
    if "expert_norm" in (moe or {}):
        model["checkpoint"] = {**model["checkpoint"], "moe.expert_norm": "n.{layer}"}
    path.write_text(yaml.safe_dump({"model": model, "build": {**SMALL["build"], **build}}, sort_keys=False))
    return load_spec(path)


def test_a_narrow_split_comes_with_a_batch(path, spec):
    """Where a rank's share is no whole panel: as many together as the MXU is wide, in slots of as many bytes."""
    def of(made):
        return named(dims_of(made, bench_of(made)), "expert split")

    assert of(spec).values == ((1, 4, 1), (2, 2, 1), (4, 1, 1)), "1024 columns are eight panels"
    narrow = written(path)
    d = of(narrow)
    assert d.values == ((1, 4, 1), (1, 4, 4), (2, 2, 1), (4, 1, 1)) and d.text((1, 4, 4)) == "1 x 4, 4 multiplied together"
    tried = d.to(narrow.build, (1, 4, 4))
    assert (tried.expert_batch, tried.expert_slots) == (4, 8) and d.to(tried, (4, 1, 1)).expert_slots == narrow.build.expert_slots
    bench = bench_of(narrow)
    trial = bench.try_one(tried)
    assert trial.good and trial.plan != bench.try_one(d.to(narrow.build, (1, 4, 1))).plan and bench.plan(tried).spec.build == trial.build
    kept = of(written(path, expert_batch=2))
    assert kept.values == ((1, 4, 2), (1, 4, 4), (2, 2, 2), (2, 2, 1), (4, 1, 2), (4, 1, 1)), "the spec's own, and what the share asks for"
    assert of(written(path, {"width": 224})).values[1] == (1, 4, 8), "of 56 columns it takes five"


def test_batches_come_with_slots(path):
    narrow = written(path)
    bench = bench_of(narrow)
    dims = dims_of(narrow, bench)
    d = named(dims, "expert_batch")
    assert [(b.expert_batch, b.expert_slots) for _, b in d.neighbours(narrow.build)] == [(2, 4), (4, 8), (8, 16)]
    assert all(bench.try_one(b).good for _, b in d.neighbours(narrow.build)) and named(dims, "first_experts").values == (1, 2, 3, 4, 6, 8)
    assert "more than expert_slots 2" in bench.try_one(replace(narrow.build, expert_batch=4)).refused


@pytest.mark.parametrize("moe", [{"router": {"scale_input": True}}, {"expert_norm": {}}])
def test_no_batches_where_experts_run_one_by_one(path, moe):
    one = written(path, moe)
    bench = bench_of(one)
    dims = dims_of(one, bench)
    assert "expert_batch" not in {d.name for d in dims} and all(batch == 1 for *_, batch in named(dims, "expert split").values)
    assert "build.expert_batch is 2" in bench.try_one(replace(one.build, expert_batch=2)).refused


def test_pieces_refuse_a_batch_and_a_larger_slot_does_not(path):
    cut = written(path, expert_kib=200)
    bench = bench_of(cut)
    assert bench.plan(cut.build).experts[0].pieces > 1 and "expert_batch" in {d.name for d in dims_of(cut, bench)}
    both = replace(cut.build, expert_batch=2)
    assert "pieces" in bench.try_one(both).refused and bench.try_one(replace(both, expert_kib=6144)).good


# -- trials -------------------------------------------------------------------------------------------------------------

def test_what_does_not_fit_gets_a_shorter_ring(qwen_plan):
    whole = qwen_plan.spec
    bench = bench_of(whole)
    with pytest.raises(DoesNotFit):
        planned(replace(whole, build=replace(whole.build, expert_slots=10)))
    plan = bench.plan(replace(whole.build, expert_slots=10))
    assert plan.spec.build.expert_slots == 10 and 4 <= plan.ring_depth < whole.build.ring_depth
    assert sum(plan.vmem(8).values()) <= plan.target.vmem_usable_bytes - whole.build.spill_kib * 1024
    assert "does not fit" in bench.try_one(replace(whole.build, expert_slots=40)).refused
    assert bench.refusals.total() == 1


def test_a_trial_is_the_prediction_of_its_plan(spec):
    bench = bench_of(spec, (1, 8))
    build = replace(spec.build, expert_parallel=1, tensor_parallel=4)
    tried = bench.try_one(build)
    plan = planned(replace(spec, build=build))
    assert tried.ms == {r: predict(plan, r, draws=1).predicted_ms for r in (1, 8)} and tried.layout == layout_hash(plan)
    assert bench.score(tried) == pytest.approx(sum(math.log(tried.ms[r] / bench.base.ms[r]) for r in (1, 8)) / 2)


def test_two_ways_to_write_a_plan_are_predicted_once(spec):
    bench = bench_of(spec)
    way = dict(bench.plan(spec.build).ways)["moe.routed"]
    before = bench.predicted
    same = bench.try_one(replace(spec.build, reduce={"moe.routed": way}))
    assert bench.predicted == before and same.ms == bench.base.ms
    way_of = named(dims_of(spec, bench), "reduce moe.routed")
    (made,) = decide(bench, [way_of], bench.base)
    assert not made.changed and made.alternative not in ("auto", way) and made.costs[1] != 0


def test_only_what_the_spec_could_say(spec):
    bench = bench_of(spec)
    for build in (replace(spec.build, expert_parallel=3), replace(spec.build, kv_tile=48), replace(spec.build, gather="host")):
        assert bench.try_one(build).refused
    assert bench.refusals.total() == 3


# -- the search ---------------------------------------------------------------------------------------------------------

def test_one_dimension_alone_is_searched_whole(spec):
    bench = bench_of(spec)
    d = named(dims_of(spec, bench), "expert split")
    best, ended = descend(bench, [d], bench.base, 1.0)
    every = [bench.try_one(d.to(spec.build, value)) for value in d.values]
    assert ended and bench.score(best) == min(bench.score(t) for t in every) < -GAIN


def test_the_end_of_a_descent_has_no_better_neighbour(spec, few):
    bench = bench_of(spec)
    dims = dims_of(spec, bench)
    best, ended = descend(bench, dims, bench.base, 1.0)
    assert ended and bench.score(best) < -GAIN
    for d in dims:
        for _, build in d.neighbours(best.build):
            assert bench.score(bench.try_one(build)) >= bench.score(best) - GAIN


def test_a_refused_candidate_is_never_chosen(spec, few, monkeypatch):
    free = bench_of(spec)
    first = search(free, dims_of(spec, free), restarts=0).best
    split = named(dims_of(spec, free), "expert split").of
    assert split(first.build) != split(spec.build)
    real = trials.check_plan

    def severe(plan, rows=None):
        bad = split(plan.spec.build) != split(spec.build)
        return [Finding("flight", "moe", "a copy", "made up")] if bad else real(plan, rows)

    monkeypatch.setattr(trials, "check_plan", severe)
    bench = bench_of(spec)
    found = search(bench, dims_of(spec, bench), restarts=1).best
    assert split(found.build) == split(spec.build) and bench.refusals["the checker: flight"] >= 2
    assert all(bench.score(t) == math.inf for t in bench.known.values() if split(t.build) != split(spec.build))


def test_a_change_that_hurts_is_taken_back(spec, few):
    bench = bench_of(spec)
    dims = dims_of(spec, bench)
    good = replace(spec.build, expert_parallel=1, tensor_parallel=4)
    worse = bench.try_one(replace(good, kv_slots=32, reduce={"embedded": "core chip"}, gather="core chip"))
    best = simplified(bench, dims, worse)
    assert best.build.tensor_parallel == 4 and bench.score(best) <= bench.score(worse)
    for d in decide(bench, dims, best):
        assert not d.changed or d.gained is None or sum(d.gained.values()) > 0, d


def test_a_better_alternative_is_taken_in_the_end(spec, few):
    bench = bench_of(spec)
    dims = [named(dims_of(spec, bench), "expert split")]
    best, (made,) = running.settled(bench, dims, bench.base)
    assert made.changed and made.gained[1] > 0 and best.build.tensor_parallel != spec.build.tensor_parallel
    assert bench.score(best) == min(map(bench.score, bench.known.values()))


def test_the_same_seed_gives_the_same_result(spec, few):
    one, two = (run(spec, (1,), seconds=1000, seed=3, restarts=1) for _ in range(2))
    assert one.overlay == two.overlay and one.decisions == two.decisions and one.tried == two.tried and one.refusals == two.refusals
    assert one.converged and one.verdict == "pass" and all(one.best.ms[r] < one.base.ms[r] for r in (1,))


def test_the_time_limit(spec):
    """Each look at this clock takes a second; a candidate is begun only after a look."""
    ticks = iter(range(10_000))
    bench = Bench(spec, (1,), Clock(20, now=lambda: next(ticks)))
    found = search(bench, dims_of(spec, bench))
    decide(bench, dims_of(spec, bench), found.best)
    assert not found.converged and 2 <= len(bench.known) <= 21


def test_a_layout_that_is_kept(spec, few):
    result = run(spec, (1,), seconds=1000, restarts=0, free=False)
    kept = load_spec(spec.path).build
    assert not result.repack and result.best.layout == result.base.layout and result.best.build.tensor_parallel == kept.tensor_parallel
    assert any("--no-layout" in why for why in result.refusals) and "serve" in result.overlay
    assert run(spec, (1,), seconds=1000, restarts=0).repack


# -- the command --------------------------------------------------------------------------------------------------------

def test_the_overlay_is_one_that_build_takes(few, path, tmp_path):
    out = tmp_path / "made" / "overlay.yaml"
    told = CliRunner().invoke(main, ["tune", str(path), "--rows", "1", "--restarts", "0", "-o", str(out), "--json"])
    assert told.exit_code == 0, told.output
    said = json.loads(told.output)
    assert said["verdict"] == "pass" and said["predicted_ms"]["1"] < said["own_ms"]["1"] and said["repack"]
    tuned = load_spec(path, overlays=[out])
    plan = planned(tuned)
    assert predict(plan, 1).predicted_ms == said["predicted_ms"]["1"]
    written = yaml.safe_load(out.read_text())["build"]
    assert written == said["build"] and written["tensor_parallel"] == tuned.build.tensor_parallel
    text = out.read_text()
    for d in said["decisions"]:
        assert f"# {d['name']}: {d['chosen']}" in text
        if d["changed"]:
            assert d["gained"] is None or d["gained"]["1"] > 0
    built = CliRunner().invoke(main, ["build", str(path), "--overlay", str(out), "-o", str(tmp_path / "module"), "--json"])
    assert built.exit_code == 0 and (tmp_path / "module" / "kernel.py").exists()


def test_no_time_at_all_gives_the_spec_as_it_is(few, path):
    told = CliRunner().invoke(main, ["tune", str(path), "--seconds", "0.001"])
    assert told.exit_code == 0, told.output
    assert "build: {}" in told.output and "verdict of the checker: pass" in told.output and "the time ended the search" in told.output


def test_words_that_are_refused(path):
    for words in (["--weights", "2=1"], ["--weights", "1=0"], ["--weights", "x"], ["--allow", "formats"], ["--seconds", "0"]):
        assert CliRunner().invoke(main, ["tune", str(path), *words]).exit_code == 2
