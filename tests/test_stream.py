"""The residual stream, the norms and the ends: the reference against the formulas in NumPy, the kernels against the reference."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT

from mkgen.check import check_plan
from mkgen.emit.prune import prune
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, walk
from mkgen.prove.mini import mini_spec
from mkgen.prove.random_params import RandomParams
from mkgen.reference.evaluate import Decoder
from mkgen.reference.params import TensorParams
from mkgen.spec.model import Gqa, Mlp, Moe, Norm, Residual, Rope, Spec
from mkgen.spec.roles import tensors
from mkgen.errors import SpecErrors
from mkgen.spec.load import load_spec
from mkgen.targets import load_target
from small_specs import prove_kernel, spec

HIDDEN, HEADS, KV, DIM = 48, 4, 2, 8
LAYER = Norm("layer", 1e-3, bias=True)
GATED = Residual("gated", ("pre", "post"), Norm(eps=1e-8, weight="none"), Norm(eps=1e-8, weight="before", offset=1.0), temperature=0.3,
                 dtype="f32")
STREAMS = {                                  # residual, fields of Model, the columns
    "pre": (Residual(multiplier=0.22), dict(norm=Norm(offset=1.0)), "a*2", "f*2"),
    "post": (Residual(norms=("post",), dtype="f32"), {}, "a*2", "f*2"),
    "sandwich": (Residual(norms=("pre", "post"), post_norm=Norm("layer", offset=1.0), ffn_post_norm=Norm(weight="before", offset=0.5)),
                 dict(norm=LAYER, final_norm=Norm(offset=1.0), embed_scale=3.0, embed_norm=LAYER, head_bias=True, logit_scale=0.5,
                      logit_softcap=0.7, usable_vocab=120, tied_head=True), "a*2", "f*2"),
    "parallel": (Residual("parallel", multiplier=0.7), dict(norm=replace(LAYER, bias=False), logit_scale=0.25), "a*2", "f*2"),
    "alpha_beta": (Residual("alpha_beta", alpha={"a": 1.5, "f": 0.75}, beta={"a": 0.5}), dict(embed_norm=Norm(weight="none")), "a*2 -", "- f f"),
    "gated": (GATED, dict(logit_softcap=2.0, final_norm=Norm(weight="before")), "- a*2", "f - f"),
}


# -- the formulas ------------------------------------------------------------------------------------------------------

def norm(n: Norm, x, w: dict, role: str):
    """n(x); w: role -> array of one layer."""
    gain = 1.0 if n.weight == "none" else n.offset + w[role]
    x = x * gain if n.weight == "before" else x
    x = x - x.mean(-1, keepdims=True) if n.kind == "layer" else x
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + n.eps)
    return (x * gain if n.weight == "after" else x) + (w[f"{role}_bias"] if n.bias else 0.0)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def attention(h, w):
    """Of one token that sees itself alone: its values, each for a group of heads."""
    v = np.repeat((h @ w["a.v"].T).reshape(-1, KV, DIM), HEADS // KV, axis=1)
    return v.reshape(len(h), -1) @ w["a.o"].T


def mlp(h, w):
    g = h @ w["f.gate"].T
    return (g * sigmoid(g) * (h @ w["f.up"].T)) @ w["f.down"].T


def logits(model, weights, tokens):
    """The whole model at position 0, [tokens, vocab]."""
    r, kind = model.residual, model.residual.kind
    ends = {role: x for (role, layer), x in weights.items() if layer is None}
    x = ends["embed"][tokens] * model.embed_scale
    x = norm(model.embed_norm, x, ends, "embed_norm") if model.embed_norm else x
    for layer, run in enumerate(model.schedule):
        w = {role: x for (role, at), x in weights.items() if at == layer}
        if kind == "parallel":
            h = norm(model.norm, x, w, "mixer.norm")
            x = x + r.multiplier * (attention(h, w) + mlp(h, w))
            continue
        for role, name, f in (("mixer", run.mixer, attention), ("ffn", run.ffn, mlp)):
            if name is None:
                continue
            h = norm(model.norm, x, w, f"{role}.norm") if "pre" in r.norms else x
            y = f(h, w)
            if "post" in r.norms:
                y = norm(role == "ffn" and r.ffn_post_norm or r.post_norm or model.norm, y, w, f"{role}.post_norm")
            if kind == "alpha_beta":
                x = r.alpha.get(name, 1) * h + r.beta.get(name, 1) * y
            elif kind == "gated":
                beta = sigmoid(w[f"{role}.gate"] / r.temperature)
                x = np.sqrt(np.maximum(1 - beta ** 2, 1e-3)) * x + beta * y
            else:
                x = x + r.multiplier * y
    z = norm(model.final_norm or model.norm, x, ends, "norm") @ ends["embed" if model.tied_head else "head"].T
    z = model.logit_scale * (z + (ends["head_bias"] if model.head_bias else 0.0))
    return model.logit_softcap * np.tanh(z / model.logit_softcap) if model.logit_softcap else z


def made(name: str, ranks: int = 1, hidden: int = HIDDEN, dim: int = DIM, width: int = 40, rows=(3,), **build) -> Spec:
    residual, ends, mixer, ffn = STREAMS[name]
    return spec(ranks, {"a": Gqa(HEADS, KV, dim, rope=Rope())}, {"f": Mlp(width)}, mixer, ffn, hidden, residual, ends, rows=rows, **build)


@pytest.mark.parametrize("name", STREAMS)
def test_reference_is_the_formula(name):
    s, rng = made(name), np.random.default_rng(7)
    model, weights, hub = s.model, {}, {}
    for t in tensors(model).values():
        for layer in range(model.layers) if t.per == "layer" else (None,):
            size = 0.5 if len(t.shape) == 1 else t.shape[-1] ** -0.5
            x = weights[t.role, layer] = (size * rng.standard_normal(t.shape)).astype(np.float32)
            hub[t.role if layer is None else f"{t.role}.{layer}"] = x
    tokens = np.array([5, 300, 17])
    graph = build_graph(s)
    decoder = Decoder(graph, TensorParams(hub, model.checkpoint), 3, s.build.context, exact=True)
    got, want = decoder.step(tokens, np.zeros(3, np.int32)), logits(model, weights, tokens)
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * np.abs(want).max())
    assert not check_plan(make_plan(s, graph, load_target("tpu7x")))


def test_refusals(tmp_path):
    text = (ROOT / "model_specs" / "qwen3_30b_a3b.yaml").read_text().replace(
        "  norm: {eps: 1.0e-6}\n", """  norm: {eps: 1.0e-6}
  residual: {norms: [post, last], multiplier: 0.0, temperature: 2.0, alpha: {attention: 1.0}}
  logit_softcap: -1.0
  usable_vocab: 151937
