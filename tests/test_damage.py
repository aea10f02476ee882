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

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.spec.load import load_spec
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
