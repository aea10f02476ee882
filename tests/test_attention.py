"""Grouped-query attention, axis by axis: the reference against other people's modules, whole kernels against the reference, and
what windows and groups of KV heads save."""
from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mkgen.graph.build import build_graph
from mkgen.graph.frequencies import frequencies, magnitude
from mkgen.graph.ops.gqa_attention import KvGroups
from mkgen.graph.ops.rope import RopeTable, rotation
from mkgen.plan.planner import make_plan
from mkgen.prove.mini import mini_spec
from mkgen.reference.evaluate import Decoder, Env
from mkgen.reference.params import TensorParams
from mkgen.spec.model import Gate, Gqa, Mlp, Norm, QkNorm, QueryTemperature, Rope, RopeScaling
from mkgen.targets import load_target
from small_specs import prove_kernel, spec

WINDOW = 7                                   # of attention/make.py
FFN = {"m": Mlp(width=96)}


@lru_cache
def answers() -> dict[str, np.ndarray]:
    return dict(np.load(Path(__file__).parent / "attention" / "answers.npz"))


# -- frequencies ------------------------------------------------------------------------------------------------------

ROPES = {
    "plain": Rope(1e6),
    "linear": Rope(1e6, scaling=RopeScaling("linear", 8.0)),
    "llama3": Rope(5e5, scaling=RopeScaling("llama3", 8.0, 8192)),
    "yarn": Rope(1.5e5, scaling=RopeScaling("yarn", 32.0, 4096)),
    "yarn_whole": Rope(1.5e5, scaling=RopeScaling("yarn", 32.0, 4096, truncate=False)),
}


@pytest.mark.parametrize("name", ROPES)
def test_frequencies(name):
    """To the last bits of float32: at a million positions each is an angle of 0.06."""
    *f, size = answers()[f"frequencies/{name}"]
    np.testing.assert_allclose(frequencies(ROPES[name], 64), f, rtol=2.5e-7)
    assert magnitude(ROPES[name]) == pytest.approx(size, rel=1e-6)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_rotation_turns_pairs(layout):
    """By the definition: a pair as a complex number, times e^(i position frequency); the rest of the head stays."""
    r = rotation("a", Rope(100.0, 12, layout), 20)
    x, position = np.random.default_rng(0).standard_normal((2, 3, 20)), np.array([0, 77])
    pairs = [(j, j + 6) if layout == "half" else (2 * j, 2 * j + 1) for j in range(6)]
    want = x.copy()
    for j, (a, b) in enumerate(pairs):
        z = (x[..., a] + 1j * x[..., b]) * np.exp(1j * position * 100.0 ** (-j / 6))[:, None]
        want[..., a], want[..., b] = z.real, z.imag
    made = spec(1, {"a": Gqa(2, 1, 20, rope=r.rope)}, FFN, "a", "m", hidden=24)
    env = Env(Decoder(build_graph(made), TensorParams({}, {}), 2, 64, exact=True), jnp.zeros(2, jnp.int32), jnp.asarray(position))
    table = next(op for op in env.decoder.graph.begin.ops if isinstance(op, RopeTable))
    table.meaning(env)
    np.testing.assert_allclose(r.turn(jnp.asarray(x, jnp.float32), *(env[v] for v in r.values)), want, atol=1e-5)


# -- the reference ----------------------------------------------------------------------------------------------------

YARN = RopeScaling("yarn", 8.0, 64, beta_fast=4.0, attention_factor=1.2)
MODULES = {
    "full_norm": Gqa(4, 2, 16, rope=Rope(1e4, 8), qk_norm=QkNorm("full")),
    "sinks": Gqa(8, 4, 16, 12, rope=Rope(1e4, 8), value_scale=0.707, sinks=True, window=WINDOW),
    "narrow_values": Gqa(8, 2, 16, 12, rope=Rope(5e6, 8), value_scale=0.707),
    "softplus_per_head": Gqa(4, 2, 16, rope=Rope(100.0, scaling=YARN), qk_norm=QkNorm(), gate=Gate("softplus", "head")),
    "softplus_per_element": Gqa(4, 2, 16, rope=Rope(100.0, scaling=YARN), qk_norm=QkNorm(), gate=Gate("softplus")),
    "output_norm": Gqa(4, 2, 16, scale=3.5 / 4, rope=Rope(1e4), qk_norm=QkNorm(eps=1e-5, weight="none"), output_norm=Norm(eps=1e-5, weight="none"),
                       gate=Gate(), window=WINDOW),
    "clip": Gqa(4, 2, 6, rope=Rope(100.0), clip=0.8),
    "clip_behind_norm": Gqa(4, 2, 6, rope=Rope(100.0), qk_norm=QkNorm("full", eps=1e-5), clip=0.8),
}
NAMES = {f"a.{c}": f"{c}_proj.weight" for c in "qkvog"} | {"a.q_norm": "q_norm.weight", "a.k_norm": "k_norm.weight", "a.sinks": "sinks"}


