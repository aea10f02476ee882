"""Ffns of Hugging Face's model classes: as a spec says them, where their weights are, and what the classes answered.

`tests/oracle/ffn.npz` holds inputs and outputs of the module of one layer of each (transformers 5.24, float32, weights by the rule of
oracle_weights.py, which `draw` extends to these modules' tensors); `ffn.json` the seeds, layers and shapes.
"""
from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
from ml_dtypes import bfloat16

from mkgen.spec.model import Activation, Mlp, Moe, Router

FOLDER = Path(__file__).resolve().parent / "oracle"
FACTS = json.loads((FOLDER / "ffn.json").read_text())
ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight", "router.weight", "router.layer.weight")


def each(folder: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    names = {"expert_gate": gate, "expert_up": up, "expert_down": down}
    return {role: f"{folder}.experts.{{expert}}.{name}.weight" for role, name in names.items()}


def shared(folder: str) -> dict[str, str]:
    return {f"shared_{c}": f"{folder}.{c}_proj.weight" for c in ("gate", "up", "down")}


MLP, SPARSE, FEED, MIXER = (f"model.layers.{{layer}}.{n}" for n in ("mlp", "block_sparse_moe", "feed_forward", "mixer"))
MIXER = MIXER.replace("model", "backbone")
PLAIN = {role: name for role, name in (each(MIXER) | shared(f"{MIXER}.shared_experts")).items() if "gate" not in role}
SPARSE_NAMES = {"router": f"{SPARSE}.gate.weight"} | each(SPARSE, "w1", "w3", "w2")
LOGITS = Router("logits", after="softmax", renorm=False)

CASES = {
    "mixtral": (Moe(8, 2, 48), SPARSE_NAMES),
    "minimax_m1": (Moe(8, 2, 48), SPARSE_NAMES),
    "cohere2_moe": (Moe(8, 3, 48, router=LOGITS), {"router": f"{MLP}.gate.weight"} | each(MLP)),
    "deepseek_v2": (Moe(8, 3, 48, shared_width=96, router=Router(renorm=False)),
                    {"router": f"{MLP}.gate.weight"} | each(MLP) | shared(f"{MLP}.shared_experts")),
    "deepseek_v3": (Moe(8, 3, 48, shared_width=48,
                        router=Router("sigmoid", bias=True, groups=4, group_top_k=2, renorm_eps=1e-20, scale=2.5)),
                    {"router": f"{MLP}.gate.weight", "router_bias": f"{MLP}.gate.e_score_correction_bias"} | each(MLP)
                    | shared(f"{MLP}.shared_experts")),
    "qwen3_next": (Moe(8, 3, 48, shared_width=48, shared_gate=True),
                   {"router": f"{MLP}.gate.weight", "shared_scale": f"{MLP}.shared_expert_gate.weight"} | each(MLP)
                   | shared(f"{MLP}.shared_expert")),
    "gpt_oss": (Moe(8, 3, 48, bias=True, activation=Activation(alpha=1.702, limit=1.0, up_offset=1.0),
                    router=Router("logits", linear_bias=True, after="softmax", renorm=False)),
                {"router": f"{MLP}.router.weight", "router_linear_bias": f"{MLP}.router.bias",
                 "expert_gate": f"{MLP}.experts.gate_up_proj | T | each 2 0:1", "expert_up": f"{MLP}.experts.gate_up_proj | T | each 2 1:2",
                 "expert_down": f"{MLP}.experts.down_proj | T", "expert_gate_bias": f"{MLP}.experts.gate_up_proj_bias | each 2 0:1",
                 "expert_up_bias": f"{MLP}.experts.gate_up_proj_bias | each 2 1:2", "expert_down_bias": f"{MLP}.experts.down_proj_bias"}),
    "llama4": (Moe(8, 1, 48, shared_width=48, router=Router("logits", after="sigmoid", renorm=False, scale_input=True)),
               {"router": f"{FEED}.router.weight", "expert_gate": f"{FEED}.experts.gate_up_proj | T | rows 0:48",
                "expert_up": f"{FEED}.experts.gate_up_proj | T | rows 48:96", "expert_down": f"{FEED}.experts.down_proj | T"}
               | shared(f"{FEED}.shared_expert")),
    "granite_hybrid": (Moe(8, 3, 48, router=LOGITS),
                       {"router": f"{SPARSE}.router.layer.weight", "expert_gate": f"{SPARSE}.input_linear.weight | rows 0:48",
                        "expert_up": f"{SPARSE}.input_linear.weight | rows 48:96", "expert_down": f"{SPARSE}.output_linear.weight"}),
    "nemotron_h": (Moe(8, 3, 48, gated=False, shared_width=48, activation=Activation("relu2"),
                       router=Router("sigmoid", bias=True, renorm_eps=1e-20, scale=2.5)),
                   {"router": f"{MIXER}.gate.weight", "router_bias": f"{MIXER}.gate.e_score_correction_bias"} | PLAIN),
    "gemma2": (Mlp(96, activation=Activation("gelu_tanh")), {c: f"{MLP}.{c}_proj.weight" for c in ("gate", "up", "down")}),
}


def weights(case: str) -> dict[str, np.ndarray]:
    """Hub name -> float32 array of the tensors of that layer's module."""
    facts = FACTS[case]
    return {name: draw((case, "tiny", facts["seed"], name), tuple(shape)) for name, shape in facts["shapes"].items()}


def draw(key: tuple, shape: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    rng, name = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little"))), key[-1]
    size = 0.15 if name.endswith("e_score_correction_bias") else 0.2 if len(shape) == 1 else 1 / np.sqrt(shape[-1])
    spread = 1.5 if name.endswith(ROUTERS) and len(shape) == 2 else 1.0
    return (rng.standard_normal(shape) * (size * spread)).astype(np.float32).astype(bfloat16).astype(np.float32)


def answers(case: str) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, outputs) [rows, hidden] of the module."""
    with np.load(FOLDER / "ffn.npz") as arrays:
        return arrays[f"{case}.in"], arrays[f"{case}.out"]
