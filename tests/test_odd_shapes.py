"""Whole kernels of small specs whose widths do not fit: ranks and heads that are no multiple of anything, and kinds with
unfortunate names. Each is run as it is, not as a mini, against the reference."""
from __future__ import annotations

import pytest

from mkgen.spec.model import Conv, Decay, Gate, Gqa, Linear, LinearGate, LinearNorm, Mla, Mlp, Moe, Norm, Residual, Rope, Router
from small_specs import prove_kernel, spec

CASES = {
    # a latent of 24 features meets its shared key inside a block, and is padded to 32 on the tape
    "latent": lambda: spec(1, {"dot": Mla(heads=3, q_rank=40, kv_rank=24, nope_dim=20, rope_dim=12, v_dim=24, gate=Gate())},
                           {"silu": Mlp(width=100)}, "dot*2", "silu*2", hidden=200),
    # one KV head of 80 features a rank, a third of the hidden width over a multiple of 128, no norm on q and k
    "grouped": lambda: spec(2, {"jax": Gqa(heads=6, kv_heads=2, head_dim=80, rope=Rope(1e4, 48))},
                            {"lanes": Moe(experts=6, top_k=2, width=40, shared_width=50, router=Router("sigmoid", bias=True, renorm=False, scale=1.5))},
                            "jax*2", "lanes*2", hidden=336, kv_slots=3),
    # every layer opens a block of the residual; float32 activations
    "recurrent": lambda: spec(2, {"a": Linear(heads=6, key_dim=24, value_dim=24, conv=Conv(3), decay=Decay("floor", "channel", 20, -4.0),
                                          norm=LinearNorm(), gate=LinearGate("sigmoid"))},
                              {"b": Moe(experts=8, top_k=3, width=32, latent=96, latent_norm=Norm())}, "a*3", "b*3", hidden=192,
                              residual=Residual("block_softmax", block=1), activations="f32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name):
    prove_kernel(CASES[name]())
