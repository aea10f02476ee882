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

    def lower(self, b):
        width = sum(b.place(x).width for x in self.xs)
        window = b.state(self.states()[0], (self.taps - 1, 8, width), "f32", "inputs, oldest first")
        held = b.buffer(b.own(self.state), (self.taps - 1, 8, width), "f32", "the window of this layer")
        read, write = f"{held}_read", f"{held}_write"
        b.semaphores(f"{held}_in", (), "window in")
        b.semaphores(f"{held}_out", (), "window out")
        size = 8 * (self.taps - 1) * width * 4
        b.transfer(read, ("m", "index"), f"{window}.at[index]", f"m.{held}", f"m.{held}_in", size,
                   "The layer's convolution window, in.", reads=(window[2:],), writes=(held,))
        b.transfer(write, ("m", "index"), f"m.{held}", f"{window}.at[index]", f"m.{held}_out", size,
                   "The layer's convolution window, out.", reads=(held,), writes=(window[2:],))
        b.start_early(read, "m", "index")
        b.wait(read, "m", "index")
        y = b.join(self.ys, self.name)
        b.step(self, "delta", "short_conv", writes=(held,), x=b.columns(self.xs), window=f"m.{held}", y=y, w=b.vector(*self.ws), taps=self.taps, width=width)
        b.start(write, "m", "index")
        b.wait_late(write, "m", "index")


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

    def lower(self, b):
        hd = self.head_dim
        heads = b.place(self.q).width // hd
        matrix = b.state(self.states()[0], ("rows", heads, hd, hd), "f32", "[key, value] of each head")
        held = b.buffer(b.own(self.state), ("rows", heads, hd, hd), "f32", "the recurrent matrices of this layer")
        inputs = b.buffer(f"{held}_inputs", (8, 5 * heads * hd), "f32", "q | k | decay | v | beta, each head after head")
        read, write = f"{held}_read", f"{held}_write"
        b.semaphores(f"{held}_in", ("rows",), "a row's matrices in")
        b.semaphores(f"{held}_out", ("rows",), "a row's matrices out")
        size, here = heads * hd * hd * 4, "m.positions[row] >= 0"
        b.transfer(read, ("m", "index", "row"), f"{matrix}.at[index, row]", f"m.{held}.at[row]", f"m.{held}_in.at[row]", size,
                   "A row's recurrent matrices, in.", reads=(matrix[2:],), writes=(held,))
        b.transfer(write, ("m", "index", "row"), f"m.{held}.at[row]", f"{matrix}.at[index, row]", f"m.{held}_out.at[row]", size,
                   "A row's recurrent matrices, out.", reads=(held,), writes=(matrix[2:],))
        b.start_early(read, "m", "index", "row", when=here, rows=True)
        b.together((self.a,), (self.dt_bias,))
        o = b.write(self.o)
        rows = b.buffer(f"{held}_outputs", (8, heads * hd), "f32", "output of the delta rule, not rounded")
        b.step(self, "delta", "prepare", writes=(inputs, rows), q=b.read(self.q, "f32"), k=b.read(self.k, "f32"), v=b.read(self.v, "f32"), z=b.read(self.z, "f32"),
               beta=b.read(self.beta, "f32"), a=b.vector(self.a), dt_bias=b.vector(self.dt_bias), inputs=f"m.{inputs}", out=f"m.{rows}",
               heads=heads, head_dim=hd, floor=self.floor, eps=self.qk_eps)
        with b.loop(f"{held}_row", "row", "m.rows"):
            b.wait(read, "m", "index", "row", when=here)
            b.step(self, "delta", "row", writes=(held, rows), when=here, inputs=f"m.{inputs}", matrix=f"m.{held}", out=f"m.{rows}", heads=heads, head_dim=hd)
            b.start(write, "m", "index", "row", when=here)
        b.step(self, "delta", "finish", o=o, out=f"m.{rows}")
        b.wait_late(write, "m", "index", "row", when=here, rows=True)


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

    def lower(self, b):
        b.step(self, "delta", "gated_norm", x=b.read(self.x, "f32"), g=b.read(self.g, "f32"), y=b.write(self.y), w=b.vector(self.w),
               head_dim=self.head_dim, eps=self.eps)
