"""What the proof decodes: tokens without a close call, where there are any."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_specs import spec

from mkgen.graph.build import build_graph
from mkgen.prove.random_params import RandomParams
from mkgen.prove.scenario import GAP_NOISE, GAP_NOISE_TWICE, gap_noise, run_reference
from mkgen.spec.model import Gqa, Moe


def routed(**build):
    return spec(2, {"a": Gqa(4, 4, 32)}, {"m": Moe(experts=16, top_k=4, width=48)}, "a*3", "m*3", 128, ends={"vocab": 301}, **build)


def test_rounding_twice_makes_a_call_close_sooner():
    build = routed().build
    assert gap_noise(replace(build, activations="bf16", wire="bf16")) == GAP_NOISE_TWICE > GAP_NOISE
    assert {gap_noise(replace(build, activations=a, wire=w)) for a, w in (("f32", "f32"), ("f32", "bf16"), ("bf16", "f32"))} == {GAP_NOISE}


@pytest.mark.parametrize("wire", ["f32", "bf16"])
def test_tokens_have_no_close_call(wire):
    """With tokens as they come, the closest call of three layers is closer than that."""
    made = routed(activations="bf16", wire=wire, rows=(1,))
    graph = build_graph(made)
    scenario = run_reference(graph, RandomParams(graph, 0, made), made, 2)
    assert min(s.gap.min() for s in scenario.steps) >= gap_noise(made.build)
    assert all(np.isfinite(s.gap).all() for s in scenario.steps)
