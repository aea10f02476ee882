"""Answers of other people's attention modules: weights, inputs and outputs of one layer each, into answers.npz beside this file.

    python make.py          needs torch and transformers (made with 2.13.0 and 5.24.0), which the tests do not
"""
from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import torch

TOKENS, WINDOW = 24, 7


def module(model: str, name: str):
    return getattr(importlib.import_module(f"transformers.models.{model}.modeling_{model}"), name)


def config(model: str, name: str, **more):
    made = getattr(importlib.import_module(f"transformers.models.{model}.configuration_{model}"), name)
    sizes = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=32,
                 layer_types=["sliding_attention", "full_attention"], sliding_window=WINDOW, max_position_embeddings=512)
    made = made(**(sizes | more))
    made._attn_implementation = "eager"
    return made


def answer(attention: torch.nn.Module, cos_sin, window: int | None) -> dict[str, np.ndarray]:
    """Random weights (norms near 1), one sequence; every token sees itself and at most `window` in all."""
    rng = np.random.default_rng(7)
    with torch.no_grad():
        for name, p in attention.named_parameters():
            w = rng.standard_normal(p.shape) / (p.shape[-1] ** 0.5 if p.ndim > 1 else 1)
            p.copy_(torch.from_numpy(1 + 0.2 * w if "norm" in name else w))
        x = torch.from_numpy(rng.standard_normal((1, TOKENS, 24))).float()
        apart = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS)[None]
        seen = (apart >= 0) & (apart < (window or TOKENS))
        mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min)[None, None]
        y = attention.float().eval()(hidden_states=x, position_embeddings=cos_sin, attention_mask=mask)[0]
        return {"x": x[0].numpy(), "y": y[0].numpy()} | {n: p.numpy() for n, p in attention.named_parameters()}


def tables(rotary: torch.nn.Module, *more):
    x, positions = torch.zeros(1, TOKENS, 24), torch.arange(TOKENS)[None]
    return rotary(x, positions, *more)


def cases():
    c = config("minimax_m2", "MiniMaxM2Config", rotary_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    yield "full_norm", module("minimax_m2", "MiniMaxM2Attention")(c, 1), tables(module("minimax_m2", "MiniMaxM2RotaryEmbedding")(c)), None
    ropes = {k: {"rope_type": "default", "rope_theta": b, "partial_rotary_factor": 0.5} for k, b in
             (("full_attention", 5e6), ("sliding_attention", 1e4))}
    c = config("mimo_v2_flash", "MiMoV2FlashConfig", num_attention_heads=8, v_head_dim=12, attention_value_scale=0.707, rope_parameters=ropes)
    rotary = module("mimo_v2_flash", "MiMoV2FlashRotaryEmbedding")(c)
    for i, (name, window) in enumerate((("sinks", WINDOW), ("narrow_values", None))):
        yield name, module("mimo_v2_flash", "MiMoV2FlashAttention")(c, i), tables(rotary, c.layer_types[i]), window
    yarn = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 4.0,
            "beta_slow": 1.0, "attention_factor": 1.2}
    for gating in ("per-head", "per-element"):
        c = config("laguna", "LagunaConfig", gating=gating, num_attention_heads_per_layer=[6, 4],
                   rope_parameters={"full_attention": yarn, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})
        rotary = module("laguna", "LagunaRotaryEmbedding")(c)
        yield f"softplus_{gating.replace('-', '_')}", module("laguna", "LagunaAttention")(c, 1, 4), tables(rotary, "full_attention"), None
    c = config("muse_spark", "MuseSparkTextConfig", qk_scale_factor=3.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    yield ("output_norm", module("muse_spark", "MuseSparkTextAttention")(c, 0),
           tables(module("muse_spark", "MuseSparkTextRotaryEmbedding")(c)), WINDOW)
    for name, model, prefix in (("clip", "olmo", "Olmo"), ("clip_behind_norm", "olmoe", "Olmoe")):
        c = config(model, f"{prefix}Config", head_dim=6, clip_qkv=0.8, rope_parameters={"rope_type": "default", "rope_theta": 100.0})
        yield name, module(model, f"{prefix}Attention")(c, 0), tables(module(model, f"{prefix}RotaryEmbedding")(c)), None


def frequencies():
    """Of a head of 64 features, as transformers stretches them."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    llama3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
    yarn = dict(factor=32.0, original_max_position_embeddings=4096, beta_fast=32.0, beta_slow=1.0)
    for name, kind, base, more in (("linear", "linear", 1e6, dict(factor=8.0)), ("llama3", "llama3", 5e5, llama3),
                                   ("yarn", "yarn", 1.5e5, yarn), ("yarn_whole", "yarn", 1.5e5, yarn | dict(truncate=False))):
        c = LlamaConfig(hidden_size=256, num_attention_heads=4, head_dim=64, rope_parameters=dict(rope_type=kind, rope_theta=base, **more))
        f, size = ROPE_INIT_FUNCTIONS[kind](c, "cpu")
        yield name, np.append(f.numpy(), np.float32(size))
    yield "plain", np.append((1.0 / 1e6 ** (torch.arange(0, 64, 2).float() / 64)).numpy(), np.float32(1))


if __name__ == "__main__":
    out = {f"{name}/{key}": a.astype(np.float32) for name, attention, cos_sin, window in cases()
           for key, a in answer(attention, cos_sin, window).items()}
    out |= {f"frequencies/{name}": f for name, f in frequencies()}
    np.savez_compressed(Path(__file__).parent / "answers.npz", **out)
    print(*sorted(f"{k} {list(v.shape)}" for k, v in out.items()), sep="\n")
