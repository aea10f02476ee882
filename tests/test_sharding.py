"""Shares of ranks: any number of heads, experts, columns and words of the vocabulary on any number of ranks."""
from __future__ import annotations

import numpy as np
import pytest

from mkgen.graph.build import build_graph
from mkgen.pack.image import expert_image, tape_image
from mkgen.pack.places import TapePlaces
from mkgen.pack.coded import decode
from mkgen.pack.unpack import expert_from_images, weight_from_tapes
from mkgen.plan.padding import paddings
from mkgen.plan.planner import make_plan
from mkgen.plan.shard import local_units, sharers, unit_range
from mkgen.prove.mini import few_heads
from mkgen.prove.random_params import RandomParams
from mkgen.spec.model import Conv, Decay, Gate, Gqa, Linear, LinearGate, LinearNorm, Mla, Mlp, Moe, QkNorm, Rope, Router
from mkgen.targets import load_target
from small_specs import prove_kernel, spec

FOUR = {"chip": 2, "core": 2}
ONE_HEAD = {"a": Gqa(heads=1, kv_heads=1, head_dim=24, rope=Rope(1e4))}
EXPERTS = {
    # 4 + 3 experts, their 45 columns as 23 + 22; one head on four ranks
    "bf16": lambda: spec(4, ONE_HEAD, {"moe": Moe(7, 3, 45, shared_width=50, router=Router("sigmoid", bias=True, scale=1.5))},
                         "a*2", "moe*2", hidden=200, mesh=FOUR, expert_parallel=2, tensor_parallel=2),
    # 72 columns in groups of 32 over four ranks: 32, 32, 8 and none; an input of one group and a quarter
    "mxfp4": lambda: spec(4, ONE_HEAD, {"moe": Moe(3, 2, 72, latent=40)}, "a*2", "moe*2", hidden=200, mesh=FOUR,
                          expert_parallel=1, tensor_parallel=4, formats={"experts": "mxfp4"}, activations="f32"),
}
EVERY = [(g * each, g, ranks) for g in (*range(1, 13), 16, 33, 40) for each in (1, 2, 3, 5) for ranks in range(1, 33)]


def held(units: int, ranks: int, groups: int, once: bool) -> list[range]:
    return [range(*unit_range(units, ranks, rank, groups, once)) for rank in range(ranks)]


@pytest.mark.parametrize("once", (True, False))
def test_every_unit_has_a_rank_and_no_rank_mixes_groups_that_others_share(once):
    for units, groups, ranks in EVERY:
        each, local = units // groups, local_units(units, ranks, groups)
        shares = held(units, ranks, groups, once)
        owners = [sum(u in share for share in shares) for u in range(units)]
        repeated = each == 1 and not once and groups < ranks
        assert owners == [sharers(ranks, groups) if repeated else 1] * units, (units, groups, ranks)
        assert max(map(len, shares)) == local and len(shares[0]) == local
        for rank, share in enumerate(shares):
            keys = {u // each for u in share}
            mine = set(range(*unit_range(groups, ranks, rank, groups)))      # the key heads that this rank keeps
            assert keys <= mine, "a query head reads a key head of another rank"
            assert len(share) % each == 0 or len(mine) == 1                  # whole groups, or a part of one


@pytest.mark.parametrize("heads, kv_heads, ranks, query, key", [
    (9, 3, 2, 6, 2), (9, 3, 4, 3, 1), (9, 3, 8, 2, 1), (40, 8, 16, 3, 1), (12, 12, 8, 2, 2), (6, 6, 4, 2, 2),
    (48, 16, 8, 6, 2), (48, 16, 32, 2, 1), (64, 8, 32, 2, 1), (1, 1, 32, 1, 1), (32, 4, 8, 4, 1)])
def test_heads_of_a_rank(heads, kv_heads, ranks, query, key):
    assert (local_units(heads, ranks, kv_heads), local_units(kv_heads, ranks, kv_heads)) == (query, key)


def full(heads: int, kv_heads: int, ranks: int) -> bool:
    return ranks * local_units(heads, ranks, kv_heads) == heads


def test_a_mini_keeps_what_does_not_divide():
    for heads, kv_heads, ranks in EVERY:
        for few in {min(ranks, 2), min(ranks, 4), ranks} if ranks > 1 else {1}:
            made = few_heads(heads, kv_heads, ranks, few, 2, 2)
            assert made[0] % made[1] == 0 and made[0] > 0
            assert full(*made, few) == full(heads, kv_heads, ranks), (heads, kv_heads, ranks, few, made)


@pytest.mark.slow
def test_kernel_of_heads_and_columns_that_do_not_divide():
    """On four ranks: one without any head, one with fewer query heads than its neighbour, one without any column."""
    prove_kernel(spec(4, {
        "idle": Gqa(heads=9, kv_heads=3, head_dim=24, rope=Rope(1e4), qk_norm=QkNorm(), gate=Gate()),
        "uneven": Gqa(heads=10, kv_heads=2, head_dim=24, rope=Rope(1e4, 16)),
        "latent": Mla(heads=6, q_rank=40, kv_rank=24, nope_dim=20, rope_dim=12, v_dim=24, gate=Gate()),
        "recurrent": Linear(heads=6, key_heads=2, key_dim=24, value_dim=16, conv=Conv(3), decay=Decay("floor", "channel", 20, -4.0),
                            norm=LinearNorm(), gate=LinearGate("sigmoid"))},
        {"dense": Mlp(width=50), "tiny": Mlp(width=3)}, "idle uneven latent recurrent", "dense*3 tiny", hidden=200,
        mesh=FOUR))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERTS)
