"""Phases of the vector unit: norms, top-k, recurrences, attention tiles, sums of exchanges. See phases.py."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from phases_kit import bf16, dot, f32, i32, phase, rms


def vectors(rows: int) -> None:
    @phase(
        f"boundary_8192_{rows}",
        f"norm, gated residual, norm: [{rows}, 8192]",
        ((rows, 8192), bf16),
        ((rows, 8192), f32),
        ((4, 1, 8192), f32),
        ((rows, 8192), bf16),
    )
    def boundary(i, x, s, gain, y):
        new = gain[0] * s[...] + gain[1] * rms(x[...].astype(f32) + i.astype(f32), 1e-8).astype(bf16).astype(f32)
        s[...] = new
        y[...] = (rms(new) * gain[2]).astype(bf16)

    @phase(f"norm_4096_{rows}", f"norm of [{rows}, 4096]", ((rows, 4096), bf16), ((1, 4096), f32), ((rows, 4096), bf16))
    def norm(i, x, gain, y):
        y[...] = (rms(x[...].astype(f32) + i.astype(f32)) * gain[...]).astype(bf16)

    @phase(
        f"mixture_8x4096_{rows}",
        f"norm of each of 8 experts' outputs, weighted sum: [{8 * rows}, 4096]",
        ((8 * rows, 4096), f32),
        ((8 * rows, 128), f32),
        ((1, 4096), f32),
        ((8, 4096), bf16),
    )
    def mixture(i, x, weight, gain, y):
        for r in range(rows):
            v = x[r * 8 : (r + 1) * 8] + i.astype(f32)
            y[r : r + 1] = (
                (rms((v * gain[...]).astype(bf16).astype(f32), 1e-8) * weight[r * 8 : (r + 1) * 8, :1])
                .sum(0, keepdims=True)
                .astype(bf16)
            )

    @phase(
        f"topk_256_{rows}",
        f"ranks of 256 scores by one comparison [256, 256] a row, 8 winners, {rows} rows",
        ((rows, 256), f32),
        ((1, 256), f32),
        ((rows, 8, 128), f32),
    )
    def topk(i, logits, bias, y):
        lane = lax.broadcasted_iota(i32, (256, 256), 1)
        sub = lax.broadcasted_iota(i32, (256, 256), 0)
        for r in range(rows):
            score = jax.nn.sigmoid(logits[r : r + 1] * 0.17 + i.astype(f32)) + bias[...]
            mine = jnp.broadcast_to(score, (256, 256)).T
            ahead = (score > mine) | ((score == mine) & (lane < sub))
            rank = ahead.astype(f32).sum(1, keepdims=True)
            hit = rank == lax.broadcasted_iota(i32, (256, 128), 1).astype(f32)
            y[r] = jnp.broadcast_to(jnp.where(hit, mine[:, :1], 0.0).sum(0, keepdims=True), (8, 128))

    @phase(
        f"residual_mix_{rows}",
        f"softmax mixture of 9 values of 7168, norm, {rows} rows",
        ((rows, 8, 7168), f32),
        ((rows, 7168), bf16),
        ((2, 1, 7168), f32),
        ((rows, 7168), bf16),
    )
    def mix(i, blocks, prefix, w, y):
        for r in range(rows):
            b, p = blocks[r] + i.astype(f32), prefix[r : r + 1].astype(f32)
            s = (b * w[0]).sum(-1, keepdims=True) * lax.rsqrt((b * b).mean(-1, keepdims=True) + 1e-5)
            t = (p * w[0]).sum(-1, keepdims=True) * lax.rsqrt((p * p).mean(-1, keepdims=True) + 1e-5)
            top = jnp.maximum(s.max(0, keepdims=True), t)
            e, f = jnp.exp(s - top), jnp.exp(t - top)
            v = ((b * e).sum(0, keepdims=True) + p * f) / (e.sum(0, keepdims=True) + f)
            y[r : r + 1] = (rms(v.astype(bf16).astype(f32)) * w[1]).astype(bf16)

    @phase(
        f"argmax_896_{rows}",
        f"one round of top-k by argmax over [{rows}, 896], its winner's id as a scalar",
        ((rows, 896), f32),
        ((rows, 128), f32),
        ((8, 128), i32),
    )
    def argmax(i, score, won, y):
        lane = lax.broadcasted_iota(i32, (rows, 896), 1).astype(f32)
        s = score[...]
        top = s.max(-1, keepdims=True)
        first = jnp.where(s == top, lane, 1e9).min(-1, keepdims=True)
        score[...] = jnp.where(lane == first, -1.0, s)
        won[...] += jnp.broadcast_to(first, (rows, 128))
        winner = jnp.min(first).astype(i32)  # a scalar: it addresses a copy

        @pl.when(winner < 112)
        def _():
            y[...] = jnp.full((8, 128), winner, i32)

    @phase(
        f"delta_{rows}",
        f"convolution and delta rule of 3 heads, state [128, 128] f32 each, {rows} rows",
        ((rows, 3, 128, 128), f32),
        ((rows, 3, 3, 3, 128), bf16),
        ((3, 4, 3, 128), f32),
        ((rows, 3, 8, 128), f32),
        ((rows, 3, 128), f32),
    )
    def delta(i, state, history, taps, x, y):
        for r in range(rows):
            conv = []
            for part in range(3):
                c = sum(history[r, t, part].astype(f32) * taps[part, t] for t in range(3)) + x[r, :, part] * taps[part, 3]
                conv.append(jax.nn.silu(c + i.astype(f32)))
            q, k, v = conv
            q, k = (z * lax.rsqrt((z * z).sum(-1, keepdims=True) + 1e-6) for z in (q, k))
            for h in range(3):
                decay = jnp.exp(-5 * jax.nn.sigmoid(x[r, h, 3:4]))
                column = [jnp.broadcast_to(z, (128, 128)).T for z in (k[h : h + 1], q[h : h + 1], decay)]
                s = state[r, h] * column[2]
                pred = (s * column[0]).sum(0, keepdims=True)
                s = s + column[0] * (jax.nn.sigmoid(x[r, h, 4:5]) * (v[h : h + 1] - pred))
                state[r, h] = s
                o = rms((s * column[1]).sum(0, keepdims=True))
                y[r, h : h + 1] = o * jax.nn.sigmoid(x[r, h, 5:6])

    @phase(
        f"attention_tile_128x3_{rows}",
        f"a tile of 128 tokens, 3 heads, keys of 256 and values of 128, scores on the vector unit, {rows} rows",
        ((2, rows, 3, 128, 256), bf16),
        ((2, rows, 3, 128, 128), bf16),
        ((rows, 3, 256), f32),
        ((rows, 3, 8, 128), f32),
        ((rows, 3, 128), f32),
    )
    def latent_tile(i, keys, values, q, stats, y):
        for r in range(rows):
            s = jnp.concatenate(
                [(keys[i % 2, r, h].astype(f32) * q[r, h : h + 1]).sum(-1)[None] for h in range(3)], 0
            )  # [3, 128]
            old = stats[r, :, 0, :1]
            top = jnp.maximum(old, s.max(-1, keepdims=True))
            p, scale = jnp.exp(s - top), jnp.exp(old - top)
            high = p.astype(bf16)
            low = (p - high.astype(f32)).astype(bf16)
            for h in range(3):
                v = values[i % 2, r, h]
                both = jnp.concatenate([high[h : h + 1], low[h : h + 1], jnp.zeros((6, 128), bf16)], 0)
                y[r, h : h + 1] = y[r, h : h + 1] * scale[h : h + 1] + dot(both, v)[:2].sum(0, keepdims=True)
                stats[r, h] = jnp.broadcast_to(top[h : h + 1], (8, 128))

    @phase(
        f"attention_tile_256x2_{rows}",
        f"a tile of 256 tokens, 16 heads on 2 KV heads of 64, scores on the MXU, values by two terms, {rows} rows",
        ((3, rows, 256, 128), bf16),
        ((3, rows, 256, 128), bf16),
        ((rows, 16, 128), bf16),
        ((2, rows, 16, 128), f32),
        ((rows, 16, 128), f32),
    )
    def grouped_tile(i, keys, values, q, stats, y):
        for r in range(rows):
            s = lax.dot_general(q[r], keys[i % 3, r], (((1,), (1,)), ((), ())), preferred_element_type=f32)
            old = stats[0, r, :, :1]
            top = jnp.maximum(old, s.max(-1, keepdims=True))
            p, scale = jnp.exp(s - top), jnp.exp(old - top)
            high = p.astype(bf16)
            low = (p - high.astype(f32)).astype(bf16)
            y[r] = y[r] * scale + dot(high, values[i % 3, r]) + dot(low, values[i % 3, r])
            stats[0, r] = jnp.broadcast_to(top, (16, 128))
            stats[1, r] = stats[1, r] * scale + p.sum(-1, keepdims=True)


for rows in (1, 2, 4, 8):
    vectors(rows)


@phase(
    "delta_6",
    "delta rule of 6 value heads on 2 key heads, state [128, 128] f32 each, 1 row",
    ((6, 128, 128), f32),
    ((8, 128), f32),
    ((6, 8, 128), f32),
    ((6, 128), f32),
)
def delta_6(i, state, qk, x, y):
    for h in range(6):
        k, q = (jnp.broadcast_to(qk[j : j + 1] + i.astype(f32), (128, 128)) for j in (h // 3, 2 + h // 3))
        s = state[h] * jnp.exp(x[h, 0:1, :1])
        pred = (s * k).sum(-1, keepdims=True)  # the state is [v, k]
        v = jnp.broadcast_to(x[h, 1:2], (128, 128)).T[:, :1]
        s = s + (x[h, 2:3, :1] * (v - pred)) * k
        state[h] = s
        o = jnp.broadcast_to((s * q).sum(-1, keepdims=True), (128, 128)).T[:1]
        y[h : h + 1] = rms(o) * jax.nn.silu(x[h, 3:4])


@phase(
    "attention_tile_128x1",
    "a tile of 128 tokens, 3 heads on one KV head of 256",
    ((2, 128, 256), bf16),
    ((2, 128, 256), bf16),
    ((8, 256), bf16),
    ((2, 8, 128), f32),
    ((8, 256), f32),
)
def wide_tile(i, keys, values, q, stats, y):
    s = lax.dot_general(q[...], keys[i % 2], (((1,), (1,)), ((), ())), preferred_element_type=f32)
    old = stats[0, :, :1]
    top = jnp.maximum(old, s.max(-1, keepdims=True))
    p, scale = jnp.exp(s - top), jnp.exp(old - top)
    y[...] = y[...] * scale + dot(p.astype(bf16), values[i % 2])
    stats[0] = jnp.broadcast_to(top, (8, 128))
    stats[1] = stats[1] * scale + p.sum(-1, keepdims=True)


@phase("norm_5120", "residual and norm of [1, 5120]", ((1, 5120), f32), ((1, 5120), f32), ((1, 5120), bf16))
def norm_5120(i, x, gain, y):
    y[...] = (rms(x[...] + i.astype(f32)) * (1 + gain[...])).astype(bf16)


def sums(name: str, what: str, slots: int, rows: int, width: int, dtype) -> None:
    @phase(name, what, ((2, slots, rows, width), dtype), ((rows, width), f32))
    def body(i, parts, y):
        total = parts[i % 2, 0].astype(f32)
        for s in range(1, slots):
            total += parts[i % 2, s].astype(f32)
        y[...] = total


for rows in (1, 2, 4, 8):
    sums(f"sum_8x1024_{rows}", f"sum of 8 blocks [{max(8, rows)}, 1024] bf16", 8, max(8, rows), 1024, bf16)
    sums(f"sum_16x3584_{rows}", f"sum of 16 blocks [{rows}, 3584] f32 words", 16, rows, 3584, f32)
    sums(f"sum_8x7168_{rows}", f"sum of 8 blocks [{rows}, 7168] f32 words", 8, rows, 7168, f32)
for rows in (16, 32, 64):
    sums(f"sum_8x512_{rows}", f"sum of 8 blocks [{rows}, 512] bf16", 8, rows, 512, bf16)
sums("sum_8x512_8", "sum of 8 blocks [8, 512] bf16", 8, 8, 512, bf16)
sums("sum_8x5120", "sum of 8 blocks [1, 5120] f32", 8, 1, 5120, f32)
