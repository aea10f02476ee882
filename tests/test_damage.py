"""The checker on thousands of damaged plans of random specs: none is accepted; and on sound ones: nothing is found."""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import replace

import damage
import pytest
import random_specs
from conftest import ROOT
from damage_batches import ALL
from small_specs import spec

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.spec.load import load_spec
from mkgen.spec.model import Gqa, Moe
from mkgen.targets import load_target

QUICK, MANY = range(10), range(1000, 1100)  # seeds of random specs
SOUND = range(2000, 2060)
MODELS = sorted(p.stem for p in (ROOT / "model_specs").glob("*.yaml"))


def accepted(seeds: range) -> tuple[Counter, list[str]]:
    """(instances of each kind, those in which the checker found nothing)."""
    made, missed = Counter(), []
    for seed, plan in random_specs.plans(seeds):
        for name, kind in damage.KINDS.items():
            damaged = kind(plan, random.Random(f"{seed} {name}"))
            if damaged is not None and damaged != plan:
                made[name] += 1
                if not check_plan(damaged):
                    missed.append(f"{name}, seed {seed}")
    return made, missed


def test_there_are_many_kinds_of_damage():
    assert len(damage.KINDS) >= 40


def test_no_damage_is_accepted():
    made, missed = accepted(QUICK)
    assert missed == [] and made.total() > 300, made


# experts a batch, slots, first ones, rows, of each row, ranks that share an expert: batches that are full and not, one and several
BATCHES = {
    "slots of one batch": (2, 2, 1, (3,), 3, 1),
    "most is ahead": (2, 3, 2, (1,), 3, 1),
    "slots no whole batches": (2, 5, 3, (4,), 3, 1),
    "all in one batch": (4, 4, 2, (2,), 2, 2),
    "one and eight rows": (4, 6, 5, (1, 8), 3, 2),
    "never full": (4, 5, 1, (1,), 3, 1),
    "more first than slots": (2, 2, 7, (8,), 1, 2),
    "no batches": (1, 3, 2, (2,), 3, 1),
    "no batches, first in routing": (1, 4, 3, (3,), 2, 2),
}


@pytest.mark.parametrize("case", BATCHES)
def test_no_damage_to_experts_is_accepted_anywhere(case):
    """Every place of a batch, every way of `damage_batches`."""
    batch, slots, first, rows, top_k, shares = BATCHES[case]
    build = {"expert_batch": batch, "expert_slots": slots, "first_experts": first, "rows": rows}
    made = spec(2, {"a": Gqa(2, 1, 32)}, {"f": Moe(16, top_k, 32)}, "a", "f", 128, expert_parallel=2 // shares, tensor_parallel=shares, **build)
    plan = make_plan(made, build_graph(made), load_target(made.build.chip))
    assert [str(f) for f in check_plan(plan)] == []
    found = {name: [bool(check_plan(damaged)) for damaged in damages(plan)] for name, damages in ALL.items()}
    assert {name: told.count(False) for name, told in found.items() if not all(told)} == {}
    assert sum(map(len, found.values())) > (30 if batch > 1 else 10)


def test_a_batch_that_has_more_experts_than_slots_is_found():
    """The spec's own check refuses it; here the plan is made without."""
    made = spec(2, {"a": Gqa(2, 1, 32)}, {"f": Moe(16, 3, 32)}, "a", "f", 128, expert_batch=4, expert_slots=4)
    made = replace(made, build=replace(made.build, expert_slots=3))
    found = check_plan(make_plan(made, build_graph(made), load_target(made.build.chip)))
    assert {"pairing", "flight", "data"} <= {f.rule for f in found}


@pytest.mark.slow
def test_no_damage_is_accepted_in_thousands():
    made, missed = accepted(MANY)
    assert missed == []
    assert made.total() > 3500 and all(made[name] >= 3 for name in damage.KINDS), made


def test_no_sound_plan_has_findings():
    plans = random_specs.plans(SOUND)
    began = time.process_time()
    found = {seed: [str(f) for f in check_plan(plan)] for seed, plan in plans}
    assert len(found) > 40 and {s: f for s, f in found.items() if f} == {}
    assert (time.process_time() - began) / len(found) < 0.2, (
        "a small plan is checked in well under 0.1 s on an idle machine"
    )


@pytest.mark.slow
def test_no_sound_plan_of_hundreds_has_findings():
    found = {seed: [str(f) for f in check_plan(plan)] for seed, plan in random_specs.plans(range(3000, 3400))}
    assert len(found) > 300 and {s: f for s, f in found.items() if f} == {}


@pytest.mark.parametrize("name", MODELS)
def test_no_model_has_findings(name):
    """At one and at eight rows, at full size."""
    spec = load_spec(ROOT / "model_specs" / f"{name}.yaml")
    spec = replace(spec, build=replace(spec.build, rows=(1, 8)))
    plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
    assert [str(f) for f in check_plan(plan)] == []
