"""A linear recurrence: one step of a decaying sum of outer products a head, plain or with the delta rule."""
from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value, Weight
from mkgen.spec.mixers import Linear

LANES, SUBLANES = 128, 8
WIDEST = 512                             # lanes of a block of value heads
TRIP = 1024                              # lanes of the blocks in one trip of the loop: enough to hide what each waits for


@dataclass(frozen=True)
class Recurrence(Op):
    """One step, per head, in float32 (spec.mixers.Linear has the settings; gated delta rule: arXiv 2412.06464, Kimi Delta
    Attention: arXiv 2510.26692, lightning attention: arXiv 2501.08313, Mamba-2: arXiv 2405.21060):

    q = scale l2(silu(q)), k = l2(silu(k)), v = silu(v), l2 and silu where the model has them;
    S <- diag(a) S;  S <- S + k (x) b (v - [delta] S^T k);  o = r(S^T q + D v).

    q, k [key_heads key_dim], v, o [heads value_dim]. z: what the decay (and the step) is made of, one number a head or a key
    channel; write: role b's product. `a`: exp(A_log), or the decay itself where it is constant."""
    q: Value
    k: Value
    v: Value
    z: Value | None
    write: Value | None
    o: Value
    a: Weight
    dt_bias: Weight | None
    d: Weight | None
    mixer: Linear
    state: str
    kind = "recurrence"
    rounds = "o"

    def inputs(self):
        return tuple(x for x in (self.q, self.k, self.v, self.z, self.write) if x is not None)

    def outputs(self):
        return (self.o,)

    def weights(self):
        return tuple(w for w in (self.a, self.dt_bias, self.d) if w is not None)

    def states(self):
        return (State(self.state, (self.mixer.heads, self.mixer.key_dim, self.mixer.value_dim), "f32"),)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.o.name: spread[self.v.name]}

    def cost(self):
        m = self.mixer
        return Cost(flops=(8 if m.delta else 5) * m.heads * m.key_dim * m.value_dim)

    @property
    def scale(self) -> float:
        return self.mixer.key_dim ** -0.5 if self.mixer.scale is None else self.mixer.scale

    def meaning(self, env):
        m, rows = self.mixer, env.rows
        share = m.heads // (m.key_heads or m.heads)
        act = jax.nn.silu if m.act else lambda x: x
        unit = (lambda x: x * jax.lax.rsqrt(jnp.sum(x * x, -1, keepdims=True) + m.qk_eps)) if m.qk_l2 else lambda x: x
        q, k = (jnp.repeat(unit(act(env[x]).reshape(rows, -1, m.key_dim)), share, axis=1) for x in (self.q, self.k))
        v = act(env[self.v]).reshape(rows, m.heads, m.value_dim)
        decay, b = self.gates(env)
        s = env.state(self.state) * decay[..., None]                                       # [R, heads, key, value]
        seen = jnp.sum(s * k[..., None], axis=2) if m.delta else 0.0
        s = s + k[..., None] * (b * (v - seen))[:, :, None]
        env.set_state(self.state, s)
        o = jnp.sum(s * (q * self.scale)[..., None], axis=2)
        if self.d is not None:
            o = o + env.w(self.d)[:, None] * v
        env.put(self.o, jnp.where(env.active[:, None], o.reshape(rows, -1), 0.0))

    def gates(self, env):
        """Decay [R, heads, key_dim or 1] and write strength [R or 1, heads, 1]."""
        m, d = self.mixer, self.mixer.decay
        a, b = env.w(self.a)[:, None], jnp.ones((1, m.heads, 1))
        if d.kind == "constant":
            decay = a[None]
        else:
            z = (env[self.z] + env.w(self.dt_bias)).reshape(env.rows, m.heads, -1)
            if d.kind == "floor":
                decay = jnp.exp(d.floor * jax.nn.sigmoid(a * z))
            else:
                z = jnp.clip(jax.nn.softplus(z), m.step_min, m.step_max or None)
                decay = jnp.exp(-a * z)
            b = z if m.write == "step" else b
        if m.write == "sigmoid":
            b = jax.nn.sigmoid(env[self.write])[..., None]
        return decay, b * m.write_scale

    def lower(self, b):
        """The state of a row: blocks of `together` key heads and the value heads that they serve, [key, value] side by side,
        so that few lanes are empty."""
        m = self.mixer
        keys, heads = b.place(self.k).width // m.key_dim, b.place(self.v).width // m.value_dim
        share = heads // keys
        together = side_by_side(keys, share * m.value_dim)
        key, each = -(-m.key_dim // SUBLANES) * SUBLANES, share * m.value_dim
        blocks, width = keys // together, -(-together * each // LANES) * LANES
        trip = max(n for n in range(1, blocks + 1) if blocks % n == 0 and (n == 1 or n * width <= TRIP))
        parts = {"q": together * whole(key), "k": together * whole(key),
                 "decay": width if m.decay.per == "head" else together * share * whole(key), "v": width}
        if m.delta:
            parts["beta"] = width
        shape = ("rows", blocks, key, width)
        matrix = b.state(self.states()[0], shape, "f32", "[key, value heads]")
        held = b.buffer(b.held(self.state), shape, "f32", "the recurrent matrices of this layer")
        inputs = b.buffer(f"{held}_inputs", (blocks, 8, sum(parts.values())), "f32", f"{' | '.join(parts)}, block by block")
        read, write = f"{held}_read", f"{held}_write"
        b.semaphores(f"{held}_in", ("rows",), "a row's matrices in")
        b.semaphores(f"{held}_out", ("rows",), "a row's matrices out")
        size, here = blocks * key * width * 4, "m.positions[row] >= 0"
        b.transfer(read, ("m", "index", "row"), f"{matrix}.at[index, row]", f"m.{held}.at[row]", f"m.{held}_in.at[row]", size,
                   "A row's recurrent matrices, in.", reads=(matrix[2:],), writes=(held,))
        b.transfer(write, ("m", "index", "row"), f"m.{held}.at[row]", f"{matrix}.at[index, row]", f"m.{held}_out.at[row]", size,
                   "A row's recurrent matrices, out.", reads=(held,), writes=(matrix[2:],))
        b.start_early(read, "m", "index", "row", when=here, rows=True)
        b.together(*((w,) for w in self.weights()))
        o = b.write(self.o)
        rows = b.buffer(f"{held}_outputs", (blocks, 8, width), "f32", "what the recurrence gives, not rounded")
        values = {n: None if x is None else b.read(x, "f32") for n, x in (("q", self.q), ("k", self.k), ("v", self.v), ("z", self.z),
                                                                          ("b", self.write))}
        vectors = {n: None if w is None else b.vector(w) for n, w in (("a", self.a), ("dt_bias", self.dt_bias), ("d", self.d))}
        common = dict(inputs=f"m.{inputs}", out=f"m.{rows}", mixer=m, blocks=blocks, parts=parts, share=share)
        b.step(self, "recurrence", "prepare", writes=(inputs, rows), **values, **vectors, scale=self.scale, heads=heads, **common)
        with b.loop(f"{held}_row", "row", "m.rows"):
            b.wait(read, "m", "index", "row", when=here)
            b.step(self, "recurrence", "row", writes=(held, rows), when=here, matrix=f"m.{held}", key=key, each=each, trip=trip, **common)
            b.start(write, "m", "index", "row", when=here)
        b.step(self, "recurrence", "finish", o=o, out=f"m.{rows}", width=heads * m.value_dim, each=together * each)
        b.wait_late(write, "m", "index", "row", when=here, rows=True)


def whole(lanes: int) -> int:
    return -(-lanes // LANES) * LANES


def side_by_side(keys: int, width: int) -> int:
    """How many key heads, each with `width` lanes of values, share a block: the fewest that leave no lane of it empty, if some
    number of at most WIDEST lanes does; otherwise what leaves the least."""
    fits = [n for n in range(1, keys + 1) if keys % n == 0 and (n == 1 or n * width <= max(WIDEST, math.lcm(width, LANES)))]
    return min(fits, key=lambda n: (whole(n * width) / (n * width), n))
