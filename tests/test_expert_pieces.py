"""Experts that are too large for a slot: fetched in pieces, each an expert of its own, whose outputs add up."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hubs import ROOT
from small_specs import prove_kernel, spec

from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.pack.coded import decode
from mkgen.pack.image import expert_image
from mkgen.pack.unpack import expert_from_images
from mkgen.plan.experts import plan_experts
from mkgen.plan.memory import expert_images
from mkgen.plan.planner import make_plan
from mkgen.prove.mini import mini_spec
from mkgen.prove.random_params import RandomParams
from mkgen.spec.load import load_spec
from mkgen.spec.model import Activation, Gqa, Moe, Norm, Router
from mkgen.targets import load_target

ATTENTION = {"attention": Gqa(heads=4, kv_heads=2, head_dim=32)}


def moe(width=208, **more):
    return Moe(experts=6, top_k=2, width=width, shared_width=24, activation=Activation("gelu_tanh"), **more)


def made(ranks=2, kib=80, **more):
    return spec(ranks, ATTENTION, {"moe": moe(208 * ranks, **more)}, "attention*2", "moe*2", hidden=96, expert_kib=kib, expert_parallel=1,
                tensor_parallel=ranks, expert_slots=2)


def test_the_number_of_pieces_fits_the_slot_and_pads_least():
    def image(width, kib, fmt="bf16", tp=1):
        return plan_experts("experts", "moe", fmt, 1, 4, 1, tp, 256, width, 256, ("g", "u", "d"), (), kib * 1024)

    assert image(1024, 2048).pieces == 1
    assert [(i.pieces, i.width) for i in (image(1024, 1024), image(1024, 256), image(896, 512), image(896, 512, tp=2))] == [
        (2, 512), (8, 128), (7, 128), (2, 224)]
    assert image(1024, 256, "mxfp4").width % 32 == 0
    for i in (image(1000, 300), image(1000, 300, "mxfp4", 2), image(1792, 640)):
        assert i.rows * 512 <= 640 * 1024 and i.pieces * i.tensor_parallel * i.width >= i.whole_width


@pytest.mark.parametrize("ranks, fmt", [(1, "bf16"), (2, "bf16"), (2, "mxfp4"), (2, "int4_g128_zero")])
def test_pieces_are_packed_and_unpacked(ranks, fmt):
    case = made(ranks, {"bf16": 80, "mxfp4": 32}.get(fmt, 40), bias=True)
    case = replace(case, build=replace(case.build, formats={"experts": fmt}))
    graph = build_graph(case)
    plan = make_plan(case, graph, load_target("tpu7x"))
    image, params = plan.experts[0], RandomParams(graph, 0, case)
    assert image.pieces > 1
    images = [expert_image(plan, image, rank, params) for rank in range(ranks)]
    for index, expert in ((0, 0), (1, 5)):
        matrices = expert_from_images(image, images, index, expert)
        for name, got in zip(image.weights, matrices, strict=True):
            wanted = params.expert(plan.weights[name], index, expert)
            assert np.array_equal(decode(got).T, wanted), name


def test_a_slot_that_holds_no_piece_is_refused():
    with pytest.raises(MkgenError, match="write build.expert_kib: "):
        expert_images(build_graph(made()), replace(made().build, expert_kib=20))


def test_a_norm_of_an_expert_in_pieces_is_refused():
    case = made(1, expert_norm=Norm())
    with pytest.raises(MkgenError, match="raise build.expert_kib"):
        make_plan(case, build_graph(case), load_target("tpu7x"))


def test_the_mini_of_a_spec_with_pieces_has_them():
    whole = load_spec(ROOT / "model_specs" / "qwen3_30b_a3b.yaml")
    for kib, cut in ((6144, False), (2048, True)):
        mini = mini_spec(replace(whole, build=replace(whole.build, expert_kib=kib)))
        assert any(i.pieces > 1 for i in expert_images(build_graph(mini), mini.build).values()) is cut


@pytest.mark.slow
@pytest.mark.parametrize("case", [
    lambda: made(1, bias=True),                                                            # biases of down are added once
    lambda: made(2, bias=True, router=Router("sigmoid", scale_input=True), expert_norm=Norm(weight="before")),
], ids=["one rank", "two ranks, whole outputs"])
def test_kernel_equals_reference(case):
    prove_kernel(case())
