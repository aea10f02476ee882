"""Sub-layers in plain jnp, as each rank runs them inside shard_map. Widths here are a rank's own.

Each maker takes a kind of the spec and gives a `Part`: its arrays, its states and its function. All rows are active and none is
at its first token: what a served batch needs for that is left out, in the rival's favour.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from mkgen.spec.model import Activation, Gqa, Linear, Mla, Mlp, Rope
from rival.arrays import AXES, Leaf, even, fused, row_parallel, shared_heads, sharded_vector, vector, whole


LANES = 128


class NoRival(Exception):
    """The spec has something that the rival was not written for."""


@dataclass(frozen=True)
class Setup:
    """What all layers share."""

    hidden: int
    ep: int
    tp: int
    rows: int
    context: int
    exact: bool = False  # float32 throughout, for the comparison with the reference
    masked_write: bool = False  # caches are written by a select, not in place
    padded: bool = False  # to whole tiles, the arrays whose odd widths make XLA relay them out inside a loop

    @property
    def ranks(self) -> int:
        return self.ep * self.tp

    @property
    def lanes(self) -> int:
        return LANES if self.padded else 1

    @property
    def act(self):
        return jnp.float32 if self.exact else jnp.bfloat16


@dataclass(frozen=True)
class State:
    """An array that a step reads and writes; global shape."""

    shape: tuple[int, ...]
    spec: P
    dtype: str
    positional: bool = False


@dataclass(frozen=True)
class Part:
    """apply(weights, states, h [B, hidden], positions [B]) -> (y [B, hidden] summed over ranks, states)."""

    leaves: dict[str, Leaf]
    apply: Callable
    states: dict[str, State] = field(default_factory=dict)


def need(condition: bool, what: str) -> None:
    if not condition:
        raise NoRival(what)


def product(s: Setup, x, w):
    """x W, accumulated in float32."""
    precision = lax.Precision.HIGHEST if s.exact else None
    return jnp.dot(x.astype(s.act), w.astype(s.act), precision=precision, preferred_element_type=jnp.float32)


def contract(s: Setup, form: str, a, b):
    precision = lax.Precision.HIGHEST if s.exact else None
    return jnp.einsum(form, a.astype(s.act), b.astype(s.act), precision=precision, preferred_element_type=jnp.float32)


def total(s: Setup, x):
    """The sum over all ranks, on the wire as activations."""
    return lax.psum(x.astype(s.act), AXES)


def rms(x, w, eps: float, offset: float = 0.0):
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (offset + w)


def activation(act: Activation, g, u):
    need(act.kind in ("silu", "situ") and not act.limit and not act.up_offset, f"activation {act}")
    if act.kind == "silu":
        return g * jax.nn.sigmoid(act.alpha * g) * u
    return act.beta * jnp.tanh(g / act.beta) * jax.nn.sigmoid(g) * act.linear_beta * jnp.tanh(u / act.linear_beta)


def split(x, *widths):
    """Columns of x, run by run."""
    ends = np.cumsum(widths)
    return [x[..., end - n : end] for n, end in zip(widths, ends)]


# -- attention -----------------------------------------------------------------------------------------------------------


def write_token(s: Setup, cache, new, positions, axis: int = -2):
    """cache [B, ...] with new (without the axis of tokens) at each row's position: in place, one small slice a row."""
    axis %= cache.ndim
    new = jnp.expand_dims(new, axis).astype(cache.dtype)
    if s.masked_write:
        t = jnp.arange(cache.shape[axis]).reshape((-1,) + (1,) * (cache.ndim - 1 - axis))
        return jnp.where(t == positions.reshape((-1,) + (1,) * (cache.ndim - 1)), new, cache)
    for row in range(s.rows):
        at = [row] + [0] * (cache.ndim - 1)
        at[axis] = positions[row]
        cache = lax.dynamic_update_slice(cache, new[row : row + 1], at)
    return cache


