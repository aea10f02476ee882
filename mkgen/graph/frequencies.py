"""Rotary frequencies: constants of the spec, made once in float32 as published implementations make them.

At position p a pair of features is turned by p f, a float32 product: at a million positions the last bit of f moves the angle by
0.06, so f is rounded where the codes that models were trained with round it.
"""
from __future__ import annotations

import math

import numpy as np

from mkgen.spec.parts import Rope, RopeScaling

F32 = np.float32


def frequencies(rope: Rope, width: int) -> np.ndarray:
    """float32 [width / 2], in radians a position: base^(-2 j / width) (Su et al., 2021), stretched as `rope.scaling` says."""
    wavelengths = _power(rope.base, np.arange(0, width, 2, dtype=F32) / F32(width))         # over 2 pi
    plain, s = F32(1) / wavelengths, rope.scaling
    if s is None:
        return plain
    if s.kind == "linear":
        return plain / F32(s.factor)
    return _by_rotations(plain, wavelengths, s, rope.base, width) if s.kind == "yarn" else _by_wavelength(plain, s)


def magnitude(rope: Rope) -> float:
    """What cosine and sine are multiplied by: yarn's attention factor (arXiv 2309.00071, section 3.4), else 1."""
    s = rope.scaling
    if s is None or s.kind != "yarn":
        return 1.0
    if s.attention_factor is not None:
        return s.attention_factor
    return 0.1 * math.log(s.factor) + 1.0 if s.factor > 1 else 1.0


def lanes(rope: Rope, width: int, head_dim: int) -> np.ndarray:
    """float32 [head_dim]: the frequency of each feature's pair, negative at the pair's first feature (whose sine is subtracted),
    0 where nothing is turned."""
    f, out = frequencies(rope, width), np.zeros(head_dim, F32)
    if rope.layout == "half":
        out[:width] = np.concatenate([-f, f])
    else:
        out[:width] = np.stack([-f, f], 1).reshape(-1)
    return out


def _power(base: float, exponents: np.ndarray) -> np.ndarray:
    """base^exponents, correctly rounded to float32: the library's own pow is a bit off now and then."""
    return (np.float64(F32(base)) ** exponents.astype(np.float64)).astype(F32)


def _by_wavelength(plain: np.ndarray, s: RopeScaling) -> np.ndarray:
    """llama3: wavelengths beyond original_context / low_freq_factor are divided, those within / high_freq_factor kept, a line
    between."""
    wavelength = F32(2 * math.pi) / plain
    span = F32(s.high_freq_factor - s.low_freq_factor) or F32(1)           # one factor: a step, and nothing between
    smooth = (F32(s.original_context) / wavelength - F32(s.low_freq_factor)) / span
    between = (F32(1) - smooth) * plain / F32(s.factor) + smooth * plain
    out = np.where(wavelength > F32(s.original_context / s.low_freq_factor), plain / F32(s.factor), between)
    return np.where(wavelength < F32(s.original_context / s.high_freq_factor), plain, out)


def _by_rotations(plain: np.ndarray, wavelengths: np.ndarray, s: RopeScaling, base: float, width: int) -> np.ndarray:
    """yarn: features that turn more than beta_fast times within the original context are kept, those that turn less than
    beta_slow times divided, a line over the features between."""
    def feature(rotations: float) -> float:
        return width * math.log(s.original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))
    low, high = feature(s.beta_fast), feature(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high += 0.001 if low == high else 0
    kept = F32(1) - np.clip((np.arange(width // 2, dtype=F32) - F32(low)) / F32(high - low), F32(0), F32(1))
    return F32(1) / (F32(s.factor) * wavelengths) * (F32(1) - kept) + plain * kept
