"""The same weights from checkpoints that lay them out otherwise: fused, stacked, transposed, interleaved. The same bytes come out."""
import numpy as np
import pytest
from hubs import KIMI, QWEN, checkpoint, hub_tensors, load, role_values, same, small_plan
from ml_dtypes import bfloat16

from mkgen.errors import MkgenError
from mkgen.pack.image import tape_image
from mkgen.pack.write import pack
from mkgen.reference.params import TensorParams

GATED = QWEN | {"mixers": {"attention": {"heads": 8, "kv_heads": 2, "head_dim": 40, "gate": {}}},
                "checkpoint": {"attention.g": "model.layers.{layer}.self_attn.g_proj.weight"}}
A, E = "model.layers.{layer}.self_attn.", "model.layers.{layer}.mlp.experts."
LAYOUTS = {
    "fused": {"attention.q": A + "qkvg | rows 0:320", "attention.k": A + "qkvg | rows 320:400", "attention.v": A + "qkvg | rows 400:480",
              "attention.g": A + "qkvg | rows 480:800"},
    "by head, gate behind query": {"attention.q": A + "q_proj.weight | each 80 0:40", "attention.g": A + "q_proj.weight | each 80 40:80"},
    "groups of heads": {"attention.q": A + "w | each 400 0:160 | reshape", "attention.g": A + "w | each 400 160:320",
                        "attention.k": A + "w | each 400 320:360", "attention.v": A + "w | each 400 360:400"},
    "transposed": {"attention.q": A + "q | T", "attention.o": A + "o | T", "moe.router": "model.layers.{layer}.gate | T"},
    "stacked": {"moe.expert_gate": E + "gate", "moe.expert_up": E + "up", "moe.expert_down": E + "down"},
    "stacked and fused": {"moe.expert_gate": E + "gate_up | rows 0:38", "moe.expert_up": E + "gate_up | rows 38:76", "moe.expert_down": E + "down"},
    "stacked, turned, interleaved": {"moe.expert_gate": E + "gate_up | T | each 2 0:1", "moe.expert_up": E + "gate_up | T | each 2 1:2",
                                     "moe.expert_down": E + "down | T"},
    "each expert fused": {"moe.expert_gate": E + "{expert}.w13.weight | rows 0:38", "moe.expert_up": E + "{expert}.w13.weight | rows 38:76"},
}


