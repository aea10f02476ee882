"""Makes linear_mixers.npz: single mixers of transformers, in float32, one token at a time.

    python tests/oracle/linear_mixers.py        where torch and transformers are installed (made with 2.13.0 and 5.24.0)

For each class the inputs x [2, 10, hidden] and outputs y of the same shape. Weights are `weights(name, shape)` of each
parameter of the class, and are not stored.
"""
from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np

HIDDEN, LAYERS, LAYER, BATCH, TOKENS = 64, 4, 1, 2, 10
COMMON = dict(hidden_size=HIDDEN, num_hidden_layers=LAYERS, vocab_size=32, num_attention_heads=4, num_key_value_heads=2)
KINDS = ["linear_attention"] * (LAYERS - 1) + ["full_attention"]
GDN = dict(COMMON, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
           linear_conv_kernel_dim=4, layer_types=KINDS)
CASES = {  # class -> (module, configuration class, its fields)
    "Qwen3NextGatedDeltaNet": ("qwen3_next", "Qwen3NextConfig", GDN),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", "Qwen3_5MoeTextConfig", GDN),
    "OlmoHybridGatedDeltaNet": ("olmo_hybrid", "OlmoHybridConfig", dict(GDN, linear_num_key_heads=4, linear_allow_neg_eigval=True)),
    "KimiLinearDeltaAttention": ("kimi_linear", "KimiLinearConfig", dict(
        COMMON, num_key_value_heads=4, linear_num_heads=4, linear_head_dim=16, linear_conv_kernel_dim=4, rms_norm_eps=1e-5,
        layer_types=KINDS, mlp_layer_types=["dense"] * LAYERS)),
    "MiniMaxLightningAttention": ("minimax", "MiniMaxConfig", dict(COMMON, head_dim=16, layer_types=KINDS)),
    "GraniteMoeHybridMambaLayer": ("granitemoehybrid", "GraniteMoeHybridConfig", dict(
        COMMON, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=24, mamba_n_groups=1, mamba_expand=2, mamba_chunk_size=8,
        mamba_conv_bias=True, layer_types=KINDS)),
    "NemotronHMamba2Mixer": ("nemotron_h", "NemotronHConfig", dict(
        hidden_size=HIDDEN, vocab_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, mamba_num_heads=8, mamba_head_dim=16,
        ssm_state_size=24, n_groups=2, expand=2, chunk_size=8, layers_block_type=KINDS)),
}


def weights(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """A parameter by its name in the class, float32."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name.endswith("A_log"):
        return np.log(rng.uniform(1, 16, shape)).astype(np.float32)
    if name.endswith("dt_bias"):
        return rng.uniform(-3, 0.5, shape).astype(np.float32)
    if "norm" in name or name == "D":
        return rng.uniform(0.5, 1.5, shape).astype(np.float32)
    return (rng.standard_normal(shape) * (0.5 if "conv" in name else shape[-1] ** -0.5)).astype(np.float32)


def inputs(name: str) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(name.encode())).standard_normal((BATCH, TOKENS, HIDDEN)).astype(np.float32)


def run(name: str) -> np.ndarray:
    import importlib

    import torch
    from transformers.cache_utils import DynamicCache
    module, config, fields = CASES[name]
    package = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = getattr(importlib.import_module(f"transformers.models.{module}.configuration_{module}"), config)(**fields)
    config._attn_implementation = "eager"
    mixer = getattr(package, name)(config, LAYER).eval()
    with torch.no_grad():
        for key, parameter in mixer.named_parameters():
            parameter.copy_(torch.from_numpy(weights(key, tuple(parameter.shape))))
        x, cache, out = torch.from_numpy(inputs(name)), None, []
        lightning = name.startswith("MiniMax")
        cache = package.MiniMaxCache() if lightning else DynamicCache(config=config)
        for t in range(TOKENS):
            token = x[:, t:t + 1]
            out.append(mixer(token, None, None, cache=cache)[0] if lightning else mixer(token, cache=cache))
    return torch.cat(out, 1).numpy()


if __name__ == "__main__":
    made = {}
    for each in CASES:
        print(each)
        made[each] = run(each)
    np.savez_compressed(Path(__file__).with_suffix(".npz"), **made)
