"""Mixers: what lets a token see those before it. Attention over a cache, or a linear recurrence."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mkgen.spec.parts import Gate, Norm, QkNorm, QueryTemperature, Rope


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention with a positional cache. A token sees itself and those before it, at most `window` in all, or
    those of its own `chunk` of consecutive positions."""
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int | None = None                 # of a value head; None: head_dim
    scale: float | None = None                   # of the scores; None: head_dim^-1/2
    rope: Rope | None = None
    qk_norm: QkNorm | None = None
    query_temperature: QueryTemperature | None = None
    window: int = 0                              # visible positions, the current one included; 0: all
    chunk: int = 0
    sinks: bool = False                          # a learned logit a head joins the softmax and has no value
    softcap: float = 0.0                         # scores become softcap tanh(scores / softcap); 0: none
    value_scale: float = 1.0
    output_norm: Norm | None = None              # of each head's output, before the gate
    gate: Gate | None = None
    bias: tuple[str, ...] = ()                   # which of q, k, v, o have one
    clip: float = 0.0                            # q, k and v are cut to [-clip, clip]: v as projected, q and k in front of the
                                                 # rotation, behind a norm that stands there; 0: none


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention. How it is cached (latent, or expanded into heads) is the build's choice."""
    heads: int
    kv_rank: int
    nope_dim: int
    v_dim: int
    rope_dim: int = 0                            # of the key shared by all heads; rotated only with `rope`; 0: there is none
    q_rank: int = 0                              # 0: queries straight from the hidden width (role `q`)
    rank_eps: float = 1e-6
    scale: float | None = None                   # None: (nope_dim + rope_dim)^-1/2
    rope: Rope | None = None
    query_temperature: QueryTemperature | None = None
    gate: Gate | None = None


@dataclass(frozen=True)
class Conv:
    """A causal depthwise convolution over the last `taps` inputs, then SiLU, on what the recurrence reads."""
    taps: int
    bias: bool = False


@dataclass(frozen=True)
class Decay:
    """a of the recurrence, one number a head or a key channel; z is a projection of the input (role `f`; through a bottleneck
    of `rank` where that is not 0: roles f_a, f_b).

    softplus: a = exp(-exp(A_log) softplus(z + dt_bias)). floor: a = exp(floor sigmoid(exp(A_log) (z + dt_bias))).
    constant: a = exp(-s (1 - layer / (layers - 1 + 1e-5) + 1e-5)) with s = 2^(-8 (head + 1) / heads), of no input (lightning).
    """
    kind: Literal["softplus", "floor", "constant"] = "softplus"
    per: Literal["head", "channel"] = "head"
    rank: int = 0
    floor: float = -5.0                          # of kind floor


@dataclass(frozen=True)
class LinearGate:
    """What the recurrence's output is multiplied with, act(z), z a projection of the input (role `g`; with `rank` g_a, g_b)."""
    act: Literal["silu", "sigmoid"] = "silu"
    rank: int = 0
    bias: bool = False                           # of the second projection of a low-rank gate


@dataclass(frozen=True)
class LinearNorm:
    """RMS norm of the output: of each head (weight [value_dim]), or over `groups` equal parts of all heads' channels (weight
    [heads * value_dim]; one group: full width). gate_first: norm(o * gate), otherwise norm(o) * gate."""
    scope: Literal["head", "groups"] = "head"
    groups: int = 1
    eps: float = 1e-6
    gate_first: bool = False


@dataclass(frozen=True)
class Linear:
    """One linear recurrence a head, over S [key_dim, value_dim], in float32:

    S <- diag(a) S;  S <- S + k (x) b (v - [delta] S^T k);  o = S^T (scale q) (+ D v).

    Gated delta net, KDA, lightning attention and Mamba-2 are settings of it. `key_heads` fewer than heads:
    each serves a run of heads (Mamba-2's groups: q is C, k is B, v is x).
    """
    heads: int                                   # value heads
    key_dim: int
    value_dim: int
    key_heads: int | None = None                 # None: heads
    delta: bool = True
    decay: Decay = field(default_factory=Decay)
    write: Literal["sigmoid", "step", "one"] = "sigmoid"      # of role `b`; softplus(z + dt_bias), as in Mamba-2; 1
    write_scale: float = 1.0                     # multiplies b
    step_min: float = 0.0                        # softplus(z + dt_bias) of the decay (and of write: step) is at least this
    step_max: float = 0.0                        # and at most this; 0: no bound
    qk_l2: bool = True                           # q and k divided by their length
    qk_eps: float = 1e-6
    scale: float | None = None                   # of q; None: key_dim^-1/2
    act: bool = False                            # SiLU on q, k, v where there is no convolution (lightning)
    conv: Conv | None = None
    skip: bool = False                           # + D v, one D a head
    norm: LinearNorm | None = None
    gate: LinearGate | None = None
