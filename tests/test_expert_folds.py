"""Expert matrices whose columns do not fill their panels: parts of K lie side by side instead of padding."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from small_specs import prove_kernel, spec

from mkgen.graph.build import build_graph
from mkgen.pack.coded import decode
from mkgen.pack.image import expert_image
from mkgen.pack.unpack import expert_from_images
from mkgen.plan.experts import folds, plan_experts
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
