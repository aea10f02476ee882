"""Kimi Delta Attention's stateful ops: a short convolution, the delta rule, and the gated norm on its output."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value, Weight


@dataclass(frozen=True)
class ShortConv(Op):
    """Causal depthwise convolution over the last `taps` inputs, then SiLU: y_t = r(silu(sum_tau w[tau] x_{t - taps + 1 + tau}))."""
    xs: tuple[Value, ...]
    ys: tuple[Value, ...]
    ws: tuple[Weight, ...]
    taps: int
    state: str
    kind = "short_conv"
    rounds = "y"

    def inputs(self):
        return self.xs

    def outputs(self):
        return self.ys

    def weights(self):
        return self.ws

    def states(self):
        return (State(self.state, (self.taps - 1, sum(x.width for x in self.xs)), "f32"),)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {y.name: spread[x.name] for x, y in zip(self.xs, self.ys)}

    def cost(self):
        return Cost(flops=2 * self.taps * sum(x.width for x in self.xs))

    def meaning(self, env):
        x = jnp.concatenate([env[v] for v in self.xs], -1)
        window = jnp.concatenate([env.state(self.state), x[:, None]], 1)                  # [R, taps, C]
        w = jnp.concatenate([env.w(v) for v in self.ws], -1)
        y = jax.nn.silu(jnp.sum(window * w, axis=1))
        env.set_state(self.state, window[:, 1:])
        at = 0
        for v in self.ys:
            env.put(v, y[:, at:at + v.width])
            at += v.width


@dataclass(frozen=True)
class DeltaRule(Op):
    """One step of the delta rule with a decay per key channel (Kimi Linear, arXiv 2510.26692), per head, in float32:

    q = l2(q) head_dim^-1/2, k = l2(k), a = exp(floor sigmoid(exp(A_log) (z + dt_bias))), beta = sigmoid(b);
    S <- diag(a) S;  S <- S + k (x) beta (v - S^T k);  o = r(S^T q)."""
    q: Value
    k: Value
    v: Value
    z: Value
    beta: Value
    o: Value
    a: Weight
    dt_bias: Weight
    heads: int
    head_dim: int
    floor: float
    qk_eps: float
    state: str
    kind = "delta_rule"
    rounds = "o"

    def inputs(self):
        return (self.q, self.k, self.v, self.z, self.beta)

    def outputs(self):
        return (self.o,)

    def weights(self):
        return (self.a, self.dt_bias)

    def states(self):
        return (State(self.state, (self.heads, self.head_dim, self.head_dim), "f32"),)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.o.name: spread[self.q.name]}

    def cost(self):
        return Cost(flops=8 * self.heads * self.head_dim ** 2)

    def meaning(self, env):
        rows = env.rows
        q, k, v, z = (env[x].reshape(rows, self.heads, self.head_dim) for x in (self.q, self.k, self.v, self.z))
        unit = lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + self.qk_eps)
        q, k = unit(q) * self.head_dim ** -0.5, unit(k)
        a, dt = env.w(self.a)[:, None], env.w(self.dt_bias).reshape(self.heads, self.head_dim)
        decay = jnp.exp(self.floor * jax.nn.sigmoid(a * (z + dt)))
        s = env.state(self.state) * decay[..., None]                                      # [R, heads, key, value]
        delta = jax.nn.sigmoid(env[self.beta])[..., None] * (v - jnp.sum(s * k[..., None], axis=2))
        s = s + k[..., None] * delta[:, :, None]
        env.set_state(self.state, s)
        o = jnp.sum(s * q[..., None], axis=2).reshape(rows, -1)
        env.put(self.o, jnp.where(env.active[:, None], o, 0.0))


@dataclass(frozen=True)
class GatedNorm(Op):
    """Per head: y = r(r(rms(x) w) * r(sigmoid(g)))."""
    x: Value
    g: Value
    y: Value
    w: Weight
    head_dim: int
    eps: float
    kind = "gated_norm"
    rounds = "the norm, the gate, y"

    def inputs(self):
        return (self.x, self.g)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: spread[self.x.name]}

    def cost(self):
        return Cost(flops=8 * self.x.width)

    def meaning(self, env):
        x = env[self.x].reshape(env.rows, -1, self.head_dim)
        n = env.r(x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.eps) * env.w(self.w))
        env.put(self.y, n.reshape(env.rows, -1) * env.r(jax.nn.sigmoid(env[self.g])))
