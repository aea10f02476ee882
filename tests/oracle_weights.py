"""The oracle's weights, made again: a function of (case, size, seed) and of each tensor's name and shape.

The rule is the one under which the oracle's answers were made (see oracle/README.md): Philox, keyed by the first 16
bytes of sha256 of "case|size|seed|name"; a scale for each kind of tensor; rounded to bf16, so that a checkpoint in
float32 and one in bf16 are the same.
"""
from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
from ml_dtypes import bfloat16

ROUTERS = ("mlp.gate.weight", "block_sparse_moe.gate.weight")


def make_weights(key: tuple, shapes: Mapping[str, tuple[int, ...]], prefix: str = "") -> dict[str, np.ndarray]:
    """Tensor name -> bf16 array of its shape. key: (case, size, seed). `prefix` of the names does not enter."""
    return {name: tensor(key, name.removeprefix(prefix), shape) for name, shape in shapes.items()}


def tensor(key: tuple, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, bf16."""
    return draw(generator(*key, name), name, shape).astype(np.float32).astype(bfloat16)


def generator(*key) -> np.random.Generator:
    """The oracle's random numbers for a key."""
    digest = hashlib.sha256("|".join(map(str, key)).encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float64 values by the kind that the name tells."""
    fan = np.sqrt(shape[-1])
    if name.endswith("A_log"):
        return np.log(rng.uniform(1.0, 16.0, shape))
    if name.endswith("dt_bias"):
        return rng.uniform(-3.0, 0.5, shape)
    if len(shape) == 1 and "norm" in name:
        return rng.uniform(0.6, 1.4, shape)
    normal = rng.standard_normal(shape)
    if name.endswith("e_score_correction_bias"):
        return normal * 0.15
    if "embed_tokens" in name or len(shape) == 3:                                  # the latter: convolutions
        return normal * 0.5
    if "lm_head" in name:
        return normal * (2.0 / fan)
    return normal * ((1.5 if name.endswith(ROUTERS) else 1.0) / fan)


def digest(tensors: Mapping[str, np.ndarray]) -> str:
    """sha256 over names, shapes and float32 bytes, in the order of the names."""
    sha = hashlib.sha256()
    for name, a in sorted(tensors.items()):
        sha.update(f"{name} {list(a.shape)}\n".encode())
        sha.update(np.ascontiguousarray(a, "<f4").tobytes())
    return sha.hexdigest()
