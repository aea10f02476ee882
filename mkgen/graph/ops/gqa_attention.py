"""Grouped-query attention over a positional cache."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value
from mkgen.graph.ops.cache import attend, open_cache


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

    def lower(self, b):
        hd, wide = self.head_dim, -(-self.head_dim // 128)
        heads, kv_heads = b.place(self.q).width // hd, b.place(self.k).width // hd
        keys = tuple(2 * wide * g + j for g in range(kv_heads) for j in range(wide))
        values = tuple(2 * wide * g + wide + j for g in range(kv_heads) for j in range(wide))
        name = open_cache(b, self, heads, 2 * wide * kv_heads, keys, values, hd)
        b.step(self, "gqa", "gqa_inputs", writes=(f"{name}_queries", f"{name}_token"), q=b.read(self.q, "f32"), k=b.read(self.k, "f32"), v=b.read(self.v, "f32"), head_dim=hd,
               kv_heads=kv_heads)
        attend(b, self, name)
        b.step(self, "gqa", "gqa_output", reads=(f"{name}_mixed",), o=b.write(self.o), heads=heads, head_dim=hd, kv_heads=kv_heads)
