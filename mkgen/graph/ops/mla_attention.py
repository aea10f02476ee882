"""Multi-head latent attention over a positional cache, in its absorbed form."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value, Weight
from mkgen.graph.ops.cache import Lanes, attend, open_cache


@dataclass(frozen=True)
class MlaAttention(Op):
    """Absorbed multi-head latent attention (DeepSeek-V2, 2024): scores against the cached latent and the shared key.

    ql_h = r(q_nope_h U_h^T); s_t = scale (ql_h . latent_t + q_rope_h . key_t); o_h = r(r(sum_t p_t latent_t) V_h)."""
    q: Value
    latent: Value
    key: Value | None                   # None where rope_dim is 0
    o: Value
    k_up: Weight                        # [kv_rank, heads * nope_dim]
    v_up: Weight                        # [kv_rank, heads * v_dim]
    heads: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    kv_rank: int
    scale: float | None                 # None: (nope_dim + rope_dim)^-1/2
    context: int
    state: str
    kind = "mla_attention"
    rounds = "ql; softmax weights before the value product; the latent sum; o"

    def inputs(self):
        return (self.q, *self.token())

    def token(self) -> tuple[Value, ...]:
        """What the cache keeps of a token, side by side."""
        return (self.latent, self.key) if self.key else (self.latent,)

    def outputs(self):
        return (self.o,)

    def weights(self):
        return (self.k_up, self.v_up)

    def states(self):
        return (State(self.state, (self.kv_rank + self.rope_dim,), "bf16", positional=True),)

    def needs(self, spread):
        return {v.name: "whole" for v in self.token()}

    def gives(self, spread):
        return {self.o.name: spread[self.q.name]}

    def cost(self):
        return Cost(flops=2 * self.heads * (2 * self.kv_rank + self.rope_dim) * self.context)

    def meaning(self, env):
        rows, nope = env.rows, self.nope_dim
        cache = env.append(self.state, jnp.concatenate([env[v] for v in self.token()], -1))           # [R, T, kv_rank + rope]
        latent, key = cache[..., :self.kv_rank], cache[..., self.kv_rank:]
        q = env[self.q].reshape(rows, self.heads, nope + self.rope_dim)
        up = env.w(self.k_up).reshape(self.kv_rank, self.heads, nope)
        ql = env.r(jnp.einsum("rhn,khn->rhk", q[..., :nope], up, precision="highest"))
        s = jnp.einsum("rhk,rtk->rht", ql, latent, precision="highest")
        s = (s + jnp.einsum("rhe,rte->rht", q[..., nope:], key, precision="highest")) * (self.scale or (nope + self.rope_dim) ** -0.5)
        o = env.r(env.attend(s, lambda p: jnp.einsum("rht,rtk->rhk", p, latent, precision="highest")))
        o = jnp.einsum("rhk,khv->rhv", o, env.w(self.v_up).reshape(self.kv_rank, self.heads, self.v_dim), precision="highest")
        env.put(self.o, jnp.where(env.active[:, None], o.reshape(rows, -1), 0.0))

    def lower(self, b):
        heads, blocks = b.place(self.q).width // (self.nope_dim + self.rope_dim), -(-(self.kv_rank + self.rope_dim) // 128)
        rows = -(-heads // 8) * 8
        lanes = Lanes(blocks, tuple(range(blocks)), tuple(range(-(-self.kv_rank // 128))), rows)
        scale = f"{self.nope_dim + self.rope_dim} ** -0.5" if self.scale is None else str(self.scale)
        name, tiles = open_cache(b, self, lanes, scale)
        for block in b.head_columns(self.k_up):
            last = block["end"] == heads
            b.step(self, "mla", "mla_queries", writes=(f"{name}_queries",) * last, q=b.read(self.q, "bf16"), heads=heads,
                   head_dim=self.nope_dim + self.rope_dim, **block)
        b.step(self, "mla", "mla_token", writes=(f"{name}_token",), latent=b.read(self.latent, "f32"),
               key=b.read(self.key, "f32") if self.key else "", width=blocks * 128)
        b.close()
        attend(b, self, name, tiles)
        o, kinds = b.write(self.o), (op for sub in b.memory.graph.sublayers() for op in sub.ops if isinstance(op, MlaAttention))
        odd = any(op.v_dim % 128 for op in kinds)                             # the helper is simpler where heads fill panels
        for block in b.head_columns(self.v_up):
            b.step(self, "mla", "mla_output", reads=(f"{name}_softmax", f"{name}_mixed"), o=o, heads=heads, odd=odd, **block)
