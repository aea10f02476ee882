"""Multi-head latent attention along its axes: queries with and without a rank, rotation, temperature, scale, gates, both caches."""
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mkgen.graph.build import build_graph
from mkgen.prove.compare import LOGITS
from mkgen.prove.random_params import RandomParams
from mkgen.reference.evaluate import Decoder
from mkgen.spec.model import Gate, Mla, Mlp, QueryTemperature, Rope, RopeScaling, Spec
from small_specs import prove_kernel, spec

YARN = RopeScaling("yarn", factor=4.0, original_context=16, attention_factor=1.3)
TURNED = Mla(heads=3, q_rank=40, kv_rank=72, nope_dim=20, rope_dim=12, v_dim=28, scale=0.6, gate=Gate("softplus", "head"),
             rope=Rope(100.0, layout="interleaved", scaling=YARN))
WARM = Mla(heads=5, kv_rank=136, nope_dim=12, rope_dim=16, v_dim=16, scale=0.5, rope=Rope(50.0, width=8),
           query_temperature=QueryTemperature(2.0, 8, 6))
BARE = Mla(heads=2, kv_rank=40, nope_dim=36, v_dim=40, scale=0.5, gate=Gate("softplus"))


def model(**build) -> Spec:
    """One layer of each; on two ranks the heads do not divide."""
    return spec(2, {"turned": TURNED, "warm": WARM, "bare": BARE}, {"dense": Mlp(width=50)}, "turned warm bare", "dense*3",
                hidden=200, **build)


def logits(made: Spec, tokens: int = 12, exact: bool = False) -> np.ndarray:
    """[2, vocab] after a few tokens."""
    graph, ids = build_graph(made), np.random.default_rng(1).integers(0, made.model.vocab, (tokens, 2))
    decoder = Decoder(graph, RandomParams(graph, 0, made), 2, made.build.context, exact)
    return [decoder.step(now, np.full(2, t)) for t, now in enumerate(ids)][-1]


def changed(made: Spec, name: str, **fields) -> Spec:
    mixers = made.model.mixers | {name: replace(made.model.mixers[name], **fields)}
    return replace(made, model=replace(made.model, mixers=mixers))


@pytest.mark.slow
@pytest.mark.parametrize("build", ({}, {"activations": "f32"}), ids=("bf16", "f32"))
def test_kernel_of_a_latent_cache(build):
    prove_kernel(model(**build))


@pytest.mark.slow
def test_kernel_of_an_expanded_cache():
    """Keys and values of each head, of different widths; a rank has 2 + 3 + 1 of the heads, or padding."""
    prove_kernel(model(mla_cache="expanded"))


@pytest.mark.slow
def test_kernel_of_heads_in_blocks():
    """32 heads of 24 and 32 columns through ring slots that hold 16 and 12 of them; a latent that is no multiple of 16."""
    a = Mla(heads=32, kv_rank=40, nope_dim=24, rope_dim=8, v_dim=32, scale=0.6, rope=Rope(100.0))
    prove_kernel(spec(1, {"a": a}, {"dense": Mlp(width=50)}, "a", "dense", hidden=120, block_kib=40))


def test_both_caches_mean_the_same():
    assert np.allclose(*(logits(model(mla_cache=c), exact=True) for c in ("latent", "expanded")), rtol=0, atol=1e-5)


AXES = [("turned", {"scale": None}), ("turned", {"rope": None}), ("turned", {"rope": replace(TURNED.rope, layout="half")}),
        ("turned", {"rope": replace(TURNED.rope, scaling=None)}),
        ("turned", {"rope": replace(TURNED.rope, scaling=replace(YARN, attention_factor=1.0))}),
        ("turned", {"gate": Gate("sigmoid", "head")}), ("warm", {"rope": replace(WARM.rope, width=16)}), ("warm", {"query_temperature": None}),
        ("warm", {"query_temperature": QueryTemperature(2.0, 8, 0)}), ("bare", {"gate": Gate("sigmoid")}), ("bare", {"scale": None})]


@pytest.mark.slow
def test_the_kernel_is_proven_on_a_model_that_every_axis_changes():
    """By more than a kernel may be off: one that left the axis out would be caught."""
    made = model()
    want = logits(made)
    for name, fields in AXES:
        off = np.abs(logits(changed(made, name, **fields)) - want).max(1) / np.ptp(want, axis=1)
        assert off.max() > LOGITS, (name, fields, off)