@pytest.mark.parametrize("name", MODULES)
def test_reference_is_the_published_module(name):
    """Token by token through the cache, float32."""
    tensors = {k.partition("/")[2]: a for k, a in answers().items() if k.startswith(f"{name}/")}
    made = spec(1, {"a": MODULES[name]}, FFN, "a", "m", hidden=24)
    names = NAMES | ({"a.g": "gate_proj.weight"} if "gate_proj.weight" in tensors else {})
    decoder = Decoder(build_graph(made), TensorParams(tensors, names), 1, 64, exact=True)
    graph, out = decoder.graph, []
    for t, x in enumerate(tensors["x"]):
        env = Env(decoder, jnp.zeros(1, jnp.int32), jnp.asarray([t]))
        env.values["a.h"] = jnp.asarray(x[None])
        for op in [*(op for op in graph.begin.ops if isinstance(op, RopeTable)), *graph.mixers["a"].order()]:
            if op.name not in ("a.norm", "a.add"):
                op.meaning(env)
        out.append(env.values["a.out"][0])
    np.testing.assert_allclose(out, tensors["y"], atol=2e-5)


# -- whole kernels ----------------------------------------------------------------------------------------------------

KERNELS = {
    # a window and all tokens side by side, K and V in one block, sinks, biases, yarn
    "sinks": lambda: spec(2, {"near": Gqa(8, 2, 32, window=13, sinks=True, bias=("q", "k", "v", "o"), rope=Rope(
        100.0, scaling=RopeScaling("yarn", 8.0, 16, beta_fast=4.0, truncate=False))),
        "far": Gqa(8, 2, 32, sinks=True, bias=("q", "v"), rope=Rope(100.0))}, FFN, "near far", "m*2", hidden=160),
    # four ranks and three KV heads, a norm over all heads, narrow values, a chunk that is no multiple of a tile
    "full": lambda: spec(4, {"a": Gqa(9, 3, 48, 40, qk_norm=QkNorm("full"), rope=Rope(1e4, 12), value_scale=0.7, softcap=3.0, chunk=11,
                                      gate=Gate("softplus", "head"), output_norm=Norm("layer", weight="before"), bias=("o",))}, FFN,
                          "a*2", "m*2", hidden=160, mesh={"chip": 2, "core": 2}),
    # one KV head, repeated: it counts once in the norm over all heads; float32 activations
    "shared": lambda: spec(2, {"a": Gqa(6, 1, 24, qk_norm=QkNorm("full", offset=1.0), rope=Rope(1e4, 12), chunk=16, scale=0.15,
                                        gate=Gate("sigmoid", "head"), output_norm=Norm(weight="none"), bias=("k",),
                                        query_temperature=QueryTemperature(1.0, 32, 17))},
                           FFN, "a*2", "m*2", hidden=160, activations="f32"),
    # as many KV heads as heads: groups of them; pairs that are neighbours, a norm behind the rotation
    "groups": lambda: spec(1, {"a": Gqa(16, 16, 64, 48, qk_norm=QkNorm(weight="none", after_rope=True), rope=Rope(1e4, 40, "interleaved"),
                                        sinks=True, softcap=5.0, window=20, gate=Gate("softplus"), output_norm=Norm()),
                               "b": Gqa(2, 1, 256)}, FFN, "a b", "m*2", hidden=160),
    # a third to a half of the numbers are cut: behind products and biases, behind a norm, in front of one
    "clip": lambda: spec(2, {"a": Gqa(4, 2, 24, rope=Rope(100.0), bias=("q", "v"), clip=1.0),
                             "b": Gqa(6, 3, 32, 24, rope=Rope(100.0, 12), qk_norm=QkNorm("full"), clip=0.8),
                             "c": Gqa(2, 1, 32, rope=Rope(100.0), qk_norm=QkNorm(after_rope=True), clip=0.7),
                             "d": Gqa(2, 2, 32, qk_norm=QkNorm(), clip=0.6)}, FFN, "a b c d", "m*4", hidden=160),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_reference(name):
    prove_kernel(KERNELS[name]())


# -- refusals ---------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("a, words", [
    (Gqa(4, 2, 32, window=8, chunk=8), "a window and a chunk"),
    (Gqa(4, 2, 32, bias=("q", "q")), "listed twice"),
    (Gqa(4, 2, 32, output_norm=Norm("layer", bias=True)), "bias of the norm"),
    (Gqa(4, 2, 32, rope=Rope(1.0)), "base is 1"),
    (Gqa(4, 2, 32, rope=Rope(scaling=RopeScaling("yarn", 8.0, 64, beta_fast=1.0, beta_slow=2.0))), "beta_fast is 1, beta_slow 2"),
    (Gqa(4, 2, 32, rope=Rope(scaling=RopeScaling("llama3", 8.0, 64, high_freq_factor=0.5))), "high_freq_factor is 0.5, low_freq_factor 1"),
    (Gqa(4, 2, 32, rope=Rope(scaling=RopeScaling("llama3", 8.0))), "without original_context"),
    (Gqa(4, 2, 32, rope=Rope(scaling=RopeScaling("linear", 0.5))), "factor is 0.5"),
    (Gqa(4, 2, 32, rope=Rope(scaling=RopeScaling("yarn", 8.0, 64, attention_factor=0.0))), "attention_factor is 0"),
])
def test_refusals(a, words):
    """One problem each."""
    with pytest.raises(AssertionError) as caught:
        spec(1, {"a": a}, FFN, "a", "m", hidden=32)
    assert words in str(caught.value) and str(caught.value).count("Problem(") == 1


