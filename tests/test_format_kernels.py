"""Whole kernels whose weights are stored in many formats at once, against the reference: on the tape and in the experts."""
from __future__ import annotations

import pytest

from mkgen.check import check_plan
from mkgen.emit.module import module_files
from mkgen.emit.render import render_kernel
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.prove.verify import verdict
from mkgen.prove.worker_verify import prove
from mkgen.spec.model import Gqa, Mla, Mlp, Moe, Rope
from mkgen.targets import load_target
from small_specs import prove_kernel, spec

CASES = {
    "tape": lambda: spec(2, {"attention": Gqa(heads=6, kv_heads=2, head_dim=80, rope=Rope(1e4, 48))}, {"mlp": Mlp(width=512)},
                         "attention*2", "mlp*2", hidden=384,
                         formats={"attention.q": "int8", "attention.k": "int8", "attention.v": "fp8", "attention.o": "fp8_block",
                                  "mlp.gate": "int4_g32_zero", "mlp.up": "int4_g64", "mlp.down": "nvfp4", "head": "mxfp4"}),
    "experts": lambda: spec(1, {"attention": Gqa(heads=2, kv_heads=1, head_dim=32)}, {"moe": Moe(experts=4, top_k=2, width=160, latent=288)},
                            "attention*2", "moe*2", hidden=256, activations="f32", formats={"experts": "mxfp4", "rest": "int8"}),
}
CASES |= {
    # both halves of kv_b are decoded on the chip; widths of 24 and 200 leave short last groups
    "latent": lambda: spec(1, {"a": Mla(heads=3, q_rank=40, kv_rank=24, nope_dim=20, rope_dim=12, v_dim=24), "b": Mla(
        heads=2, q_rank=40, kv_rank=144, nope_dim=32, rope_dim=16, v_dim=32)}, {"mlp": Mlp(width=300)}, "a b", "mlp*2", hidden=200,
        activations="f32", formats={"a.kv_b": "int4_g32_zero", "b.kv_b": "int8", "b.q_b": "nvfp4", "mlp.up": "int4_g128_f16"}),
    "latent_block": lambda: spec(2, {"a": Mla(heads=4, q_rank=40, kv_rank=144, nope_dim=32, rope_dim=16, v_dim=32), "b": Mla(
        heads=2, q_rank=40, kv_rank=24, nope_dim=20, rope_dim=12, v_dim=24)}, {"mlp": Mlp(width=256)}, "a b", "mlp*2", hidden=256,
        formats={"a.kv_b": "fp8_block", "mlp.down": "fp8"}),
}
EXPERTS = {
    ("int8", 2, "f32", (3,)), ("fp8_block", 2, "bf16", (3,)), ("nvfp4", 1, "f32", (8,)), ("int4_g128", 2, "bf16", (8,)),
    ("int4_g32_zero_f16", 1, "bf16", (1, 8)), ("fp8_g256", 2, "bf16", (3,)),
}


@pytest.mark.slow
@pytest.mark.parametrize("fmt, parallel, activations, rows", sorted(EXPERTS))
def test_experts(fmt, parallel, activations, rows):
    """Experts [320 -> 2 x 192 -> 320] on two ranks, by experts or by columns; the rank's 96 rows of down cut groups of 128."""
    prove_kernel(spec(2, {"attention": Gqa(heads=2, kv_heads=1, head_dim=32)}, {"moe": Moe(experts=4, top_k=2, width=192)},
                      "attention", "moe", hidden=320, activations=activations, rows=rows, expert_parallel=2 // parallel,
                      tensor_parallel=parallel, formats={"experts": fmt}))


@pytest.mark.slow
@pytest.mark.parametrize("fmt, rows", [("bf16", (3,)), ("nvfp4", (1, 8))])
def test_experts_in_loops(monkeypatch, fmt, rows):
    """Experts too large for one basic block: loops over panels, of gate and up, then of down. Proven in this process, whose bounds are moved."""
    monkeypatch.setattr("mkgen.plan.experts.STRAIGHT_WEIGHTS", 0)
    monkeypatch.setattr("mkgen.plan.section.BLOCK_WEIGHTS", 2 * 320 * 128)
    made = spec(1, {"attention": Gqa(heads=2, kv_heads=1, head_dim=32)}, {"moe": Moe(experts=4, top_k=2, width=192)}, "attention", "moe",
                hidden=320, rows=rows, formats={"experts": fmt})
    kernel = render_kernel(make_plan(made, build_graph(made), load_target("tpu7x")))
    assert "each_run(s, some)" in kernel
    rungs = prove(made)
    assert verdict(rungs) == "pass", "\n".join(str(r) for r in rungs if r.verdict == "fail")


@pytest.mark.parametrize("name", CASES)
def test_the_module_is_sound(name):
    """The checker finds nothing; the text is as tidy as any generated module."""
    made = CASES[name]()
    plan = make_plan(made, build_graph(made), load_target("tpu7x"))
    assert not check_plan(plan)
    assert module_files(plan)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name):
    prove_kernel(CASES[name]())
