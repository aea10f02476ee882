"""Grouped-query attention over a positional cache."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value, Weight
from mkgen.graph.ops.cache import Lanes, Seen, attend, open_cache

SUBLANES, DEPTH = 8, 256                 # rows of a dot that cost as much as one; columns that fill the MXU


@dataclass(frozen=True)
class KvGroups:
    """A rank's KV heads in runs of `size`: each run's keys lie side by side, then its values, and one dot scores all query heads
    of the run, each of which has zeros in the lanes of the others' keys."""
    heads: int                           # query heads
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def size(self) -> int:
        """The fewest KV heads that give a dot its rows and its depth: more of them would multiply more zeros."""
        each = self.heads // self.kv_heads
        enough = (n for n in range(1, self.kv_heads) if self.kv_heads % n == 0 and n * each >= SUBLANES and n * self.head_dim >= DEPTH)
        return next(enough, self.kv_heads)

    def lanes(self) -> Lanes:
        keys, both = self.size * self.head_dim, self.size * (self.head_dim + self.value_dim)
        blocks, groups = -(-both // 128), self.kv_heads // self.size
        rows = -(-(self.heads // groups) // SUBLANES) * SUBLANES
        return Lanes(blocks, tuple(range(-(-keys // 128))), tuple(range(keys // 128, blocks)), rows, groups)


@dataclass(frozen=True)
class GqaAttention(Op):
    """o_h = r(value_scale softmax(s) V) over the tokens that are seen, s = cap(scale q_h K^T); the new k and v are appended first.

    cap(s) = softcap tanh(s / softcap), where there is one. sinks: one logit a head more in the softmax, with no value."""
    q: Value
    k: Value
    v: Value
    o: Value
    sinks: Weight | None
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    scale: float | None                  # None: head_dim^-1/2
    softcap: float
    value_scale: float
    seen: Seen
    context: int
    state: str
    kind = "gqa_attention"
    rounds = "softmax weights before the value product; o"

    def inputs(self):
        return (self.q, self.k, self.v)

    def outputs(self):
        return (self.o,)

    def weights(self):
        return () if self.sinks is None else (self.sinks,)

    def states(self):
        """Of each KV head its key, then its value."""
        return (State(self.state, (self.kv_heads, self.head_dim + self.value_dim), "bf16", positional=True),)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.o.name: spread[self.q.name]}

    def cost(self):
        seen = min(self.context, self.seen.window or self.seen.chunk or self.context)
        return Cost(flops=2 * self.heads * (self.head_dim + self.value_dim) * seen)

    def meaning(self, env):
        rows, each = env.rows, self.heads // self.kv_heads
        new = [env[x].reshape(rows, self.kv_heads, -1) for x in (self.k, self.v)]
        cache = env.append(self.state, jnp.concatenate(new, -1))                        # [R, T, kv_heads, head_dim + value_dim]
        keys, values = cache[..., :self.head_dim], cache[..., self.head_dim:]
        q = env[self.q].reshape(rows, self.kv_heads, each, self.head_dim)
        s = jnp.einsum("rkgd,rtkd->rkgt", q, keys, precision="highest") * (self.scale or self.head_dim ** -0.5)
        if self.softcap:
            s = self.softcap * jnp.tanh(s / self.softcap)
        sink = None if self.sinks is None else env.w(self.sinks).reshape(self.kv_heads, each, 1)
        o = env.attend(s, lambda p: jnp.einsum("rkgt,rtkd->rkgd", p, values, precision="highest"), self.seen.oldest(env.positions), sink)
        env.put(self.o, jnp.where(env.active[:, None], o.reshape(rows, -1) * self.value_scale, 0.0))

    def lower(self, b):
        heads, kv_heads = b.place(self.q).width // self.head_dim, b.place(self.k).width // self.head_dim
        groups = KvGroups(heads, kv_heads, self.head_dim, self.value_dim)
        lanes, more, name = groups.lanes(), {}, b.own(self.state)
        if self.softcap:
            more["softcap"] = str(self.softcap)
        if self.sinks is not None:
            more["sinks"] = f"m.{name}_sinks"
            b.buffer(f"{name}_sinks", (lanes.groups * lanes.rows, 1), "f32", "a logit a query head")
            b.step(self, "gqa", "sinks", writes=(f"{name}_sinks",), w=b.vector(self.sinks, whole=b.place(self.q).spread == "whole"),
                   y=f"{name}_sinks", heads=heads, groups=lanes.groups, rows=lanes.rows)
        scale = f"{self.head_dim} ** -0.5" if self.scale is None else str(self.scale)
        _, tiles = open_cache(b, self, lanes, scale, self.seen, **more)
        b.step(self, "gqa", "gqa_inputs", writes=(f"{name}_queries", f"{name}_token"), q=b.read(self.q, "f32"), k=b.read(self.k, "f32"),
               v=b.read(self.v, "f32"), head_dim=self.head_dim, value_dim=self.value_dim, size=groups.size)
        attend(b, self, name, tiles, self.seen, (f"{name}_sinks",) if self.sinks is not None else ())
        b.step(self, "gqa", "gqa_output", reads=(f"{name}_softmax", f"{name}_mixed"), o=b.write(self.o), heads=heads, kv_heads=kv_heads,
               first=groups.size * self.head_dim % 128, value_dim=self.value_dim, size=groups.size, scale=self.value_scale)