# -- what is saved ----------------------------------------------------------------------------------------------------

def planned(made):
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def test_one_list_of_tiles_a_sight():
    """Kinds of one window share a list, as long as the window needs; it is made once a step."""
    made = spec(1, {"a": Gqa(2, 1, 32, window=100), "b": Gqa(2, 2, 32, window=100, rope=Rope()), "c": Gqa(2, 1, 32)}, FFN, "a b c", "m*3",
                hidden=64, context=4096, kv_tile=64, rows=(2,))
    lists = {n: b.shape for n, b in planned(made).buffers.items() if n.startswith("kv_items")}
    assert lists == {"kv_items_window_100": (2 * 3,), "kv_items": (2 * 64,)}


@pytest.mark.parametrize("heads, kv_heads, head_dim, size", [(32, 32, 128, 8), (8, 8, 64, 8), (32, 4, 128, 2), (8, 1, 128, 1),
                                                              (64, 8, 64, 4), (9, 9, 80, 9)])
def test_groups_of_kv_heads(heads, kv_heads, head_dim, size):
    """A dot gets eight rows and the depth of the MXU if the heads give that, and no more zeros than that takes."""
    groups = KvGroups(heads, kv_heads, head_dim, head_dim)
    assert groups.size == size
    assert groups.lanes().blocks * groups.lanes().groups == -(-2 * size * head_dim // 128) * (kv_heads // size)


def test_the_mini_keeps_the_axes():
    """Windows shorter than a tile, chunks that are whole tiles or not, value heads narrower, several groups."""
    a = Gqa(64, 64, 192, 128, window=4096, rope=Rope(width=64), query_temperature=QueryTemperature(0.1, 8192))
    b = Gqa(32, 4, 128, chunk=8192, softcap=50.0)
    full = spec(2, {"a": a, "b": b}, FFN, "a b", "m*2", hidden=256, kv_tile=16, context=16384, block_kib=4096)
    mini = mini_spec(full)
    a, b = mini.model.mixers["a"], mini.model.mixers["b"]
    assert 0 < a.window < mini.build.kv_tile == b.chunk and a.value_dim < a.head_dim and a.query_temperature.length < mini.build.kv_tile
    assert 0 < b.softcap <= 2                           # random scores are about 1: the cap bends them
    steps = str(planned(mini).regions["a"].body)
    assert re.search(r"'groups': '2'", steps) and "'window'" in steps
