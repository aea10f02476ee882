"""Attention over a positional cache: grouped-query, and multi-head latent in its absorbed form."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value, Weight


def rope_half(x, positions, base: float, width: int):
    """Half-split rotary embedding (Su et al., 2021) of the first `width` features. x [R, heads, head_dim], f32."""
    half = width // 2
    inverse = jnp.exp(-jnp.log(jnp.float32(base)) * (jnp.arange(half, dtype=jnp.float32) * 2 / width))
    angle = positions.astype(jnp.float32)[:, None] * inverse
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., :half], x[..., half:width]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, x[..., width:]], axis=-1)


@dataclass(frozen=True)
class QkNormRope(Op):
    """Per head: y = r(rope(r(rms(x) w))), each part only where the model has it. One op for q and for k."""
    q: Value
    k: Value
    q_out: Value
    k_out: Value
    q_norm: Weight | None
    k_norm: Weight | None
    eps: float
    head_dim: int
    base: float | None
    width: int
    kind = "qk_norm_rope"
    rounds = "after the norm, after the rotation"

    def inputs(self):
        return (self.q, self.k)

    def outputs(self):
        return (self.q_out, self.k_out)

    def weights(self):
        return tuple(w for w in (self.q_norm, self.k_norm) if w is not None)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.q_out.name: spread[self.q.name], self.k_out.name: spread[self.k.name]}

    def cost(self):
        return Cost(flops=10 * (self.q.width + self.k.width))

    def meaning(self, env):
        for x, y, w in ((self.q, self.q_out, self.q_norm), (self.k, self.k_out, self.k_norm)):
            v = env[x].reshape(env[x].shape[0], -1, self.head_dim)
            if w is not None:
                v = env.r(v * jax.lax.rsqrt(jnp.mean(v * v, -1, keepdims=True) + self.eps) * env.w(w))
            if self.base is not None:
                v = rope_half(v, env.positions, self.base, self.width)
            env.put(y, v.reshape(env[x].shape))


@dataclass(frozen=True)
class GqaAttention(Op):
    """o_h = r(softmax(head_dim^-1/2 q_h K^T) V) over tokens 0..position; the new k and v are appended first."""
    q: Value
    k: Value
    v: Value
    o: Value
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    state: str
    kind = "gqa_attention"
    rounds = "softmax weights before the value product; o"

    def inputs(self):
        return (self.q, self.k, self.v)

    def outputs(self):
        return (self.o,)

    def states(self):
        return (State(self.state, (2, self.kv_heads, self.head_dim), "bf16", positional=True),)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.o.name: spread[self.q.name]}

    def cost(self):
        return Cost(flops=4 * self.heads * self.head_dim * self.context)

    def meaning(self, env):
        rows, groups = env.rows, self.heads // self.kv_heads
        new = jnp.stack([env[self.k], env[self.v]], 1).reshape(rows, 2, self.kv_heads, self.head_dim)
        cache = env.append(self.state, new)                                             # [R, T, 2, kv_heads, head_dim]
        q = env[self.q].reshape(rows, self.kv_heads, groups, self.head_dim)
        s = jnp.einsum("rkgd,rtkd->rkgt", q, cache[:, :, 0], precision="highest") * self.head_dim ** -0.5
        o = env.attend(s, lambda p: jnp.einsum("rkgt,rtkd->rkgd", p, cache[:, :, 1], precision="highest"))
        env.put(self.o, jnp.where(env.active[:, None], o.reshape(rows, -1), 0.0))


@dataclass(frozen=True)
class MlaAttention(Op):
    """Absorbed multi-head latent attention (DeepSeek-V2, 2024): scores against the cached latent and the shared key.

    ql_h = r(q_nope_h U_h^T); s_t = (nope + rope)^-1/2 (ql_h . latent_t + q_rope_h . key_t); o_h = r(r(sum_t p_t latent_t) V_h)."""
    q: Value
    latent: Value
    key: Value
    o: Value
    k_up: Weight                        # [kv_rank, heads * nope_dim]
    v_up: Weight                        # [kv_rank, heads * v_dim]
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    context: int
    state: str
    kind = "mla_attention"
    rounds = "ql; softmax weights before the value product; the latent sum; o"

    def inputs(self):
        return (self.q, self.latent, self.key)

    def outputs(self):
        return (self.o,)

    def weights(self):
        return (self.k_up, self.v_up)

    def states(self):
        return (State(self.state, (self.kv_rank + self.rope_dim,), "bf16", positional=True),)

    def needs(self, spread):
        return {self.latent.name: "whole", self.key.name: "whole"}

    def gives(self, spread):
        return {self.o.name: spread[self.q.name]}

    def cost(self):
        return Cost(flops=2 * self.heads * (2 * self.kv_rank + self.rope_dim) * self.context)

    def meaning(self, env):
        rows, nope = env.rows, self.nope_dim
        cache = env.append(self.state, jnp.concatenate([env[self.latent], env[self.key]], -1))       # [R, T, kv_rank + rope]
        latent, key = cache[..., :self.kv_rank], cache[..., self.kv_rank:]
        q = env[self.q].reshape(rows, self.heads, nope + self.rope_dim)
        up = env.w(self.k_up).reshape(self.kv_rank, self.heads, nope)
        ql = env.r(jnp.einsum("rhn,khn->rhk", q[..., :nope], up, precision="highest"))
        s = jnp.einsum("rhk,rtk->rht", ql, latent, precision="highest")
        s = (s + jnp.einsum("rhe,rte->rht", q[..., nope:], key, precision="highest")) * (nope + self.rope_dim) ** -0.5
        o = env.r(env.attend(s, lambda p: jnp.einsum("rht,rtk->rhk", p, latent, precision="highest")))
        o = jnp.einsum("rhk,khv->rhv", o, env.w(self.v_up).reshape(self.kv_rank, self.heads, self.v_dim), precision="highest")
        env.put(self.o, jnp.where(env.active[:, None], o.reshape(rows, -1), 0.0))
