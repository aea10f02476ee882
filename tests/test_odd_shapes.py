"""Whole kernels of small specs whose widths do not fit: ranks and heads that are no multiple of anything, and kinds with
unfortunate names. Each is run as it is, not as a mini, against the reference."""
from __future__ import annotations

from dataclasses import replace

import pytest

from mkgen.prove.verify import _run, verdict
from mkgen.spec import roles, schedule
from mkgen.spec.model import Build, Conv, Decay, Gate, Gqa, Linear, LinearGate, LinearNorm, Mla, Mlp, Model, Moe, Norm, Residual, Rope, Router, Run, Spec
from mkgen.spec.validate import validate

PER = {"model": "", "layer": ".{layer}", "expert": ".{layer}.{expert}"}


def spec(ranks: int, mixers: dict, ffns: dict, mixer: str, ffn: str, hidden: int, residual=Residual(), **build) -> Spec:
    runs = tuple(Run(*run) for run in zip(*(schedule.expand(schedule.parse(t)) for t in (mixer, ffn))))
    model = Model(name="odd", hidden=hidden, vocab=301, layers=len(runs), mixer=mixer, ffn=ffn, mixers=mixers, ffns=ffns,
                  schedule=runs, residual=residual)
    model = replace(model, checkpoint={t.role: t.role + PER[t.per] for t in roles.tensors(model).values()})
    small = dict(chip="tpu7x", mesh={"core": ranks}, expert_parallel=ranks, block_kib=96, rows=(3,), context=64, kv_tile=16,
                 ring_depth=3, expert_slots=2, kv_slots=4)
    made = Spec(model, Build(**(small | build)), "odd.yaml")
    assert not validate(made), validate(made)
    return made


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
    rungs = _run(CASES[name](), False)
    assert verdict(rungs) == "pass", "\n".join(str(r) for r in rungs if r.verdict == "fail")
