"""Feed-forward kinds: each formula against Hugging Face's own module, each kernel against the reference, ties, refusals."""
from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from ffn_cases import CASES, answers, weights
from small_specs import prove_kernel, spec

from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.graph.ops.moe import largest
from mkgen.pack.image import expert_image
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Step, walk
from mkgen.prove.drive import load_kernel
from mkgen.prove.mini import mini_spec
from mkgen.prove.random_params import RandomParams
from mkgen.reference.evaluate import Decoder, Env
from mkgen.reference.params import TensorParams
from mkgen.spec.model import Activation, Gqa, Mlp, Moe, Norm, Rope, Router
from mkgen.spec.validate import validate
from mkgen.targets import load_target

ATTENTION = {"a": Gqa(heads=2, kv_heads=2, head_dim=32, rope=Rope(1e4))}
CLAMPED = Moe(experts=6, top_k=2, width=45, bias=True, activation=Activation("silu", 1.702, 0.8, 1.0),
              router=Router("logits", linear_bias=True, after="softmax", renorm=False))
NORMED = Moe(experts=6, top_k=3, width=45, bias=True, latent=72, latent_input_norm=Norm(eps=1e-5, offset=1.0),
             expert_norm=Norm(eps=1e-8, weight="before"),
             router=Router("sigmoid", logit_scale=0.17, bias=True, groups=3, group_top_k=2, group_score="max", renorm_eps=1e-15))
GROUPED = Moe(experts=12, top_k=3, width=40, expert_norm=Norm(offset=1.0), shared_width=40, shared_gate=True,
              activation=Activation("gelu_tanh"),
              router=Router("sigmoid", bias=True, groups=4, group_top_k=2, renorm_eps=0.5, scale=2.5))
SCALED = Moe(experts=5, top_k=2, width=56, bias=True, gated=False, shared_width=30, activation=Activation("relu2", limit=0.8),
             shared_multiplier=3.0, router=Router("logits", after="sigmoid", renorm=False, scale_input=True))
PLAIN = Mlp(100, gated=False, bias=True, activation=Activation("gelu"))
SPECS = {
    # an expert's output is added up over both ranks, its bias once; an input of 136 columns, widths of 23 and 22
    "clamped": lambda: spec(2, ATTENTION, {"f": CLAMPED}, "a*2", "f*2", hidden=136, expert_parallel=1, tensor_parallel=2,
                            formats={"experts": "mxfp4"}),
    # each expert's output is whole only behind a sum over both ranks, and normed then
    "normed apart": lambda: spec(2, ATTENTION, {"f": NORMED}, "a*2", "f*2", hidden=160, expert_parallel=1, tensor_parallel=2),
    # two kinds of routed experts of unlike sizes in one slot buffer, and a plain mlp
    "kinds": lambda: spec(2, ATTENTION, {"x": GROUPED, "y": SCALED, "z": PLAIN}, "a*4", "x y z y", hidden=144),
    "normed whole, f32": lambda: spec(1, ATTENTION, {"f": replace(NORMED, latent_norm=Norm("layer", bias=True))}, "a*2", "f*2",
                                      hidden=160, formats={"experts": "mxfp4"}, activations="f32"),
}