def test_kernel_of_experts_that_do_not_divide(name):
    prove_kernel(EXPERTS[name]())


@pytest.mark.parametrize("name", EXPERTS)
def test_packed_shares_hold_every_true_weight_and_nothing_else(name):
    made = EXPERTS[name]()
    graph = build_graph(made)
    plan, params = make_plan(made, graph, load_target("tpu7x")), RandomParams(graph, 3, made)
    places, tapes = TapePlaces(plan), [tape_image(plan, rank, params) for rank in range(4)]
    for layer, family in places.homes:
        want = params.weight(plan.weights[family], layer or 0)
        assert np.array_equal(weight_from_tapes(places, tapes, layer, family).astype(np.float32), want), family
    images = [expert_image(plan, plan.experts[0], rank, params) for rank in range(4)]
    codes = 0
    for e in range(plan.experts[0].experts):
        for which, (family, got) in enumerate(zip(plan.experts[0].weights, expert_from_images(plan.experts[0], images, 1, e))):
            if name == "mxfp4":
                want = params.expert_coded(plan.weights[family], 1, e)
                assert np.array_equal(got.codes, want.codes) and np.array_equal(got.scales, want.scales), (family, e, which)
            assert np.array_equal(decode(got).T, params.expert(plan.weights[family], 1, e)), (family, e, which)
            codes += np.count_nonzero(got.codes)
    if name == "bf16":                       # two values a word: everything else in the images is zero
        held = sum(np.count_nonzero(image.view(np.uint16)[image.shape[0] // 2:]) for image in images)
        assert held == codes


def test_waste_is_shown_by_family():
    made = EXPERTS["bf16"]()
    plan = make_plan(made, build_graph(made), load_target("tpu7x"))
    shown = {name: (p.what, p.units, p.room, p.bytes) for name, p in paddings(plan).items()}
    layers = sharing = 2
    assert shown["experts"] == ("experts", 7, 8, layers * sharing * plan.experts[0].rows * 512)
    assert "a.q" not in shown                # the head is a key head's only one: repeated, to be added up once
    assert shown["a.o"] == ("heads", 1, 4, 2 * 200 * 24 * 3 * 2)
    assert shown["moe.router"] == ("columns", 7, 8, 2 * 200 * 2)
    assert shown["moe.shared_up"] == ("columns", 50, 52, 2 * 200 * 2 * 2)
    assert shown["head"] == ("vocabulary", 301, 304, 2 * 200 * 3)
    even = spec(2, {"a": Gqa(2, 2, 24)}, {"b": Mlp(64)}, "a", "b", hidden=128, ends={"vocab": 256})
    assert paddings(make_plan(even, build_graph(even), load_target("tpu7x"))) == {}
