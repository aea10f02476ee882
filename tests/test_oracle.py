"""The reference against other people's code, in float32: weights, logits, routing, states. See oracle/README.md."""
import json

import numpy as np
import pytest
from conftest import ROOT
from oracle_cases import CASES, FOLDER, fp32_bound, load_case
from oracle_weights import digest

from mkgen.spec.load import load_spec

STATES = 1e-4                                # of the largest value of a state, or of 1 if that is larger

each_case = pytest.mark.parametrize("case", CASES, indirect=True)


@pytest.fixture
def case(request):
    return load_case(request.param)


@each_case
def test_the_weights_are_those_that_the_oracle_read(case):
    """Names, shapes and values of every tensor: what the spec asks a checkpoint for is what such a checkpoint has."""
    want = json.loads((FOLDER / "weights.json").read_text())[case.name]
    assert len(case.weights) == want["tensors"] and sum(a.size for a in case.weights.values()) == case.meta["params"]
    assert digest(case.weights) == want["sha256"]


@each_case
def test_what_is_no_size_is_as_the_flagship_has_it(case):
    """The case's spec changes sizes only: eps, activations, rope, router are in the config as they are in the YAML."""
    model = load_spec(ROOT / "model_specs" / f"{case.base}.yaml").model
    c, moe = case.config.get("text_config", case.config), model.ffns["moe"]
    said = {"norm": c["rms_norm_eps"], "tied": c["tie_word_embeddings"], "moe": c["hidden_act"]}
    ours = {"norm": model.norm.eps, "tied": model.tied_head, "moe": moe.activation.kind}
    if case.base == "kimi_k3":
        kda, mla, act = model.mixers["kda"], model.mixers["mla"], moe.activation
        assert act == model.ffns["dense"].activation
        said |= {"act": (c["activation_situ_beta"], c["activation_situ_linear_beta"]), "rope": not c["mla_use_nope"],
                 "gate": c["mla_use_output_gate"], "floor": c["linear_attn_config"]["gate_lower_bound"],
                 "router": (c["moe_router_activation_func"], c["moe_renormalize"], c["routed_scaling_factor"]),
                 "eps": (c["rms_norm_eps"],) * 3}
        ours |= {"act": (act.beta, act.linear_beta), "rope": mla.rope is not None, "gate": mla.gate is not None,
                 "floor": kda.decay.floor, "router": (moe.router.score, moe.router.renorm, moe.router.scale),
                 "eps": (kda.norm.eps, model.residual.eps, moe.latent_norm.eps)}
    else:
        attention = model.mixers["attention"]
        said |= {"rope": (c["rope_parameters"]["rope_theta"], "default", None), "renorm": c["norm_topk_prob"],
                 "eps": c["rms_norm_eps"]}
        ours |= {"rope": (attention.rope.base, "default", attention.rope.width), "renorm": moe.router.renorm,
                 "eps": attention.qk_norm.eps}
    assert ours == said


@each_case
def test_logits(case):
    """At every position, prompt and decode, within check.py's bound."""
    bound, decoded = fp32_bound(case.meta), case.exact.logits[:, case.prompt - 1:]
    assert decoded.shape == case.io["logits"].shape
    assert np.abs(decoded - case.io["logits"]).max() <= bound
    assert np.abs(case.exact.logits[:, :case.prompt] - case.io["prefill_logits"]).max() <= bound
    assert (decoded.argmax(-1) == np.array(case.meta["argmax"])).all()


@each_case
def test_routing(case):
    """The same experts everywhere; for sigmoid scores the same gap, too (the oracle's other gaps are of logits)."""
    np.testing.assert_array_equal(case.exact.topk[case.prompt - 1:], case.routing["topk"])
    if case.base == "kimi_k3":
        assert np.abs(case.exact.gap[case.prompt - 1:] - case.routing["gap"]).max() <= 1e-4


@each_case
def test_states(case):
    """After the last token, layer by layer, in the oracle's own form (`oracle_states`)."""
    ours = oracle_states(case)
    assert ours.keys() == case.cache.keys()
    for name, want in case.cache.items():
        have = ours[name]
        step = have.shape[-1] // want.shape[-1]                                    # see oracle/README.md
        have = have[..., ::step, ::step] if step > 1 else have
        assert have.shape == want.shape, name
        assert np.abs(have - want).max() <= STATES * max(1, np.abs(want).max()), name


def oracle_states(case) -> dict[str, np.ndarray]:
    """Our states as the oracle keeps them. Grouped-query: keys (normed, rotated) and values [B, heads, T, head_dim].
    Latent attention: the normed latent as keys, the shared key as values, [B, 1, T, width]. Delta rule: the last inputs
    of the convolution, oldest first, q | k | v; the matrix of each head transposed, [B, heads, value, key]."""
    states, tokens, out, seen = case.exact.states, slice(0, case.tokens), {}, {}
    for layer, run in enumerate(case.spec().model.schedule):
        i = seen[run.mixer] = seen.get(run.mixer, -1) + 1
        if run.mixer == "attention":
            cache = states["attention.cache"][i][:, tokens].swapaxes(1, 2)
            out[f"layers.{layer}.keys"], out[f"layers.{layer}.values"] = np.split(cache, 2, axis=-1)
        elif run.mixer == "mla":
            cache, rank = states["mla.cache"][i][:, None, tokens], case.spec().model.mixers["mla"].kv_rank
            out[f"layers.{layer}.keys"], out[f"layers.{layer}.values"] = cache[..., :rank], cache[..., rank:]
        else:
            out[f"layers.{layer}.conv_state"] = states["kda.window"][i]
            out[f"layers.{layer}.recurrent_state"] = states["kda.matrix"][i].swapaxes(-1, -2)
    return out
