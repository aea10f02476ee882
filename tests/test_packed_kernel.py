"""From a quantised, fused, stacked checkpoint through pack, load_weights and the generated kernel; the reference reads the same
folder."""
from __future__ import annotations

import importlib
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from hubs import checkpoint, hub_tensors
from jax.experimental.pallas import tpu as pltpu
from ml_dtypes import bfloat16
from small_specs import spec
from vendors import quantised

from mkgen.emit.module import write_module
from mkgen.graph.build import build_graph
from mkgen.pack.hub import Checkpoint
from mkgen.pack.write import pack
from mkgen.plan.planner import make_plan
from mkgen.prove.compare import LOGITS
from mkgen.reference.evaluate import Decoder
from mkgen.reference.params import TensorParams
from mkgen.spec.model import Gate, Gqa, Moe, Router
from mkgen.spec.validate import validate
from mkgen.targets import load_target

STEPS, ROWS = 4, 3
PATTERNS = {
    "attention.q": "l.{layer}.q.weight | each 128 0:64", "attention.g": "l.{layer}.q.weight | each 128 64:128",
    "attention.k": "l.{layer}.kv.weight | rows 0:128", "attention.v": "l.{layer}.kv.weight | rows 128:256",
    "moe.expert_gate": "l.{layer}.experts.gate_up | T | each 2 0:1", "moe.expert_up": "l.{layer}.experts.gate_up | T | each 2 1:2",
    "moe.expert_down": "l.{layer}.experts.down | T", "moe.shared_gate": "l.{layer}.shared.weight | rows 0:320",
    "moe.shared_up": "l.{layer}.shared.weight | rows 320:640", "moe.shared_down": "l.{layer}.shared_down | T"}
QUANTISED = {"q.weight": "fp8_block", "kv.weight": "awq", "gate_up": "mxfp4_blocks", "down": "mxfp4_blocks", "shared.weight": "nvfp4"}
FORMATS = {"attention.q": "fp8_block", "attention.g": "fp8_block", "attention.k": "int4_g64_zero_f16", "attention.v": "int4_g64_zero_f16",
           "experts": "mxfp4", "moe.shared_gate": "nvfp4", "moe.shared_up": "nvfp4"}


@pytest.mark.slow
def test_a_quantised_fused_checkpoint_through_the_kernel(tmp_path, monkeypatch):
    made = spec(2, {"attention": Gqa(heads=6, kv_heads=2, head_dim=64, gate=Gate())},
                {"moe": Moe(experts=6, top_k=2, width=64, shared_width=320, router=Router())}, "attention*2", "moe*2", hidden=384,
                rows=(ROWS,), formats=FORMATS)
    made = replace(made, model=replace(made.model, checkpoint=made.model.checkpoint | PATTERNS))
    assert not validate(made)
    plan = make_plan(made, build_graph(made), load_target(made.build.chip))

    rng, t = np.random.default_rng(4), {}
    for name, a in hub_tensors(made.model, seed=4).items():
        # choices far apart, norms about one
        scaled = a.astype(np.float32) * 4 if "router" in name else (1 + a).astype(bfloat16) if a.ndim == 1 else a
        a = scaled.astype(a.dtype)
        kind = QUANTISED.get(name.rpartition("l.")[2].partition(".")[2].removeprefix("experts.")) if name.startswith("l.") else None
        shape = a.shape if a.ndim == 2 else (len(a), *a.shape[:0:-1])                   # blocks are [out, in]
        t |= quantised(kind, name, shape, rng)[0] if kind else {name: a}
    assert "l.0.experts.down_blocks" in t and "l.1.q.weight_scale_inv" in t and "l.1.kv.qzeros" in t
    hub = checkpoint(tmp_path / "hub", t)
    figures = pack(plan, hub, tmp_path / "packed")
    assert not figures["converted"] and not figures["rounded_to_bf16"]

    write_module(plan, tmp_path / "packed_kernel")
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("packed_kernel")
    mesh = module.make_mesh(jax.devices()[:2])
    weights, state = module.load_weights(tmp_path / "packed", mesh), module.init_state(mesh, ROWS)
    step = module.make_decode_step(mesh, ROWS, interpret=pltpu.InterpretParams(uninitialized_memory="nan"))

    def reference(names):
        return Decoder(plan.graph, TensorParams(Checkpoint(hub), names), ROWS, made.build.context)
    decoder = reference(made.model.checkpoint)
    tokens = rng.integers(0, made.model.vocab, (STEPS, ROWS)).astype(np.int32)
    for now, ids in enumerate(tokens):
        positions = np.array([now, now, -1 if now < 2 else now - 2], np.int32)
        _, logits, state = step(weights, state, ids[:, None], positions)
        live = positions >= 0
        want, got = decoder.step(ids, positions)[live], np.asarray(module.whole_logits(logits))[live]
        error = np.abs(got - want).max(-1) / np.ptp(want, axis=-1)
        print(now, error)
        assert (error <= LOGITS).all()       # every router's choice included: with this seed none turns
        if now == 0:                         # what a wrong cut would do
            for one, two in (("q", "g"), ("k", "v"), ("expert_gate", "expert_up"), ("shared_gate", "shared_up")):
                kind = "attention" if len(one) == 1 else "moe"
                swapped = PATTERNS | {f"{kind}.{one}": PATTERNS[f"{kind}.{two}"], f"{kind}.{two}": PATTERNS[f"{kind}.{one}"]}
                other = reference(made.model.checkpoint | swapped).step(ids, positions)[live]
                assert (np.abs(got - other).max(-1) / np.ptp(other, axis=-1)).max() > LOGITS