@pytest.mark.parametrize("case", CASES)
def test_reference_is_hugging_faces_module(case):
    ffn, names = CASES[case]
    x, want = answers(case)
    made = spec(1, ATTENTION, {"f": ffn}, "a", "f", hidden=x.shape[1])
    graph, facts = build_graph(made), weights(case)
    params = TensorParams(facts, {f"f.{role}": name for role, name in names.items()})
    decoder = Decoder(graph, params, len(x), 64, exact=True)
    env = Env(decoder, jnp.zeros(len(x), jnp.int32), jnp.zeros(len(x), jnp.int32))
    env.layer = int(next(iter(facts)).split(".layers.")[1].split(".")[0])
    env.values["f.h"] = jnp.asarray(x)
    sub = graph.ffns["f"]
    body = sub.ops[1:-1]                     # without the norm in front and the addition behind
    for op in body:
        op.meaning(env)
    got = np.asarray(env[sub.ops[-1].inputs()[-1]])
    assert np.abs(got - want).max() <= 2e-6 * max(1.0, np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_kernel_equals_reference(name):
    prove_kernel(SPECS[name]())


def logits(made, params_of=None, rows: int = 3) -> np.ndarray:
    """Of one step of the exact reference, with the random weights of `params_of`."""
    graph = build_graph(made)
    decoder = Decoder(graph, RandomParams(build_graph(params_of or made), 1, params_of or made), rows, 64, exact=True)
    return decoder.step(np.arange(rows) + 5, np.zeros(rows, np.int32))


def changed(ffn: Mlp | Moe, field: str, value) -> Moe:
    owner, _, key = field.rpartition(".")
    return replace(ffn, **{owner: replace(getattr(ffn, owner), **{key: value})} if owner else {key: value})


@pytest.mark.parametrize("name, field, value", [
    ("clamped", "f.activation.alpha", 1.0), ("clamped", "f.activation.limit", 0.0), ("clamped", "f.activation.up_offset", 0.0),
    ("clamped", "f.bias", False), ("clamped", "f.router.linear_bias", False), ("clamped", "f.router.after", "sigmoid"),
    ("normed apart", "f.router.logit_scale", 0.5), ("normed apart", "f.router.groups", 1), ("normed apart", "f.router.bias", False),
    ("normed apart", "f.expert_norm", None), ("normed apart", "f.expert_norm.weight", "after"),
    ("normed apart", "f.latent_input_norm", None),
    ("kinds", "x.router.renorm_eps", 0.0), ("kinds", "x.shared_gate", False), ("kinds", "y.shared_multiplier", 1.0),
    ("kinds", "x.router.scale", 1.0), ("kinds", "y.router.scale_input", False), ("kinds", "y.activation.kind", "relu"),
    ("kinds", "z.activation.kind", "relu2"), ("kinds", "z.bias", False)])
def test_the_proofs_weights_tell_every_axis(name, field, value):
    """With the weights that kernels are proven on, another value of an axis gives other logits, beyond the proof's 2 %."""
    made, (kind, _, field) = SPECS[name](), field.partition(".")
    ffns = made.model.ffns
    other = replace(made, model=replace(made.model, ffns=ffns | {kind: changed(ffns[kind], field, value)}))
    a, b = logits(made), logits(other, params_of=made)
    assert np.abs(a - b).max() > 0.03 * np.ptp(a)


# -- ties ---------------------------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def kernel():
    made = SPECS["kinds"]()
    return load_kernel(make_plan(made, build_graph(made), load_target("tpu7x")))


@pytest.mark.parametrize("width,top_k", [(200, 1), (200, 3), (200, 7), (60, 8), (128, 4), (896, 16)])
@pytest.mark.parametrize("values", [3, 40, 2**20])
def test_ties_go_to_the_lowest_id(kernel, width, top_k, values):
    """Nearly all keys are tied, some, none; and the largest may stand in few lanes of the sorting network, or in one."""
    keys = np.random.default_rng(top_k).integers(-2, values - 2, (8, width)).astype(np.float32)
    keys[1] = np.sort(keys[1])
    keys[2, 5::128] += 2**21
    want, _ = largest(jnp.asarray(keys), top_k)
    order = np.argsort(-keys, axis=1, kind="stable")[:, :top_k]
    assert all(set(np.flatnonzero(row)) == set(ids) for row, ids in zip(np.asarray(want), order))
    assert np.array_equal(kernel.top_k_lanes(jnp.asarray(keys), kernel.kth_largest(jnp.asarray(keys), top_k), top_k), want)


@pytest.fixture(scope="module")
def whole_kernel():
    """Of a rank that has a part of every expert."""
    return load_kernel(make_plan(made := SPECS["clamped"](), build_graph(made), load_target("tpu7x")))


@pytest.mark.parametrize("width,top_k", [(200, 7), (60, 8), (128, 1), (16, 16)])
@pytest.mark.parametrize("values", [3, 2**20])
@pytest.mark.parametrize("active", [[0], [2, 5], range(8), []])
def test_the_first_of_the_list_is_known_before_the_others(whole_kernel, monkeypatch, width, top_k, values, active):
    """Whatever is tied, and where an active row's keys are NaN, in part or all: what is fetched heads the list."""
    k, rng = whole_kernel, np.random.default_rng(width)
    monkeypatch.setattr(k, "first_expert", lambda local: 0)
    keys = rng.integers(-2, values - 2, (8, width)).astype(np.float32)
    for broken in ([], [(2, slice(0, None, 3))], [(5, slice(None))]):
        for row, lanes in broken:
            keys[row, lanes] = np.nan
        column = np.full((8, 1), -1, np.int32)
        column[list(active)] = 7
        m = SimpleNamespace(position_column=jnp.asarray(column), expert_words=[0] * 40, expert_count=[0], expert_ids=[None] * width,
                            taker=[None] * width)
        key = jnp.asarray(keys)
        last = k.kth_largest(key, top_k)
        first = int(k.first_chosen(m, key, last))
        chosen = k.top_k_lanes(key, last, top_k) & (m.position_column >= 0)
        k.want_experts(m, chosen | (jnp.arange(width)[None] == first), width)
        for i in range(int(m.expert_count[0])):
            k.take_expert(m, i)
        ids = [int(i) for i in m.expert_ids if i is not None]
        assert ids[:1] == ([first] if first < width else []), "started is what is waited for first, or nothing"
        if not broken:
            assert ids == [e for e in range(width) if np.asarray(chosen)[:, e].any()] and bool(ids) == bool(active)


@pytest.mark.parametrize("first,local,count", [(0, 40, 0), (56, 40, 5), (300, 292, 8 * 16), (500, 31, 60), (504, 96, 8)])
def test_the_list_has_this_ranks_experts_in_order(kernel, monkeypatch, first, local, count):
    """Each that any row chose once, the lowest id first; whole words, the last bit of one, and ranks that have none."""
    monkeypatch.setattr(kernel, "first_expert", lambda local: first)
    chosen = np.zeros((8, 600), bool)
    chosen.flat[np.random.default_rng(count).choice(chosen.size, count, replace=False)] = True
    chosen[3, [599, 31, 32, 587]] |= count > 0
    m = SimpleNamespace(expert_words=[0] * 20, expert_count=[0], expert_ids=[None] * 600)
    kernel.want_experts(m, jnp.asarray(chosen), local)
    want = [e - first for e in range(600) if chosen[:, e].any() and 0 <= e - first < local]
    for i in range(int(m.expert_count[0])):
        kernel.take_expert(m, i)
    assert [int(i) for i in m.expert_ids if i is not None] == want and not any(map(int, m.expert_words))


@pytest.mark.parametrize("score", ["top2", "max"])
def test_groups_are_those_of_the_reference(kernel, score):
    """Also where groups tie, and where a group's best stands in it twice."""
    keys = np.random.default_rng(3).integers(-3, 3, (8, 60)).astype(np.float32)
    runs = np.sort(keys.reshape(8, 12, 5), axis=-1)
    best = runs[..., -1] if score == "max" else runs[..., -2:].sum(-1)
    open_groups, _ = largest(jnp.asarray(best), 5)
    want = np.repeat(np.asarray(open_groups), 5, axis=1)
    of = {"top2": kernel.group_top2}.get(score) or (lambda key: jnp.max(key, axis=1, keepdims=True))
    got = np.asarray(kernel.in_best_groups(jnp.asarray(keys), 12, 5, of))
    assert np.array_equal(got > -1e38, want) and np.array_equal(got[want], keys[want])


# -- images ---------------------------------------------------------------------------------------------------------------

def test_more_experts_on_a_rank_than_the_list_has_bits_for():
    """1,024 are planned; 1,025 are refused, with what to change."""
    def made(experts):
        s = spec(1, {"a": Gqa(2, 2, 32)}, {"m": Moe(experts=experts, top_k=2, width=32)}, "a", "m", hidden=64)
        return make_plan(s, build_graph(s), load_target("tpu7x"))

    assert made(1024).experts[0].local_experts == 1024
    with pytest.raises(MkgenError, match="1025 experts on a rank(.|\n)*expert_parallel"):
        made(1025)


def test_an_experts_biases_lie_in_its_image():
    """Those of gate and up by columns, that of down once."""
    made = SPECS["clamped"]()
    graph = build_graph(made)
    plan, params = make_plan(made, graph, load_target("tpu7x")), RandomParams(graph, 1, made)
    image, = plan.experts
    held = [expert_image(plan, image, rank, params)[1 * 6 + 4].view(np.float32) for rank in range(2)]
    line = lambda rank, which: held[rank][image.bias_row(which):].reshape(-1)[:image.place(which)[2]]
    gate, up, down = (params.expert(plan.weights[name], 1, 4) for name in image.biases)
    for which, want in ((0, gate), (1, up)):
        mine = [line(0, which)[:image.width], line(1, which)[:45 - image.width]]
        assert np.array_equal(np.concatenate(mine), want)
    assert np.array_equal(line(0, 2)[:136], down) and not line(1, 2).any() and down.all()


def test_kinds_have_images_of_their_own():
    made = SPECS["kinds"]()
    plan = make_plan(made, build_graph(made), load_target("tpu7x"))
    assert [image.name for image in plan.experts] == ["experts_x", "experts_y"]
    assert [image.layers for image in plan.experts] == [1, 2]
    assert plan.buffers["expert_slot"].shape[1] == max(image.rows for image in plan.experts)


def test_a_mini_keeps_the_axes():
    """Groups that shut some experts out, limits that random gates reach."""
    router = replace(GROUPED.router, groups=8, group_top_k=4)
    big = spec(8, ATTENTION, {"f": replace(CLAMPED, experts=128, top_k=8, width=1024, router=router,
                                           activation=Activation("situ", limit=7.0))}, "a*3", "f*3", hidden=512, tensor_parallel=2,
               expert_parallel=4, mesh={"chip": 4, "core": 2}, block_kib=1024)
    f = mini_spec(big).model.ffns["f"]
    assert 1 < f.router.group_top_k < f.router.groups and f.experts // f.router.groups > 1
    assert f.top_k <= f.experts // f.router.groups * f.router.group_top_k and f.activation.limit < 1
    assert f.activation.beta <= 2 and f.activation.linear_beta <= 2     # where random gates and ups saturate


# -- refusals -------------------------------------------------------------------------------------------------------------

TOGETHER = Moe(experts=6, top_k=2, width=200)


@pytest.mark.parametrize("ffn, said", [
    (replace(TOGETHER, router=Router("sigmoid", scale_input=True)), "inputs of experts are scaled"),
    (replace(TOGETHER, expert_norm=Norm()), "outputs of experts are normed"),
    (replace(TOGETHER, bias=True), "experts have biases"),
    (replace(TOGETHER, width=2000), "an expert is fetched in 2 pieces"),
    (TOGETHER, "")])
def test_what_keeps_experts_from_a_batch(ffn, said):
    """Refused by the op, which alone knows the pieces: what, why, and what to write."""
    def plan(batch):
        made = spec(1, ATTENTION, {"f": ffn}, "a*2", "f*2", hidden=160, expert_batch=batch, expert_kib=1600)
        return make_plan(made, build_graph(made), load_target("tpu7x"))

    steps = [n.macro for n in walk(plan(1).regions["f"].body) if isinstance(n, Step) and n.template == "experts"]
    assert "expert" in steps and "batch" not in steps
    if not said:
        assert "batch" in [n.macro for n in walk(plan(2).regions["f"].body) if isinstance(n, Step) and n.template == "experts"]
        return
    with pytest.raises(MkgenError) as refused:
        plan(2)
    what, why, fix = str(refused.value).split("\n")
    assert what.startswith("odd.yaml: f.") and f"build.expert_batch is 2, and {said}" in what
    assert why.startswith("  why: the experts of a batch share one left operand") and fix == "  fix: write build.expert_batch: 1"


@pytest.mark.parametrize("ffn, said", [
    (replace(GROUPED, router=replace(GROUPED.router, groups=5)), "groups of 12 experts"),
    (replace(GROUPED, router=replace(GROUPED.router, groups=12, group_top_k=6)), "its two best"),
    (replace(GROUPED, top_k=7), "in the chosen groups"),
    (replace(GROUPED, shared_width=0), "shared_gate without shared experts"),
    (replace(CLAMPED, activation=Activation(limit=-1.0)), "limit -1.0"),
    (replace(NORMED, latent=0), "latent_input_norm without latent"),
    (replace(NORMED, expert_norm=Norm("layer")), "expert_norm as it is written")])
def test_refusals(ffn, said):
    made = SPECS["clamped"]()
    wrong = replace(made, model=replace(made.model, ffns={"f": ffn}))
    assert any(said in f"{p}" for p in validate(wrong)), validate(wrong)