""")
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(SpecErrors) as caught:
        load_spec(tmp_path / "bad.yaml")
    said = "\n".join(p.what for p in caught.value.problems)
    for part in ("multiplier", "logit_softcap", "temperature has no effect", "alpha has no effect", "'last'", "usable_vocab 151937"):
        assert part in said, said


# -- the plan ----------------------------------------------------------------------------------------------------------

def reductions(plan, name: str) -> int:
    return sum(isinstance(n, Collective) and (n.kind, n.part) == ("reduce", "start") for n in walk(plan.regions[name].body))


def test_parallel_branches_share_one_reduction():
    s = made("parallel", ranks=2)
    plan = make_plan(s, build_graph(s), load_target("tpu7x"))
    assert (reductions(plan, "a"), reductions(plan, "f")) == (0, 1)


def test_mini_keeps_pairs_and_bends():
    """A mini of columns that shrink out of step has the model's pairs of sub-layers and no others; its cap and its last usable
    id are such that they matter."""
    residual, ends, *_ = STREAMS["pre"]
    s = spec(1, {"a": Gqa(HEADS, KV, DIM)}, {"f": Mlp(40)}, "a -*4 a", "- f*4 -", HIDDEN, residual,
             ends | dict(logit_softcap=30.0, logit_scale=0.5, usable_vocab=300))
    mini = mini_spec(s).model
    assert {(r.mixer, r.ffn) for r in mini.schedule} == {("a", None), (None, "f")}
    assert mini.logit_softcap == 1.0 and mini.usable_vocab < mini.vocab * 0.7


def test_random_norms_are_near_one():
    """With an offset or without, what a norm multiplies with is near 1, and near 0.5 behind a sub-layer."""
    s = made("sandwich")
    graph = build_graph(s)
    params = RandomParams(graph, 0, s)
    norms = {op.w.name: op for sub in graph.sublayers() for op in sub.ops if op.kind.endswith("_norm") and op.w}
    means = {name: op.norm.offset + params.weight(op.w, 0).mean() for name, op in norms.items()}
    assert {n: round(m, 1) for n, m in means.items()} == {"embed_norm": 1.0, "mixer.norm": 1.0, "ffn.norm": 1.0, "norm": 1.0,
                                                          "mixer.post_norm": 0.5, "ffn.post_norm": 1.0}


def test_prune_keeps_what_is_reached():
    text = "import os\nimport sys\nA = 1\nB = A\n\n\ndef f():\n    return B\n\n\ndef g():\n    return f(), sys\n\n\ndef h():\n    return g()\n"
    assert prune(text, {"f"}) == "A = 1\nB = A\n\n\ndef f():\n    return B\n\n\n\n\n"
    assert prune(text, {"h"}) == text.removeprefix("import os\n")


# -- the kernels -------------------------------------------------------------------------------------------------------

KERNELS = {
    "sandwich": lambda: made("sandwich", ranks=2, hidden=200, dim=24, width=72),
    # the experts' result is split by columns; a biased projection is whole on both ranks, and counts once
    "parallel": lambda: spec(2, {"a": Gqa(4, 2, 24), "b": Gqa(4, 2, 24, bias=("o",))},
                             {"f": Mlp(72), "m": Moe(experts=6, top_k=2, width=40, latent=48)}, "a b a", "f m f", 208,
                             *STREAMS["parallel"][:2]),
    "alpha_beta": lambda: made("alpha_beta", ranks=2, hidden=200, dim=24, width=72),
    "gated": lambda: made("gated", hidden=200, dim=24, width=72),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_kernel_equals_reference(name):
    prove_kernel(KERNELS[name]())
