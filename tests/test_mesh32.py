"""One step of a mini of the largest spec on as many virtual devices as it has ranks."""
from __future__ import annotations

from pathlib import Path

import pytest

from mkgen.prove.verify import verdict, verify_whole_mesh
from mkgen.spec.load import load_spec

STAGED = ("build.gather=staged", "build.scatter=staged")     # 7 messages an exchange and rank: each takes the interpreter 2 ms

SPECS = Path(__file__).resolve().parents[1] / "model_specs"


@pytest.mark.slow
@pytest.mark.devices32
def test_one_step_on_the_whole_mesh():
    """Every exchange over host x chip x core at 32 ranks, experts 16 x 2, against the reference, races on."""
    rungs = verify_whole_mesh(load_spec(SPECS / "kimi_k3.yaml", sets=["build.rows=[2]", *STAGED]))
    assert verdict(rungs) == "pass", "\n".join(str(r) for r in rungs if r.verdict == "fail")
    assert any("logits" in r.compared for r in rungs)
