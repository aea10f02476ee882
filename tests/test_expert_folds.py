"""Expert matrices whose columns do not fill their panels: parts of K, and gate and up, lie side by side instead of padding."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_specs import prove_kernel, spec

from mkgen.graph.build import build_graph
from mkgen.pack.coded import decode
from mkgen.pack.image import expert_image
from mkgen.pack.unpack import expert_from_images
from mkgen.plan.experts import folds, joins, plan_experts
from mkgen.plan.layout import layout_facts, layout_hash
from mkgen.plan.planner import make_plan
from mkgen.prove.random_params import RandomParams
from mkgen.spec.model import Activation, Gqa, Moe
from mkgen.targets import load_target

ATTENTION = {"attention": Gqa(heads=4, kv_heads=2, head_dim=32)}


def made(width: int, hidden: int, ranks: int = 1, moe: dict | None = None, **build):
    kind = Moe(experts=6, top_k=2, width=width, shared_width=24, **(moe or {}))
    return spec(ranks, ATTENTION, {"moe": kind}, "attention*2", "moe*2", hidden=hidden,
                **({"expert_parallel": 1, "tensor_parallel": ranks, "block_kib": 256} | build))


def planned(case):
    return make_plan(case, build_graph(case), load_target("tpu7x"))


@pytest.mark.parametrize("fmt, k, width, parts", [
    ("bf16", 2048, 96, 4), ("bf16", 2048, 64, 2), ("bf16", 2048, 160, 4), ("bf16", 2048, 192, 2),
    ("bf16", 2048, 128, 1),                    # nothing to fill
    ("bf16", 2048, 48, 1),                     # eight parts would be too many rows
    ("bf16", 384, 96, 1),                      # a quarter of K is no whole panel of the left operand
    ("mxfp4", 2048, 96, 1), ("int8", 2048, 96, 1)])
def test_parts_fill_whole_panels_or_there_are_none(fmt, k, width, parts):
    assert folds(fmt, k, width) == parts


@pytest.mark.parametrize("width, parts", [(96, 4), (64, 2)])
def test_no_byte_is_padding(width, parts):
    image = plan_experts("experts", "moe", "bf16", 1, 4, 1, 8, 2048, 8 * width, 2048, ("g", "u", "d"), ())
    assert image.fold == parts and image.expert_bytes == image.true_bytes == 3 * 2048 * width * 2
    biased = plan_experts("experts", "moe", "bf16", 1, 4, 1, 8, 2048, 8 * width, 2048, ("g", "u", "d"), ("a", "b", "c"))
    assert biased.fold == 1


def test_a_layout_without_parts_keeps_its_hash():
    plan = planned(made(128, 256))
    assert "fold" not in layout_facts(plan)["experts"][0] and layout_facts(planned(made(64, 256)))["experts"][0]["fold"] == 2
    assert layout_hash(plan) != layout_hash(planned(made(64, 256)))


@pytest.mark.parametrize("width, hidden, ranks, kib", [(96, 512, 1, 6144), (320, 512, 2, 6144), (383, 512, 2, 6144), (384, 512, 1, 300)])
def test_parts_are_packed_and_unpacked(width, hidden, ranks, kib):
    """Also where the last rank's columns are fewer, and where experts are fetched in pieces."""
    case = made(width, hidden, ranks, expert_kib=kib)
    plan = planned(case)
    image, params = plan.experts[0], RandomParams(plan.graph, 0, case)
    assert image.fold > 1 and (image.pieces > 1) is (kib < 1024)
    images = [expert_image(plan, image, rank, params) for rank in range(ranks)]
    for index, expert in ((0, 0), (1, 5)):
        matrices = expert_from_images(image, images, index, expert)
        for name, got in zip(image.weights, matrices, strict=True):
            assert np.array_equal(decode(got).T, params.expert(plan.weights[name], index, expert)), name


def test_the_kernel_gives_the_references_numbers():
    case = made(192, 512, 2)
    assert planned(case).experts[0].fold == 4
    prove_kernel(case)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"moe": {"activation": Activation("relu2"), "gated": False}}, {"activations": "f32"}, {"expert_kib": 160}])
def test_other_kernels_too(how):
    case = made(192, 256, 1, **how)
    image = planned(case).experts[0]
    assert image.fold == 2 and (image.pieces > 1) is ("expert_kib" in how)
    prove_kernel(case)


# -- with scales of groups: gate and up share panels ---------------------------------------------------------------------