def plan_for(folder, patterns, sizes=GATED, base="qwen3_30b_a3b", ranks=4, **build):
    folder.mkdir(parents=True, exist_ok=True)
    return small_plan(folder, base, sizes | {"checkpoint": sizes.get("checkpoint", {}) | patterns}, ranks, replicate=[], **build)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights by role, and what the plain layout of them is packed to."""
    folder = tmp_path_factory.mktemp("plain")
    plan = plan_for(folder, {})
    values = role_values(plan.spec.model, seed=8)
    pack(plan, checkpoint(folder / "hub", hub_tensors(plan.spec.model, values=values)), folder / "out")
    return values, load(plan, folder / "out")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_bytes(tmp_path, plain, layout):
    values, want = plain
    plan = plan_for(tmp_path, LAYOUTS[layout])
    t = hub_tensors(plan.spec.model, values=values)
    assert any(" | " in p for p in LAYOUTS[layout].values()) or layout == "stacked"
    seen = []
    figures = pack(plan, checkpoint(tmp_path / "hub", t), tmp_path / "out", progress=lambda *p: seen.append(p))
    assert seen[-1][:2] == (sum(a.nbytes for a in t.values()),) * 2, "every tensor is read once"
    assert figures["parameters"] == sum(a.size for a in values.values())
    for got, old in zip(load(plan, tmp_path / "out"), want):
        same(got.tape, old.tape)
        same(got.experts["experts"], old.experts["experts"])
        same(got.embedding, old.embedding)
    source = TensorParams(t, plan.spec.model.checkpoint)
    same(tape_image(plan, 1, source), want[1].tape)
    weight = plan.weights["moe.expert_up"]
    same(source.expert(weight, 1, 3), np.ascontiguousarray(values["moe.expert_up", 1, 3].T.astype(np.float32)))


def test_convolutions_and_latents_out_of_one_tensor(tmp_path):
    """Of a kind with convolutions, low ranks and a latent attention, over four ranks with shares that do not divide."""
    p = "language_model.model.layers.{layer}.self_attn."
    n = 8 * 24
    fused = {f"kda.{c}": p + f"qkv | rows {i * n}:{i * n + n}" for i, c in enumerate("qkv")}
    fused |= {f"kda.{c}_conv": p + f"conv1d.weight | rows {i * n}:{i * n + n}" for i, c in enumerate("qkv")}
    fused |= {"mla.q_a": p + "qkv_a | rows 0:41", "mla.kv_a": p + "qkv_a | rows 41:83", "kda.a_log": p + "A | reshape"}
    plan = plan_for(tmp_path / "plain", {}, KIMI, "kimi_k3")
    values = role_values(plan.spec.model)
    pack(plan, checkpoint(tmp_path / "a", hub_tensors(plan.spec.model, values=values)), tmp_path / "plain_out", convert=True)
    plan = plan_for(tmp_path / "fused", fused, KIMI, "kimi_k3")
    t = hub_tensors(plan.spec.model, values=values)
    t = {k: a.reshape(1, 1, -1, 1) if k.endswith(".A") else a for k, a in t.items()}
    pack(plan, checkpoint(tmp_path / "b", t), tmp_path / "fused_out", convert=True)
    for got, old in zip(load(plan, tmp_path / "fused_out"), load(plan, tmp_path / "plain_out")):
        same(got.tape, old.tape)


def test_biases_of_stacked_experts(tmp_path):
    roles = [f"moe.expert_{c}_bias" for c in ("gate", "up", "down")]
    each = {r: f"model.layers.{{layer}}.e.{{expert}}.{r}" for r in roles}
    stack = dict(zip(roles, (E + "gate_up_bias | each 2 0:1", E + "gate_up_bias | each 2 1:2", E + "down_bias")))
    sizes = QWEN | {"ffns": {"moe": {**QWEN["ffns"]["moe"], "bias": True}}}
    plan = plan_for(tmp_path / "each", each, sizes)
    values = role_values(plan.spec.model)
    pack(plan, checkpoint(tmp_path / "a", hub_tensors(plan.spec.model, values=values)), tmp_path / "each_out")
    plan = plan_for(tmp_path / "stack", stack | LAYOUTS["stacked, turned, interleaved"], sizes)
    t = hub_tensors(plan.spec.model, values=values)
    assert t["model.layers.1.mlp.experts.gate_up_bias"].shape == (8, 76)
    pack(plan, checkpoint(tmp_path / "b", t), tmp_path / "stack_out")
    for got, old in zip(load(plan, tmp_path / "stack_out"), load(plan, tmp_path / "each_out")):
        same(got.experts["experts"], old.experts["experts"])
        assert got.experts["experts"].any()


def test_a_stack_of_experts_is_read_one_at_a_time(tmp_path, monkeypatch):
    from mkgen.pack.hub import Checkpoint
    plan = plan_for(tmp_path, LAYOUTS["stacked, turned, interleaved"])
    hub = checkpoint(tmp_path / "hub", hub_tensors(plan.spec.model))
    read, largest = Checkpoint.read, []

    def watched(self, name, start=0, stop=None):
        out = read(self, name, start, stop)
        if "experts" in name:
            largest.append(len(out))
        return out
    monkeypatch.setattr(Checkpoint, "read", watched)
    pack(plan, hub, tmp_path / "out")
    assert set(largest) == {1} and len(largest) == 2 * 8 * 2, "gate and up of an expert are one read"


@pytest.mark.parametrize("patterns, change, words", [
    (LAYOUTS["fused"], lambda t, n: {n: t[n][:-1]}, "its cuts take|is [799, 336], not [>=800, 336]"),
    (LAYOUTS["fused"], lambda t, n: {n: np.concatenate([t[n], t[n][:30]])}, "unused: {n} (rows 800:830 of [830, 336] are taken by no role"),
    ({"attention.q": A + "q_proj.weight | each 80 0:40"}, None, "rows 40:80, 120:160, ... 8 runs of [640, 336] are taken by no role"),
    (LAYOUTS["stacked and fused"], lambda t, n: {n: t[n][:7]}, "not one of each of 8 experts"),
    (LAYOUTS["stacked, turned, interleaved"], lambda t, n: {n: t[n].swapaxes(1, 2)}, "is [8, 76, 336], not [8, 336, 76]"),
    (LAYOUTS["by head, gate behind query"], lambda t, n: {n: t[n][:600]}, "is [600, 336], not [640, 336]")])
def test_the_uncut_tensor_is_checked(tmp_path, patterns, change, words):
    plan = plan_for(tmp_path, patterns)
    if change is None:
        fixed = plan_for(tmp_path / "both", LAYOUTS["by head, gate behind query"])
        t = hub_tensors(fixed.spec.model) | {n: a for n, a in hub_tensors(plan_for(tmp_path / "plain", {}).spec.model).items() if "g_proj" in n}
    else:
        t = hub_tensors(plan.spec.model)
        name = next(n for part in ("qkvg", "gate_up", "q_proj") for n in t if "layers.1." in n and part in n)
        t |= change(t, name)
        words = words.replace("{n}", name)
    with pytest.raises(MkgenError) as caught:
        pack(plan, checkpoint(tmp_path / "hub", t), tmp_path / "out")
    assert any(w in str(caught.value) for w in words.split("|")), str(caught.value)
    assert not (tmp_path / "out.partial").exists()
    if "no role" in words:
        pack(plan, tmp_path / "hub", tmp_path / "out", ignore=["*qkvg", "*q_proj.weight"])


def test_all_float_dtypes(tmp_path, plain):
    """f32 and f16 that hold bf16 values: nothing is rounded, in any layout."""
    values, want = plain
    for dtype in (np.float32, np.float16):
        patterns = LAYOUTS["stacked, turned, interleaved"]
        plan = plan_for(tmp_path / dtype.__name__, patterns)
        t = {n: a.astype(dtype) if dtype == np.float32 or a.dtype == bfloat16 and "embed" in n else a
             for n, a in hub_tensors(plan.spec.model, values=values).items()}
        figures = pack(plan, checkpoint(tmp_path / dtype.__name__ / "hub", t), tmp_path / dtype.__name__ / "out")
        if dtype == np.float32:
            assert not figures["rounded_to_bf16"]
        same(load(plan, tmp_path / dtype.__name__ / "out")[2].experts["experts"], want[2].experts["experts"])