def attend(scores, positions):
    """Softmax over tokens 0 .. position; scores [B, ..., T] float32."""
    live = jnp.arange(scores.shape[-1]) <= positions.reshape((-1,) + (1,) * (scores.ndim - 1))
    return jax.nn.softmax(jnp.where(live, scores, -jnp.inf), axis=-1)


def turned(rope: Rope | None, x, positions):
    """Rotary embedding of x [B, heads, d], features j and j + width / 2 together."""
    if rope is None:
        return x
    need(rope.layout == "half" and rope.scaling is None, f"rope {rope}")
    width = rope.width or x.shape[-1]
    angle = positions[:, None, None] * rope.base ** (-jnp.arange(0, width, 2, dtype=jnp.float32) / width)
    a, b, rest = split(x, width // 2, width // 2, x.shape[-1] - width)
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle), rest], -1)


def gqa(name: str, a: Gqa, s: Setup) -> Part:
    plain = Gqa(a.heads, a.kv_heads, a.head_dim, rope=a.rope, qk_norm=a.qk_norm, gate=a.gate, scale=a.scale)
    need(a == plain, f"{name}: {a}")
    need(
        a.heads % s.ranks == 0 and (a.kv_heads % s.ranks == 0 or s.ranks % a.kv_heads == 0),
        f"{name}: heads over {s.ranks} ranks",
    )
    need(a.qk_norm is None or (a.qk_norm.scope == "head" and not a.qk_norm.after_rope), f"{name}: {a.qk_norm}")
    need(a.gate is None or (a.gate.act == "sigmoid" and a.gate.per == "channel"), f"{name}: {a.gate}")
    d, heads, kv = a.head_dim, a.heads // s.ranks, max(1, a.kv_heads // s.ranks)
    widths = [heads * d, kv * d, kv * d] + [heads * d] * bool(a.gate)
    which = [even, shared_heads(a.kv_heads), shared_heads(a.kv_heads), even]
    leaves = {
        "in": fused(s.hidden, s.ranks, [(f"{name}.{c}", n, w) for c, n, w in zip("qkvg", widths, which)], lanes=s.lanes),
        "out": row_parallel(f"{name}.o", a.heads * d, s.hidden),
    }
    if a.qk_norm:
        leaves |= {c: vector(f"{name}.{c}", d) for c in ("q_norm", "k_norm")}
    cache = State((s.rows, s.ranks * kv, s.context, d), P(None, AXES), "act", True)

    def apply(w, state, h, positions):
        q, k, v, *g = split(product(s, h, w["in"]), *widths)
        q, k, v = (x.reshape(s.rows, -1, d) for x in (q, k, v))
        if a.qk_norm:
            q, k = (rms(x, w[n], a.qk_norm.eps, a.qk_norm.offset) for x, n in ((q, "q_norm"), (k, "k_norm")))
        q, k = (turned(a.rope, x, positions) for x in (q, k))
        keys, values = (write_token(s, state[n], x, positions) for n, x in (("k", k), ("v", v)))
        q = q.reshape(s.rows, kv, heads // kv, d) * (a.scale or d**-0.5)
        p = attend(contract(s, "bgqd,bgtd->bgqt", q, keys), positions)
        o = contract(s, "bgqt,bgtd->bgqd", p, values).reshape(s.rows, -1)
        if g:
            o = o * jax.nn.sigmoid(g[0])
        return total(s, product(s, o, w["out"])), {"k": keys, "v": values}

    return Part(leaves, apply, {"k": cache, "v": cache})


def mla(name: str, a: Mla, s: Setup) -> Part:
    """Absorbed: the cache holds the latent and the shared key. Both low ranks are whole on every rank: reading them costs less
    than the exchange and the launches that sharing them out would."""
    plain = Mla(a.heads, a.kv_rank, a.nope_dim, a.v_dim, a.rope_dim, a.q_rank, a.rank_eps, a.scale, gate=a.gate)
    need(a == plain and a.q_rank > 0 and a.heads % s.ranks == 0, f"{name}: {a}")
    need(a.gate is None or (a.gate.act == "sigmoid" and a.gate.per == "channel"), f"{name}: {a.gate}")
    heads, nope, key, vd, rank = a.heads // s.ranks, a.nope_dim, a.rope_dim, a.v_dim, a.kv_rank
    widths = [a.q_rank, rank + key] + [heads * vd] * bool(a.gate)
    parts = [(f"{name}.q_a", widths[0], whole), (f"{name}.kv_a", widths[1], whole), (f"{name}.g", heads * vd, even)]
    leaves = {
        "in": fused(s.hidden, s.ranks, parts[: len(widths)], lanes=s.lanes),
        "q_norm": vector(f"{name}.q_norm", a.q_rank),
        "kv_norm": vector(f"{name}.kv_norm", rank),
        "q_b": fused(a.q_rank, s.ranks, [(f"{name}.q_b", heads * (nope + key), even)]),
        "k_up": fused(rank, s.ranks, [(f"{name}.k_up", heads * nope, even)]),
        "v_up": fused(rank, s.ranks, [(f"{name}.v_up", heads * vd, even)]),
        "out": row_parallel(f"{name}.o", a.heads * vd, s.hidden),
    }
    cache = State(
        (s.rows, rank + key, s.context), P(), "act", True
    )  # tokens on the lanes, as XLA's products want them: else it turns the cache

    def apply(w, state, h, positions):
        q, kv, *g = split(product(s, h, w["in"]), *widths)
        q = product(s, rms(q, w["q_norm"], a.rank_eps), w["q_b"]).reshape(s.rows, heads, nope + key) * (
            a.scale or (nope + key) ** -0.5
        )
        token = jnp.concatenate([rms(kv[:, :rank], w["kv_norm"], a.rank_eps), kv[:, rank:]], -1)
        cache = write_token(s, state["latent"], token, positions, axis=2)
        up = contract(s, "bhn,khn->bhk", q[..., :nope], w["k_up"].reshape(rank, heads, nope))
        p = attend(contract(s, "bhk,bkt->bht", jnp.concatenate([up, q[..., nope:]], -1), cache), positions)
        o = contract(s, "bht,bkt->bhk", p, cache)[..., :rank]  # of the shared key too: a slice of the cache would be strided
        o = contract(s, "bhk,khv->bhv", o, w["v_up"].reshape(rank, heads, vd)).reshape(s.rows, -1)
        if g:
            o = o * jax.nn.sigmoid(g[0])
        return total(s, product(s, o, w["out"])), {"latent": cache}

    return Part(leaves, apply, {"latent": cache})


# -- recurrence ----------------------------------------------------------------------------------------------------------


def linear(name: str, a: Linear, s: Setup) -> Part:
    """Gated delta net and Kimi Delta Attention."""
    groups = a.key_heads or a.heads
    plain = Linear(
        a.heads, a.key_dim, a.value_dim, a.key_heads, decay=a.decay, qk_eps=a.qk_eps, conv=a.conv, norm=a.norm, gate=a.gate
    )
    need(a == plain and a.conv and not a.conv.bias and a.norm and a.gate and not a.gate.rank, f"{name}: {a}")
    need(a.norm.scope == "head" and not a.norm.gate_first and not a.gate.bias, f"{name}: {a.norm}, {a.gate}")
    need(groups % s.ranks == 0 and a.decay.kind != "constant", f"{name}: {groups} key heads over {s.ranks} ranks; {a.decay}")
    keys, heads, kd, vd, taps = groups // s.ranks, a.heads // s.ranks, a.key_dim, a.value_dim, a.conv.taps
    channels = heads * (kd if a.decay.per == "channel" else 1)
    mixed = 2 * keys * kd + heads * vd
    low = a.decay.rank
    widths = [mixed, heads * vd, low or channels, heads]
    parts = [
        (f"{name}.q", keys * kd, even),
        (f"{name}.k", keys * kd, even),
        (f"{name}.v", heads * vd, even),
        (f"{name}.g", heads * vd, even),
        (f"{name}.f_a", low, whole) if low else (f"{name}.f", channels, even),
        (f"{name}.b", heads, even),
    ]
    convs = [(f"{name}.{c}_conv", n, even) for c, n in (("q", keys * kd), ("k", keys * kd), ("v", heads * vd))]
    leaves = {
        "in": fused(s.hidden, s.ranks, parts, lanes=s.lanes),
        "conv": fused(taps, s.ranks, convs, "f32"),
        "a": sharded_vector(f"{name}.a", a.heads),
        "dt_bias": sharded_vector(f"{name}.dt_bias", channels * s.ranks),
        "o_norm": vector(f"{name}.o_norm", vd),
        "out": row_parallel(f"{name}.o", a.heads * vd, s.hidden),
    }
    if low:
        leaves["f_b"] = fused(low, s.ranks, [(f"{name}.f_b", channels, even)])
    states = {
        "window": State((s.rows, taps - 1, s.ranks * mixed), P(None, None, AXES), "f32"),
        "matrix": State((s.rows, a.heads, kd, vd), P(None, AXES), "f32"),
    }

    def unit(x):
        return x * lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + a.qk_eps)

    def apply(w, state, h, positions):
        x, g, z, b = split(product(s, h, w["in"]), *widths)
        window = jnp.concatenate([state["window"], x[:, None]], 1)
        x = jax.nn.silu(jnp.sum(window * w["conv"], axis=1))
        q, k, v = (y.reshape(s.rows, n, -1) for y, n in zip(split(x, keys * kd, keys * kd, heads * vd), (keys, keys, heads)))
        q, k = (jnp.repeat(unit(y), heads // keys, axis=1) for y in (q, k))
        z = ((product(s, z, w["f_b"]) if low else z) + w["dt_bias"]).reshape(s.rows, heads, -1)
        rate = w["a"][:, None]
        decay = (
            jnp.exp(a.decay.floor * jax.nn.sigmoid(rate * z))
            if a.decay.kind == "floor"
            else jnp.exp(-rate * jax.nn.softplus(z))
        )
        # with S' = diag(decay) S + k (x) u, q^T S' = (decay q)^T S + (q.k) u: both sums read the old S, so one pass makes them
        old, q = state["matrix"], q * kd**-0.5
        seen, o = (jnp.sum(old * (decay * y)[..., None], axis=2) for y in (k, q))
        u = jax.nn.sigmoid(b)[..., None] * (v - seen)
        m = old * decay[..., None] + k[..., None] * u[:, :, None]
        o = o + jnp.sum(q * k, -1, keepdims=True) * u
        gate = jax.nn.sigmoid(g) if a.gate.act == "sigmoid" else jax.nn.silu(g)
        o = rms(o, w["o_norm"], a.norm.eps).reshape(s.rows, -1) * gate
        return total(s, product(s, o, w["out"])), {"window": window[:, 1:], "matrix": m}

    return Part(leaves, apply, states)


def mlp(name: str, f: Mlp, s: Setup) -> Part:
    need(f.gated and not f.bias and f.width % s.ranks == 0, f"{name}: {f}")
    n = f.width // s.ranks
    leaves = {
        "in": fused(s.hidden, s.ranks, [(f"{name}.gate", n, even), (f"{name}.up", n, even)]),
        "out": row_parallel(f"{name}.down", f.width, s.hidden),
    }

    def apply(w, state, h, positions):
        return total(s, product(s, activation(f.activation, *split(product(s, h, w["in"]), n, n)), w["out"])), {}

    return Part(leaves, apply)