@pytest.mark.parametrize("fmt, k, width, matrices, parts", [
    ("mxfp4", 3584, 96, 2, 2), ("nvfp4", 512, 96, 2, 2), ("int4_g32", 512, 160, 2, 2), ("mxfp4", 1024, 32, 2, 2), ("nvfp4", 1024, 16, 2, 4),
    ("mxfp4", 360, 64, 2, 1),                  # 128 columns together, of any K
    ("mxfp4", 1024, 96, 1, 4), ("mxfp4", 512, 64, 1, 2),           # experts that are not gated
    ("mxfp4", 2048, 128, 2, 0),                # nothing to fill
    ("mxfp4", 768, 96, 2, 0),                  # half of K is no whole dot
    ("int4_g32_zero", 3584, 96, 2, 0), ("int8", 3584, 96, 2, 0), ("bf16", 3584, 96, 2, 0)])
def test_gate_and_up_fill_whole_panels_or_lie_apart(fmt, k, width, matrices, parts):
    assert joins(fmt, k, width, matrices) == parts


@pytest.mark.parametrize("fmt, gated, width, k", [("mxfp4", True, 96, 3584), ("nvfp4", True, 64, 2048), ("mxfp4", False, 96, 1024)])
def test_no_column_is_padding_where_they_share_panels(fmt, gated, width, k):
    weights = ("g", "u", "d") if gated else ("u", "d")
    image = plan_experts("experts", "moe", fmt, 1, 4, 1, 8, k, 8 * width, k, weights)
    assert image.joint and image.up.panels * 128 == image.fold * (2 if gated else 1) * width and image.up.k * image.fold == k
    assert image.expert_bytes < 1.06 * image.true_bytes, "but for whole tiles, and a row of scales of the tensor for each panel"
    assert not plan_experts("experts", "moe", fmt, 1, 4, 1, 8, k, 8 * width, k, weights, tuple("abc")[:len(weights)]).joint, "biases"


@pytest.mark.parametrize("fmt, gated, width, hidden, ranks, kib", [
    ("mxfp4", True, 96, 512, 1, 6144), ("mxfp4", True, 161, 1024, 2, 6144), ("nvfp4", True, 64, 200, 1, 6144), ("nvfp4", True, 80, 1024, 1, 6144),
    ("int4_g32", False, 192, 1024, 2, 6144), ("mxfp4", True, 192, 512, 1, 90)])
def test_shared_panels_are_packed_and_unpacked(fmt, gated, width, hidden, ranks, kib):
    case = made(width, hidden, ranks, {"gated": gated}, expert_kib=kib, formats={"experts": fmt})
    plan = planned(case)
    image, params = plan.experts[0], RandomParams(plan.graph, 0, case)
    assert image.joint and (image.pieces > 1) is (kib < 1024) and len(image.weights) == 2 + gated
    images = [expert_image(plan, image, rank, params) for rank in range(ranks)]
    for index, expert in ((0, 0), (1, 5)):
        matrices = expert_from_images(image, images, index, expert)
        for name, got in zip(image.weights, matrices, strict=True):
            assert np.array_equal(decode(got).T, params.expert(plan.weights[name], index, expert)), name


NARROW = {  # what is multiplied, its format, and how many together
    "halves of K, one by one": (192, 1024, 2, {}, {"experts": "mxfp4"}, {}),
    "halves of K, in batches": (192, 1024, 2, {}, {"experts": "mxfp4"}, {"expert_batch": 2, "expert_slots": 3}),
    "more than a batch has": (96, 512, 1, {}, {"experts": "mxfp4"}, {"expert_batch": 3, "expert_slots": 3, "first_experts": 1, "activations": "f32"}),
    "gate beside up": (64, 200, 1, {}, {"experts": "nvfp4"}, {"expert_batch": 2, "expert_slots": 4}),
    "not gated": (96, 1024, 1, {"gated": False, "activation": Activation("relu2")}, {"experts": "int4_g32"}, {"expert_batch": 2, "expert_slots": 4}),
    "in pieces": (192, 512, 1, {}, {"experts": "mxfp4"}, {"expert_kib": 90}),
    "batches of bf16": (96, 512, 1, {}, {}, {"expert_batch": 2, "expert_slots": 4}),
    "batches of whole panels": (128, 256, 1, {}, {"experts": "int4_g32_zero"}, {"expert_batch": 4, "expert_slots": 4}),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "gate beside up" else pytest.mark.slow) for n in NARROW])
def test_narrow_experts_give_the_references_numbers(name):
    width, hidden, ranks, moe, formats, build = NARROW[name]
    case = made(width, hidden, ranks, moe, formats=formats, **build)
    image, = planned(case).experts
    assert image.joint == (name not in ("batches of bf16", "batches of whole panels")) and (image.pieces > 1) == (name == "in pieces")
    prove_kernel(case)
