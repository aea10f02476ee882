"""Rotation of latent attention: of the trailing features of each query head, and of the key that all heads share."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value
from mkgen.graph.ops.qk import temperature
from mkgen.graph.ops.rope import Rotation
from mkgen.spec.parts import QueryTemperature


@dataclass(frozen=True)
class MlaRope(Op):
    """Each query head [nope | rope] -> r(t [nope | turn(rope)]), t its temperature; the shared key -> r(turn(key)).

    Without a rotation only the queries change, and there is no `key_out`."""
    q: Value
    key: Value | None
    q_out: Value
    key_out: Value | None
    heads: int
    rope_dim: int
    rotation: Rotation | None
    temperature: QueryTemperature | None
    kind = "mla_rope"
    rounds = "q and the key, once"

    def inputs(self):
        return (self.q, self.key, *self.rotation.values) if self.rotation else (self.q,)

    def outputs(self):
        return (self.q_out, self.key_out) if self.rotation else (self.q_out,)

    def needs(self, spread):
        return {self.key.name: "whole"} if self.rotation else {}

    def gives(self, spread):
        return {self.q_out.name: spread[self.q.name]} | ({self.key_out.name: "whole"} if self.rotation else {})

    def cost(self):
        return Cost(flops=6 * (self.heads + 1) * self.rope_dim)

    def meaning(self, env):
        q, head_dim = env[self.q].reshape(env.rows, self.heads, -1), self.q.width // self.heads
        if self.rotation:
            cos, sin = (env[t] for t in self.rotation.values)
            nope = head_dim - self.rope_dim
            q = jnp.concatenate([q[..., :nope], self.rotation.turn(q[..., nope:], cos, sin)], -1)
            env.put(self.key_out, self.rotation.turn(env[self.key][:, None], cos, sin)[:, 0])
        if self.temperature:
            q = q * temperature(self.temperature, env.positions)[:, None, None]
        env.put(self.q_out, q.reshape(env.rows, -1))

    def lower(self, b):
        head_dim, turn = self.q.width // self.heads, dict(cos="", sin="", key="", turned=())
        if self.rotation:
            cos, sin = (b.read(t, "f32") for t in self.rotation.values)
            turn = dict(cos=cos, sin=sin, key=b.read(self.key, "f32"), turned=tuple(self.rotation.text(x, "cos", "sin") for x in ("x", "key")))
        b.step(self, "mla", "mla_rope", q=b.read(self.q, "f32"), **turn, head_dim=head_dim, nope_dim=head_dim - self.rope_dim,
               temperature=self.temperature, q_out=b.write(self.q_out), key_out=b.write(self.key_out) if self.rotation else None)


@dataclass(frozen=True)
class SpreadKey(Op):
    """Each head's whole key: its own part, then the one that all heads share. k_h = [k_nope_h | key]."""
    k_nope: Value
    key: Value
    k: Value
    heads: int
    kind = "spread_key"
    rounds = "none: features are moved"

    def inputs(self):
        return (self.k_nope, self.key)

    def outputs(self):
        return (self.k,)

    def needs(self, spread):
        return {self.key.name: "whole"}

    def gives(self, spread):
        return {self.k.name: spread[self.k_nope.name]}

    def meaning(self, env):
        nope = env[self.k_nope].reshape(env.rows, self.heads, -1)
        key = jnp.broadcast_to(env[self.key][:, None], (env.rows, self.heads, self.key.width))
        env.put(self.k, jnp.concatenate([nope, key], -1).reshape(env.rows, -1))

    def lower(self, b):
        b.step(self, "mla", "spread_key", k_nope=b.read(self.k_nope, "f32"), key=b.read(self.key, "f32"), k=b.write(self.k),
               nope_dim=self.k_nope.width // self.heads)
