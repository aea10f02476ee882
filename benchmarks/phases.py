"""Cycles of the compute of published hand-written kernels: python benchmarks/phases.py [NAME ...] [-o FILE]

Each phase is written again from its description, with its operands in VMEM, compiled for the chip as the body of a loop, and
its bundles are replayed as `mkgen profile` does it: cycles of the compiler's static schedule for one trip, not of a chip.
The schedules in benchmarks/handwritten/ take their cycles from the file that this writes. A phase is ours, not theirs: where
theirs does more than its description says, these cycles are too few.
"""
from __future__ import annotations

import argparse
import os
import re
import tempfile
from pathlib import Path

DUMP = Path(os.environ.get("PHASES_DUMP") or tempfile.mkdtemp(prefix="phases-"))
os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", LIBTPU_INIT_ARGS=(
    f"--xla_jf_dump_to={DUMP} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"))

import jax
import jax.numpy as jnp
import numpy as np
import yaml
from clock import bundles_of
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, PartitionSpec

from mkgen.profile.listing import read_listing
from mkgen.profile.scoreboard import cycles_of_loop

f32, bf16, i8, i4, i32, u32 = jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4, jnp.int32, jnp.uint32
f8, f4 = jnp.float8_e4m3fn, jnp.float4_e2m1fn
OUT = Path(__file__).resolve().parent / "handwritten" / "cycles.yaml"
MESH = Mesh(np.array(topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:2x2x1").devices[:1]), ("x",))
PHASES: dict[str, tuple] = {}            # name -> (what it is, body(trip, refs), shapes of the operands)


def phase(name: str, what: str, *shapes: tuple):
    """Declares a phase; its body gets the number of the trip, which no load may be hoisted past, and its refs."""
    def take(body):
        PHASES[name] = (what, body, shapes)
        return body
    return take


def dot(a, b):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=f32)


def rms(x, eps=1e-5):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


# -- products ------------------------------------------------------------------------------------------------------------------


def packed(name: str, what: str, dtype, k: int, n: int, pack: int) -> None:
    """One load of a ring: `pack` tiles [k, n] side by side, multiplied at once by as many slices of x below one another."""
    @phase(name, what, ((2, k, n * pack), dtype), ((8, k * pack), bf16), ((8, n), f32))
    def body(i, w, x, y):
        left = jnp.concatenate([x[:, j * k:(j + 1) * k] for j in range(pack)], axis=0)
        part = dot(left, w[i % 2])
        y[...] += sum(part[j * 8:(j + 1) * 8, j * n:(j + 1) * n] for j in range(pack))


def separate(name: str, what: str, dtype, k: int, n: int, pack: int) -> None:
    """The same load with a product for each tile."""
    @phase(name, what, ((2, k, n * pack), dtype), ((8, k * pack), bf16), ((8, n), f32))
    def body(i, w, x, y):
        for j in range(pack):
            y[...] += dot(x[:, j * k:(j + 1) * k], w[i % 2, :, j * n:(j + 1) * n])


for n, pack in ((1024, 1), (512, 2), (256, 4), (512, 1), (256, 1)):
    packed(f"bf16_1024x{n}x{pack}", f"a ring load of {pack} tiles [1024, {n}] bf16, 8 rows", bf16, 1024, n, pack)
packed("bf16_512x256x8", "a ring load of 8 tiles [512, 256] bf16, 8 rows", bf16, 512, 256, 8)
for n, pack in ((2048, 1), (1024, 2), (512, 4), (256, 8)):
    packed(f"int8_1024x{n}x{pack}", f"a ring load of {pack} tiles [1024, {n}] int8, 8 rows, one product", i8, 1024, n, pack)
    separate(f"int8_1024x{n}x{pack}_separate", f"the same, a product for each tile", i8, 1024, n, pack)
packed("bf16_1024x1280", "a ring load [1024, 1280] bf16, 8 rows", bf16, 1024, 1280, 1)
packed("bf16_1024x1152", "a ring load [1024, 1152] bf16, 8 rows", bf16, 1024, 1152, 1)
packed("bf16_768x1280", "a ring load [768, 1280] bf16, 8 rows", bf16, 768, 1280, 1)


@phase("bf16_mib", "one MiB of a bf16 matrix in one product: [4096, 512] over 4, 16 rows", ((2, 4096, 512), bf16), ((16, 4096), bf16), ((16, 512), f32))
def bf16_mib(i, w, x, y):
    y[...] += dot(x[...], w[i % 2])


def chosen_lanes(rows: int, width: int, group: int):
    """[rows, width]: row r keeps group r % groups."""
    row, lane = (lax.broadcasted_iota(i32, (rows, width), d) for d in (0, 1))
    return row % (width // group) == lane // group


def group_major(x, chunk: int, group: int):
    """[8, chunk] -> [8 * groups, chunk], block-diagonal, groups outermost."""
    lane = lax.broadcasted_iota(i32, (8, chunk), 1) // group
    return jnp.concatenate([jnp.where(lane == g, x, 0.0) for g in range(chunk // group)], 0).astype(bf16)


def batch_major(x, rows: int, chunk: int, group: int):
    """[rows, chunk] -> [rows * groups, chunk], block-diagonal, rows outermost."""
    groups = chunk // group
    keep = chosen_lanes(groups, chunk, group)
    return jnp.concatenate([jnp.where(keep, jnp.broadcast_to(x[r:r + 1], (groups, chunk)), 0.0) for r in range(rows)], 0).astype(bf16)


@phase("int4_expert", "an expert int4 g128: [4096, 1024] and [512, 4096], up to 8 rows, group-major in chunks of 512",
       ((2, 512, 1024), i32), ((2, 8, 4, 1024), f32), ((2, 64, 4096), i32), ((2, 1, 4, 4096), f32), ((8, 32, 512), bf16), ((8, 4096), f32))
def int4_expert(i, up, up_scale, down, down_scale, left, y):
    slot = i % 2

    def product(codes, scale, lefts, chunks):
        acc = 0.0
        for c in range(chunks):
            part = dot(lefts(c), pltpu.bitcast(codes[slot, c * 64:(c + 1) * 64], i4))
            for g in range(4):
                acc += part[g * 8:(g + 1) * 8] * scale[slot, c, g:g + 1]
        return acc
    gu = product(up, up_scale, lambda c: left[c], 8)
    act = jax.nn.silu(gu[:, :512]) * gu[:, 512:]
    y[...] = product(down, down_scale, lambda c: group_major(act, 512, 128), 1)


def nvfp4_block(rows: int) -> None:
    @phase(f"nvfp4_expert_{rows}", f"an expert NVFP4: [4096, 1024] and [512, 4096], {rows} rows, batch-major in chunks of 512",
           ((2, 512, 1024), i32), ((2, 8, 32, 1024), f8), ((2, 64, 4096), i32), ((2, 1, 32, 4096), f8), ((8, 32 * rows, 512), bf16),
           ((8, 4096), f32))
    def body(i, up, up_scale, down, down_scale, left, y):
        slot = i % 2

        def product(codes, scale, lefts, chunks):
            acc = [0.0] * rows
            for c in range(chunks):
                part = dot(lefts(c), pltpu.bitcast(codes[slot, c * 64:(c + 1) * 64], f4).astype(f8))
                s = scale[slot, c].astype(f32)
                for r in range(rows):
                    block = part[r * 32:(r + 1) * 32] * s
                    acc[r] += block[:8] + block[8:16] + block[16:24] + block[24:]
            done = [a.sum(0, keepdims=True) for a in acc]
            return jnp.concatenate(done + [jnp.zeros((8 - rows, done[0].shape[1]), f32)], 0) if rows < 8 else jnp.concatenate(done, 0)
        gu = product(up, up_scale, lambda c: left[c], 8)
        act = jax.nn.silu(gu[:, :512]) * gu[:, 512:]
        y[...] = product(down, down_scale, lambda c: batch_major(act, rows, 512, 16), 1)


for rows in (1, 2, 4, 8):
    nvfp4_block(rows)


@phase("nvfp4_expert_vpu", "an expert NVFP4, up to 8 rows, codes made bf16 on the vector unit",
       ((2, 512, 1024), i32), ((2, 8, 32, 1024), f8), ((2, 64, 4096), i32), ((2, 1, 32, 4096), f8), ((8, 4096), bf16), ((8, 4096), f32))
def nvfp4_vpu(i, up, up_scale, down, down_scale, x, y):
    slot = i % 2

    def product(codes, scale, left, chunks):
        acc = 0.0
        for c in range(chunks):
            w = pltpu.bitcast(codes[slot, c * 64:(c + 1) * 64], f4).astype(bf16)
            n = w.shape[1]
            w = (w.reshape(32, 16, n) * scale[slot, c].astype(bf16)[:, None, :]).reshape(512, n)
            acc += dot(left[:, c * 512:(c + 1) * 512], w)
        return acc
    gu = product(up, up_scale, x[...], 8)
    act = (jax.nn.silu(gu[:, :512]) * gu[:, 512:]).astype(bf16)
    y[...] = product(down, down_scale, act, 1)


def pair_of_experts(rows: int) -> None:
    """Two experts at once: fp8 gate and up with a scale for 256 rows of K, MXFP4 down; 16 rows of the left operand."""
    @phase(f"expert_pair_up_{rows}", f"gate and up of two experts, fp8: [3584, 3072], {rows} rows as 16",
           ((2, 3584, 3072), f8), ((2, 16, 3072), bf16), ((16, 3584), bf16), ((2, 16, 768), bf16))
    def up(i, w, scale, x, y):
        acc = 0.0
        for c in range(14):
            acc += dot(x[:, c * 256:(c + 1) * 256], w[i % 2, c * 256:(c + 1) * 256]) * scale[i % 2, c:c + 1].astype(f32)
        for e in range(2):
            g, u = acc[:, e * 1536:e * 1536 + 768], acc[:, e * 1536 + 768:(e + 1) * 1536]
            y[e] = (4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * 25 * jnp.tanh(u / 25)).astype(bf16)

    @phase(f"expert_down_{rows}", f"down of one expert, MXFP4: [768, 3584], {rows} rows, block-diagonal in chunks of 256",
           ((2, 96, 3584), u32), ((2, 32, 3584), jnp.uint8), ((16, 768), f32), ((8, 3584), f32))
    def down(i, codes, scale, x, y):
        acc = [0.0] * rows
        scales = pltpu.bitcast(scale[i % 2].astype(i32) << 23, f32)
        for c in range(3):
            part = dot(batch_major(x[:, c * 256:(c + 1) * 256], rows, 256, 32), pltpu.bitcast(codes[i % 2, c * 32:(c + 1) * 32], f4).astype(f8))
            for r in range(rows):
                acc[r] += part[r * 8:(r + 1) * 8] * scales[c * 8:(c + 1) * 8]
        for r in range(rows):
            y[r:r + 1] += acc[r].sum(0, keepdims=True) * 0.1


for rows in (1, 2, 4, 8):
    pair_of_experts(rows)


# -- vectors -------------------------------------------------------------------------------------------------------------------


def vectors(rows: int) -> None:
    @phase(f"boundary_8192_{rows}", f"norm, gated residual, norm: [{rows}, 8192]", ((rows, 8192), bf16), ((rows, 8192), f32), ((4, 1, 8192), f32), ((rows, 8192), bf16))
    def boundary(i, x, s, gain, y):
        new = gain[0] * s[...] + gain[1] * rms(x[...].astype(f32) + i.astype(f32), 1e-8).astype(bf16).astype(f32)
        s[...] = new
        y[...] = (rms(new) * gain[2]).astype(bf16)

    @phase(f"norm_4096_{rows}", f"norm of [{rows}, 4096]", ((rows, 4096), bf16), ((1, 4096), f32), ((rows, 4096), bf16))
    def norm(i, x, gain, y):
        y[...] = (rms(x[...].astype(f32) + i.astype(f32)) * gain[...]).astype(bf16)

    @phase(f"mixture_8x4096_{rows}", f"norm of each of 8 experts' outputs, weighted sum: [{8 * rows}, 4096]",
           ((8 * rows, 4096), f32), ((8 * rows, 128), f32), ((1, 4096), f32), ((8, 4096), bf16))
    def mixture(i, x, weight, gain, y):
        for r in range(rows):
            v = x[r * 8:(r + 1) * 8] + i.astype(f32)
            y[r:r + 1] = (rms((v * gain[...]).astype(bf16).astype(f32), 1e-8) * weight[r * 8:(r + 1) * 8, :1]).sum(0, keepdims=True).astype(bf16)

    @phase(f"topk_256_{rows}", f"ranks of 256 scores by one comparison [256, 256] a row, 8 winners, {rows} rows", ((rows, 256), f32), ((1, 256), f32), ((rows, 8, 128), f32))
    def topk(i, logits, bias, y):
        lane = lax.broadcasted_iota(i32, (256, 256), 1)
        sub = lax.broadcasted_iota(i32, (256, 256), 0)
        for r in range(rows):
            score = jax.nn.sigmoid(logits[r:r + 1] * 0.17 + i.astype(f32)) + bias[...]
            mine = jnp.broadcast_to(score, (256, 256)).T
            ahead = (score > mine) | ((score == mine) & (lane < sub))
            rank = ahead.astype(f32).sum(1, keepdims=True)
            hit = rank == lax.broadcasted_iota(i32, (256, 128), 1).astype(f32)
            y[r] = jnp.broadcast_to(jnp.where(hit, mine[:, :1], 0.0).sum(0, keepdims=True), (8, 128))

    @phase(f"residual_mix_{rows}", f"softmax mixture of 9 values of 7168, norm, {rows} rows", ((rows, 8, 7168), f32), ((rows, 7168), bf16), ((2, 1, 7168), f32), ((rows, 7168), bf16))
    def mix(i, blocks, prefix, w, y):
        for r in range(rows):
            b, p = blocks[r] + i.astype(f32), prefix[r:r + 1].astype(f32)
            s = (b * w[0]).sum(-1, keepdims=True) * lax.rsqrt((b * b).mean(-1, keepdims=True) + 1e-5)
            t = (p * w[0]).sum(-1, keepdims=True) * lax.rsqrt((p * p).mean(-1, keepdims=True) + 1e-5)
            top = jnp.maximum(s.max(0, keepdims=True), t)
            e, f = jnp.exp(s - top), jnp.exp(t - top)
            v = ((b * e).sum(0, keepdims=True) + p * f) / (e.sum(0, keepdims=True) + f)
            y[r:r + 1] = (rms(v.astype(bf16).astype(f32)) * w[1]).astype(bf16)

    @phase(f"argmax_896_{rows}", f"one round of top-k by argmax over [{rows}, 896], its winner's id as a scalar", ((rows, 896), f32), ((rows, 128), f32), ((8, 128), i32))
    def argmax(i, score, won, y):
        lane = lax.broadcasted_iota(i32, (rows, 896), 1).astype(f32)
        s = score[...]
        top = s.max(-1, keepdims=True)
        first = jnp.where(s == top, lane, 1e9).min(-1, keepdims=True)
        score[...] = jnp.where(lane == first, -1.0, s)
        won[...] += jnp.broadcast_to(first, (rows, 128))
        winner = jnp.min(first).astype(i32)                          # a scalar: it addresses a copy

        @pl.when(winner < 112)
        def _():
            y[...] = jnp.full((8, 128), winner, i32)

    @phase(f"delta_{rows}", f"convolution and delta rule of 3 heads, state [128, 128] f32 each, {rows} rows",
           ((rows, 3, 128, 128), f32), ((rows, 3, 3, 3, 128), bf16), ((3, 4, 3, 128), f32), ((rows, 3, 8, 128), f32), ((rows, 3, 128), f32))
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
                column = [jnp.broadcast_to(z, (128, 128)).T for z in (k[h:h + 1], q[h:h + 1], decay)]
                s = state[r, h] * column[2]
                pred = (s * column[0]).sum(0, keepdims=True)
                s = s + column[0] * (jax.nn.sigmoid(x[r, h, 4:5]) * (v[h:h + 1] - pred))
                state[r, h] = s
                o = rms((s * column[1]).sum(0, keepdims=True))
                y[r, h:h + 1] = o * jax.nn.sigmoid(x[r, h, 5:6])

    @phase(f"attention_tile_128x3_{rows}", f"a tile of 128 tokens, 3 heads, keys of 256 and values of 128, scores on the vector unit, {rows} rows",
           ((2, rows, 3, 128, 256), bf16), ((2, rows, 3, 128, 128), bf16), ((rows, 3, 256), f32), ((rows, 3, 8, 128), f32), ((rows, 3, 128), f32))
    def latent_tile(i, keys, values, q, stats, y):
        for r in range(rows):
            s = jnp.concatenate([(keys[i % 2, r, h].astype(f32) * q[r, h:h + 1]).sum(-1)[None] for h in range(3)], 0)      # [3, 128]
            old = stats[r, :, 0, :1]
            top = jnp.maximum(old, s.max(-1, keepdims=True))
            p, scale = jnp.exp(s - top), jnp.exp(old - top)
            high = p.astype(bf16)
            low = (p - high.astype(f32)).astype(bf16)
            for h in range(3):
                v = values[i % 2, r, h]
                both = jnp.concatenate([high[h:h + 1], low[h:h + 1], jnp.zeros((6, 128), bf16)], 0)
                y[r, h:h + 1] = y[r, h:h + 1] * scale[h:h + 1] + dot(both, v)[:2].sum(0, keepdims=True)
                stats[r, h] = jnp.broadcast_to(top[h:h + 1], (8, 128))

    @phase(f"attention_tile_256x2_{rows}", f"a tile of 256 tokens, 16 heads on 2 KV heads of 64, scores on the MXU, values by two terms, {rows} rows",
           ((3, rows, 256, 128), bf16), ((3, rows, 256, 128), bf16), ((rows, 16, 128), bf16), ((2, rows, 16, 128), f32), ((rows, 16, 128), f32))
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


@phase("delta_6", "delta rule of 6 value heads on 2 key heads, state [128, 128] f32 each, 1 row", ((6, 128, 128), f32), ((8, 128), f32), ((6, 8, 128), f32), ((6, 128), f32))
def delta_6(i, state, qk, x, y):
    for h in range(6):
        k, q = (jnp.broadcast_to(qk[j:j + 1] + i.astype(f32), (128, 128)) for j in (h // 3, 2 + h // 3))
        s = state[h] * jnp.exp(x[h, 0:1, :1])
        pred = (s * k).sum(-1, keepdims=True)                        # the state is [v, k]
        v = jnp.broadcast_to(x[h, 1:2], (128, 128)).T[:, :1]
        s = s + (x[h, 2:3, :1] * (v - pred)) * k
        state[h] = s
        o = jnp.broadcast_to((s * q).sum(-1, keepdims=True), (128, 128)).T[:1]
        y[h:h + 1] = rms(o) * jax.nn.silu(x[h, 3:4])


@phase("attention_tile_128x1", "a tile of 128 tokens, 3 heads on one KV head of 256", ((2, 128, 256), bf16), ((2, 128, 256), bf16), ((8, 256), bf16), ((2, 8, 128), f32), ((8, 256), f32))
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


# -- compiled ------------------------------------------------------------------------------------------------------------------


def measure(name: str) -> float:
    """Cycles of one trip."""
    _, body, shapes = PHASES[name]

    def kernel(*refs):
        lax.fori_loop(0, 8, lambda i, _: body(i, *refs), None)
    vmem = pl.BlockSpec(memory_space=pltpu.VMEM)
    # everything is an output: the compiler drops what goes into scratch that nobody reads
    call = pl.pallas_call(kernel, out_shape=[jax.ShapeDtypeStruct(*s) for s in shapes], out_specs=[vmem] * len(shapes), name=name,
                          compiler_params=pltpu.CompilerParams(vmem_limit_bytes=63 * 2 ** 20, disable_bounds_checks=True))
    with jax.set_mesh(MESH):
        mapped = jax.shard_map(call, mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
        jax.jit(mapped).lower().compile()
    return cycles_of_loop(read_listing(bundles_of(DUMP, name))).all


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", help="regular expressions; none: all")
    asked.add_argument("-o", type=Path, help=f"writes them there, beside what the file has (the schedules read {OUT.name})")
    asked = asked.parse_args()
    names = [n for n in PHASES if not asked.names or any(re.fullmatch(p, n) for p in asked.names)]
    found = yaml.safe_load(asked.o.read_text()) if asked.o and asked.o.exists() else {}
    for name in names:
        try:
            found[name] = {"cycles": round(measure(name)), "what": PHASES[name][0]}
            print(f"{found[name]['cycles']:8}  {name:28} {PHASES[name][0]}", flush=True)
        except Exception as error:
            print(f"{'failed':>8}  {name:28} {str(error).splitlines()[0][:160]}", flush=True)
    if asked.o:
        head = "# Cycles of the compiler's static schedule, one trip of each phase: python benchmarks/phases.py -o benchmarks/handwritten/cycles.yaml\n"
        asked.o.write_text(head + "".join(f"{n}: {{cycles: {v['cycles']}, what: \"{v['what']}\"}}\n" for n, v in sorted(found.items())))


if __name__ == "__main__":
    main()
