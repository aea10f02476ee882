"""The small parts that mixers, ffns and the stream share: norms, rotary embeddings, activations, gates."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """x scaled to a fixed size over its last axis, in float32.

    rms: x * rsqrt(mean(x^2) + eps); layer: the same of x - mean(x) (and + a bias, where `bias`).
    weight: 'after' the scaling, as * (offset + w); 'before' it, as x <- x * (offset + w); or 'none'.
    """
    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    offset: float = 0.0
    weight: Literal["after", "before", "none"] = "after"
    bias: bool = False                           # of a layer norm


@dataclass(frozen=True)
class RopeScaling:
    """How the rotary frequencies are stretched for contexts beyond the trained one.

    linear: all divided by `factor`. The others blend between divided and kept frequencies, by wavelength (the second kind:
    between original_context / low_freq_factor and / high_freq_factor) or by rotations within the original context
    (yarn, arXiv 2309.00071: between beta_slow and beta_fast; `truncate` rounds the ends of the ramp to whole features).
    """
    kind: Literal["linear", "llama3", "yarn"]        # as transformers calls the rope types
    factor: float
    original_context: int = 0
    low_freq_factor: float = 1.0                 # llama3
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0                      # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None        # yarn: multiplies cos and sin; None: 0.1 ln(factor) + 1


@dataclass(frozen=True)
class Rope:
    """Rotary embedding on the first `width` features of a head (all of them when None).

    layout: feature j is paired with j + width / 2 ('half'), or 2j with 2j + 1 ('interleaved')."""
    base: float = 10000.0
    width: int | None = None
    layout: Literal["half", "interleaved"] = "half"
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class Activation:
    """phi(g, u) of a gated ffn; phi(g) of a plain one, where `u` and its factor are left out.

    silu: g sigmoid(alpha g) u. gelu: g Phi(g) u, Phi of the normal distribution; gelu_tanh: its approximation by a tanh.
    relu: max(g, 0) u. relu2: max(g, 0)^2 u. situ: beta tanh(g / beta) sigmoid(g) linear_beta tanh(u / linear_beta). With `limit`, g is cut to at most limit and u to [-limit, limit] first; `up_offset` is added to u.
    """
    kind: Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "situ"] = "silu"
    alpha: float = 1.0                           # of silu
    limit: float = 0.0                           # 0: none
    up_offset: float = 0.0
    beta: float = 4.0                            # of situ
    linear_beta: float = 25.0


@dataclass(frozen=True)
class Gate:
    """o * act(z), where z = h W_g (a projection of its own, role `g`)."""
    act: Literal["sigmoid", "softplus"] = "sigmoid"
    per: Literal["channel", "head"] = "channel"


@dataclass(frozen=True)
class QkNorm:
    """Norm of queries and of keys: of each head, or of all heads together ('full', weight as wide as the projection)."""
    scope: Literal["head", "full"] = "head"
    eps: float = 1e-6
    offset: float = 0.0
    weight: Literal["after", "none"] = "after"
    after_rope: bool = False


@dataclass(frozen=True)
class QueryTemperature:
    """Queries at position p are multiplied by 1 + beta ln(1 + floor((p + shift) / length))."""
    beta: float
    length: int
    shift: int = 0
