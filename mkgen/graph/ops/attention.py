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

    def lower(self, b):
        b.together(*((w,) for w in self.weights()))
        norms = [None if w is None else b.vector(w) for w in (self.q_norm, self.k_norm)]
        b.step(self, "attention", "qk", q=b.read(self.q, "f32"), k=b.read(self.k, "f32"), q_out=b.write(self.q_out),
               k_out=b.write(self.k_out), q_norm=norms[0], k_norm=norms[1], eps=self.eps, head_dim=self.head_dim, base=self.base,
               width=self.width)


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
        b.step(self, "attention", "gqa_inputs", writes=(f"{name}_queries", f"{name}_token"), q=b.read(self.q, "f32"), k=b.read(self.k, "f32"), v=b.read(self.v, "f32"), head_dim=hd,
               kv_heads=kv_heads)
        attend(b, self, name)
        b.step(self, "attention", "gqa_output", reads=(f"{name}_mixed",), o=b.write(self.o), heads=heads, head_dim=hd, kv_heads=kv_heads)


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

    def lower(self, b):
        heads, blocks = b.place(self.q).width // (self.nope_dim + self.rope_dim), -(-(self.kv_rank + self.rope_dim) // 128)
        name = open_cache(b, self, heads, blocks, tuple(range(blocks)), tuple(range(-(-self.kv_rank // 128))), self.nope_dim + self.rope_dim)
        k_up, stored = b.block(self.k_up.name, (self.k_up,))
        k_up += "" if stored.k_padded == self.kv_rank else f"[:{self.kv_rank}]"
        b.step(self, "attention", "mla_inputs", writes=(f"{name}_queries", f"{name}_token"), q=b.read(self.q, "bf16"), latent=b.read(self.latent, "f32"), key=b.read(self.key, "f32"),
               k_up=k_up, heads=heads, nope_dim=self.nope_dim)
        b.close()
        attend(b, self, name)
        v_up, _ = b.block(self.v_up.name, (self.v_up,))
        b.step(self, "attention", "mla_output", reads=(f"{name}_mixed",), o=b.write(self.o), v_up=v_up, heads=heads, v_dim=self.v_dim)


def open_cache(b, op, heads: int, blocks: int, keys: tuple, values: tuple, score_dim: int) -> str:
    """Declares a cache of `blocks` x 128 features a token with its ring of tiles, and starts the first tiles early."""
    tile, slots, name = b.build.kv_tile, b.build.kv_slots, b.own(op.state)
    cache = b.state(op.states()[0], ("rows", blocks, b.build.context // 2, 128), "u32", "two tokens a word")
    heads_padded = -(-heads // 8) * 8
    b.buffer(f"{name}_tiles", (slots, blocks, tile // 2, 128), "u32", "tiles of the cache, one a slot")
    b.buffer(f"{name}_token", (blocks, 8, 128), "u32", "the new token of each row")
    b.buffer(f"{name}_word", ("rows", blocks, 1, 128), "u32", "its words, to be written back")
    b.buffer(f"{name}_queries", (8, heads_padded, len(keys) * 128), b.build.activations, "queries")
    b.buffer(f"{name}_mixed", (8, heads_padded, len(values) * 128), "f32", "weighed values")
    b.semaphores(f"{name}_tile_sem", (slots,), "one a tile slot")
    b.semaphores(f"{name}_word_sem", ("rows",), "new words out")
    items = b.max_rows * (b.build.context // tile) + slots // 2 - 1
    b.buffer("kv_items", (items,), "i32", "row << 16 | tile of every tile to be read", space="smem")
    b.buffer("kv_count", (1,), "i32", "how many", space="smem")
    b.transfer(f"{name}_tile_copy", ("m", "index", "i"),
               f"{cache}.at[index, row, :, pl.ds(first, KV_TILE // 2), :]",
               f"m.{name}_tiles.at[slot]", f"m.{name}_tile_sem.at[slot]", blocks * tile // 2 * 512, "Tile of item i, into its slot.",
               setup=("slot, (row, tile) = lax.rem(i, KV_SLOTS), kv_item(m, i)",
                                                                    "first = pl.multiple_of(tile * (KV_TILE // 2), KV_TILE // 2)"), reads=(cache[2:],), writes=(f"{name}_tiles",))
    b.transfer(f"{name}_word_copy", ("m", "index", "row"), f"m.{name}_word.at[row]",
               f"{cache}.at[index, row, :, pl.ds(m.positions[row] >> 1, 1), :]", f"m.{name}_word_sem.at[row]", blocks * 512,
               "The words of the row's new token, back into the cache.", reads=(f"{name}_word",), writes=(cache[2:],))
    b.start_early_loop(f"{name}_tile_copy", "i", "jnp.minimum(m.kv_count[0], KV_SLOTS)", "m", "index", "i", bound=slots)
    b.step(op, "attention", "cache", writes=(f"{name}_mixed",), name=name, keys=keys, values=values, scale=f"{score_dim} ** -0.5")
    return name


def attend(b, op, name: str) -> None:
    """The loop over all tiles: wait, append the new token where it falls, compute, refill the slots."""
    batch, count = b.build.kv_slots // 2, "m.kv_count[0]"
    trips = f"lax.div({count} + KV_BATCH - 1, KV_BATCH)"
    b.close()
    with b.loop(f"{name}_batch", "batch", trips, carry="running", init="empty_softmax(kv)",
                bound=b.max_rows * b.build.context // b.build.kv_tile // batch + b.max_rows):
        with b.loop("", "j", "KV_BATCH", unroll=True):
            b.step(op, "attention", "item")
            b.wait(f"{name}_tile_copy", "m", "index", "i", when=f"i < {count}")
            b.step(op, "attention", "append", reads=(f"{name}_tiles", f"{name}_token"), writes=(f"{name}_tiles", f"{name}_word"), when="kv_newest(m, i)")
            b.start(f"{name}_word_copy", "m", "index", "kv_item(m, i)[0]", when="kv_newest(m, i)")
        b.step(op, "attention", "attend", reads=(f"{name}_tiles", f"{name}_queries"), writes=(f"{name}_mixed",))
        with b.loop("", "j", "KV_BATCH", unroll=True):
            b.step(op, "attention", "item")
            b.start(f"{name}_tile_copy", "m", "index", "i + KV_SLOTS", when=f"i + KV_SLOTS < {count}")
    b.wait_late(f"{name}_word_copy", "m", "index", "row", when="m.positions[row] >= 0", rows=True)
