"""Random matrices as the quantisers in use store them, made by hand from their definitions: tensors beside a name, and the values
that they stand for. Nothing of mkgen is used here.
"""
from __future__ import annotations

import ml_dtypes
import numpy as np
from ml_dtypes import bfloat16

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ = (0, 2, 4, 6, 1, 3, 5, 7)               # the column that nibble i of a word holds

CONFIG = {"gptq": {"quant_method": "gptq", "bits": 4}, "gptq_v2": {"bits": 4, "checkpoint_format": "gptq_v2"}}


def e4m3(rng, n: int, k: int) -> np.ndarray:
    codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x38                                          # no NaN
    return codes.view(ml_dtypes.float8_e4m3fn)


def scale(rng, shape, size: float, dtype=np.float32) -> np.ndarray:
    return (rng.uniform(.5, 1, shape) * size).astype(dtype)


def words(nibbles: np.ndarray) -> np.ndarray:
    """[A, 8 B] in 0..15 -> i32 [A, B], the first in the lowest bits."""
    out = np.zeros((len(nibbles), nibbles.shape[1] // 8), np.uint32)
    for i in range(8):
        out |= nibbles[:, i::8].astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def pairs(nibbles: np.ndarray) -> np.ndarray:
    return (nibbles[:, 0::2] | nibbles[:, 1::2] << 4).astype(np.uint8)


def over(scales: np.ndarray, group: int, k: int) -> np.ndarray:
    return np.repeat(scales.astype(np.float32), group, axis=1)[:, :k]


def fp8_block(rng, n, k):
    q, s = e4m3(rng, n, k), scale(rng, (-(-n // 128), -(-k // 128)), 1 / 200 / k ** .5)
    full = np.kron(s, np.ones((128, 128), np.float32))[:n, :k]
    return {"": q, "_scale_inv": s}, q.astype(np.float32) * full


def fp8_tensor(rng, n, k):
    q, s = e4m3(rng, n, k), scale(rng, (), 1 / 200 / k ** .5)
    return {"": q, "_scale": s}, q.astype(np.float32) * s


def fp8_channel(rng, n, k):
    q, s = e4m3(rng, n, k), scale(rng, (n, 1), 1 / 200 / k ** .5, bfloat16)
    return {"": q, "_scale": s, "/input_scale": np.float32(1)}, q.astype(np.float32) * s.astype(np.float32)


def int8(rng, n, k):
    q, s = rng.integers(-127, 128, (n, k), dtype=np.int8), scale(rng, (n, 1), 1 / 70 / k ** .5)
    return {"": q, "_scale": s}, q.astype(np.float32) * s


def mxfp4(rng, n, k):
    q, s = rng.integers(0, 16, (n, k), dtype=np.uint8), rng.integers(-1, 2, (n, k // 32)) - round(np.log2(3 * k ** .5))
    return {"_packed": pairs(q), "_scale": (s + 127).astype(np.uint8)}, E2M1[q] * over(2.0 ** s, 32, k)


def mxfp4_blocks(rng, n, k):
    made, values = mxfp4(rng, n, k)
    return {"_blocks": made["_packed"].reshape(n, k // 32, 16), "_scales": made["_scale"]}, values


def nvfp4(rng, n, k):
    q, tensor = rng.integers(0, 16, (n, k), dtype=np.uint8), scale(rng, (), 1 / 600 / k ** .5)
    s = rng.uniform(50, 400, (n, k // 16)).astype(ml_dtypes.float8_e4m3fn)
    return {"": pairs(q), "_scale": s, "_scale_2": tensor, "/input_scale": np.float32(1)}, E2M1[q] * over(s, 16, k) * tensor


def nvfp4_packed(rng, n, k):
    made, _ = nvfp4(rng, n, k)
    whole = scale(rng, (1,), 600 * k ** .5)
    q = np.stack([made[""] & 15, made[""] >> 4], 2).reshape(n, k)
    tensors = {"_packed": made[""], "_scale": made["_scale"], "_global_scale": whole, "/input_global_scale": np.ones(1, np.float32)}
    return tensors, E2M1[q] * over(made["_scale"], 16, k) * (np.float32(1) / whole)


def int4_packed(rng, n, k, group=32, zero=False):
    q, s = rng.integers(0, 16, (n, k), dtype=np.uint8), scale(rng, (n, k // group), 1 / 5 / k ** .5, bfloat16)
    z = rng.integers(0, 16, (n, k // group), dtype=np.uint8) if zero else np.full((n, k // group), 8, np.uint8)
    made = {"_packed": words(q), "_scale": s, "_shape": np.array([n, k], np.int64)}
    if zero:
        made["_zero_point"] = words(np.pad(z.T, ((0, 0), (0, -n % 8)))).T
    return made, (q.astype(np.float32) - over(z, group, k)) * over(s, group, k)


def gptq(rng, n, k, group=128, zero=True, less=1, order=None):
    q, s = rng.integers(0, 16, (n, k), dtype=np.uint8), scale(rng, (n, k // group), 1 / 5 / k ** .5, np.float16)
    z = rng.integers(1, 16, (n, k // group), dtype=np.uint8) if zero else np.full((n, k // group), 8, np.uint8)
    of = np.arange(k) // group if order is None else order
    made = {".qweight": words(q).reshape(n, -1).T, ".scales": s.T, ".g_idx": of.astype(np.int32),
            ".qzeros": words(np.pad((z - less).T, ((0, 0), (0, -n % 8))))}
    # of a k-th of eight rows a word of qweight has: pack along K
    made[".qweight"] = words(q).T
    return made, (q.astype(np.float32) - z.astype(np.float32)[:, of]) * s.astype(np.float32)[:, of]


def gptq_v2(rng, n, k):
    return gptq(rng, n, k, less=0)


def awq(rng, n, k, group=64):
    q, s = rng.integers(0, 16, (n, k), dtype=np.uint8), scale(rng, (n, k // group), 1 / 5 / k ** .5, np.float16)
    z = rng.integers(0, 16, (n, k // group), dtype=np.uint8)

    def packed(a):                           # [K, N] -> [K, N/8]
        a = a.reshape(len(a), -1, 8)[:, :, AWQ]
        return words(a.reshape(len(a), -1))
    made = {".qweight": packed(q.T), ".qzeros": packed(z.T), ".scales": s.T}
    return made, (q.astype(np.float32) - over(z, group, k)) * over(s, group, k)


KINDS = {f.__name__: f for f in (fp8_block, fp8_tensor, fp8_channel, int8, mxfp4, mxfp4_blocks, nvfp4, nvfp4_packed, int4_packed, gptq,
                                 gptq_v2, awq)}
FORMAT = {"fp8_block": "fp8_block", "fp8_tensor": "fp8", "fp8_channel": "fp8", "int8": "int8", "mxfp4": "mxfp4", "mxfp4_blocks": "mxfp4",
          "nvfp4": "nvfp4", "nvfp4_packed": "nvfp4", "int4_packed": "int4_g32", "gptq": "int4_g128_zero_f16",
          "gptq_v2": "int4_g128_zero_f16", "awq": "int4_g64_zero_f16"}


def named(name: str, made: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Suffixes -> tensor names beside `name`."""
    stem = name.removesuffix(".weight")
    parent = name.removesuffix("weight")
    return {(stem + end if end.startswith(".") else parent + end[1:] if end.startswith("/") else name + end): a for end, a in made.items()}


def quantised(kind, name: str, shape: tuple[int, ...], rng) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """The tensors of a random matrix [N, K], or of a stack of them, and its values; `kind`: of KINDS, or such a function."""
    make = KINDS.get(kind, kind)
    if len(shape) == 2:
        made, values = make(rng, *shape)
        return named(name, made), values
    each = [make(rng, *shape[1:]) for _ in range(shape[0])]
    return named(name, {end: np.stack([m[end] for m, _ in each]) for end in each[0][0]}), np.stack([v for _, v in each])
