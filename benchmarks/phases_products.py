"""Phases that multiply: loads of weight rings, routed experts. See phases.py."""
from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from phases_kit import bf16, dot, f4, f8, f32, i4, i8, i32, phase, u32


def packed(name: str, what: str, dtype, k: int, n: int, pack: int) -> None:
    """One load of a ring: `pack` tiles [k, n] side by side, multiplied at once by as many slices of x below one another."""

    @phase(name, what, ((2, k, n * pack), dtype), ((8, k * pack), bf16), ((8, n), f32))
    def body(i, w, x, y):
        left = jnp.concatenate([x[:, j * k : (j + 1) * k] for j in range(pack)], axis=0)
        part = dot(left, w[i % 2])
        y[...] += sum(part[j * 8 : (j + 1) * 8, j * n : (j + 1) * n] for j in range(pack))


def separate(name: str, what: str, dtype, k: int, n: int, pack: int) -> None:
    """The same load with a product for each tile."""

    @phase(name, what, ((2, k, n * pack), dtype), ((8, k * pack), bf16), ((8, n), f32))
    def body(i, w, x, y):
        for j in range(pack):
            y[...] += dot(x[:, j * k : (j + 1) * k], w[i % 2, :, j * n : (j + 1) * n])


for n, pack in ((1024, 1), (512, 2), (256, 4), (512, 1), (256, 1)):
    packed(f"bf16_1024x{n}x{pack}", f"a ring load of {pack} tiles [1024, {n}] bf16, 8 rows", bf16, 1024, n, pack)
packed("bf16_512x256x8", "a ring load of 8 tiles [512, 256] bf16, 8 rows", bf16, 512, 256, 8)
for n, pack in ((2048, 1), (1024, 2), (512, 4), (256, 8)):
    packed(f"int8_1024x{n}x{pack}", f"a ring load of {pack} tiles [1024, {n}] int8, 8 rows, one product", i8, 1024, n, pack)
    separate(f"int8_1024x{n}x{pack}_separate", "the same, a product for each tile", i8, 1024, n, pack)
packed("bf16_1024x1280", "a ring load [1024, 1280] bf16, 8 rows", bf16, 1024, 1280, 1)
packed("bf16_1024x1152", "a ring load [1024, 1152] bf16, 8 rows", bf16, 1024, 1152, 1)
packed("bf16_768x1280", "a ring load [768, 1280] bf16, 8 rows", bf16, 768, 1280, 1)


@phase(
    "bf16_mib",
    "one MiB of a bf16 matrix in one product: [4096, 512] over 4, 16 rows",
    ((2, 4096, 512), bf16),
    ((16, 4096), bf16),
    ((16, 512), f32),
)
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
    return jnp.concatenate(
        [jnp.where(keep, jnp.broadcast_to(x[r : r + 1], (groups, chunk)), 0.0) for r in range(rows)], 0
    ).astype(bf16)


@phase(
    "int4_expert",
    "an expert int4 g128: [4096, 1024] and [512, 4096], up to 8 rows, group-major in chunks of 512",
    ((2, 512, 1024), i32),
    ((2, 8, 4, 1024), f32),
    ((2, 64, 4096), i32),
    ((2, 1, 4, 4096), f32),
    ((8, 32, 512), bf16),
    ((8, 4096), f32),
)
def int4_expert(i, up, up_scale, down, down_scale, left, y):
    slot = i % 2

    def product(codes, scale, lefts, chunks):
        acc = 0.0
        for c in range(chunks):
            part = dot(lefts(c), pltpu.bitcast(codes[slot, c * 64 : (c + 1) * 64], i4))
            for g in range(4):
                acc += part[g * 8 : (g + 1) * 8] * scale[slot, c, g : g + 1]
        return acc

    gu = product(up, up_scale, lambda c: left[c], 8)
    act = jax.nn.silu(gu[:, :512]) * gu[:, 512:]
    y[...] = product(down, down_scale, lambda c: group_major(act, 512, 128), 1)


def nvfp4_block(rows: int) -> None:
    @phase(
        f"nvfp4_expert_{rows}",
        f"an expert NVFP4: [4096, 1024] and [512, 4096], {rows} rows, batch-major in chunks of 512",
        ((2, 512, 1024), i32),
        ((2, 8, 32, 1024), f8),
        ((2, 64, 4096), i32),
        ((2, 1, 32, 4096), f8),
        ((8, 32 * rows, 512), bf16),
        ((8, 4096), f32),
    )
    def body(i, up, up_scale, down, down_scale, left, y):
        slot = i % 2

        def product(codes, scale, lefts, chunks):
            acc = [0.0] * rows
            for c in range(chunks):
                part = dot(lefts(c), pltpu.bitcast(codes[slot, c * 64 : (c + 1) * 64], f4).astype(f8))
                s = scale[slot, c].astype(f32)
                for r in range(rows):
                    block = part[r * 32 : (r + 1) * 32] * s
                    acc[r] += block[:8] + block[8:16] + block[16:24] + block[24:]
            done = [a.sum(0, keepdims=True) for a in acc]
            return (
                jnp.concatenate(done + [jnp.zeros((8 - rows, done[0].shape[1]), f32)], 0)
                if rows < 8
                else jnp.concatenate(done, 0)
            )

        gu = product(up, up_scale, lambda c: left[c], 8)
        act = jax.nn.silu(gu[:, :512]) * gu[:, 512:]
        y[...] = product(down, down_scale, lambda c: batch_major(act, rows, 512, 16), 1)


for rows in (1, 2, 4, 8):
    nvfp4_block(rows)


@phase(
    "nvfp4_expert_vpu",
    "an expert NVFP4, up to 8 rows, codes made bf16 on the vector unit",
    ((2, 512, 1024), i32),
    ((2, 8, 32, 1024), f8),
    ((2, 64, 4096), i32),
    ((2, 1, 32, 4096), f8),
    ((8, 4096), bf16),
    ((8, 4096), f32),
)
def nvfp4_vpu(i, up, up_scale, down, down_scale, x, y):
    slot = i % 2

    def product(codes, scale, left, chunks):
        acc = 0.0
        for c in range(chunks):
            w = pltpu.bitcast(codes[slot, c * 64 : (c + 1) * 64], f4).astype(bf16)
            n = w.shape[1]
            w = (w.reshape(32, 16, n) * scale[slot, c].astype(bf16)[:, None, :]).reshape(512, n)
            acc += dot(left[:, c * 512 : (c + 1) * 512], w)
        return acc

    gu = product(up, up_scale, x[...], 8)
    act = (jax.nn.silu(gu[:, :512]) * gu[:, 512:]).astype(bf16)
    y[...] = product(down, down_scale, act, 1)


def pair_of_experts(rows: int) -> None:
    """Two experts at once: fp8 gate and up with a scale for 256 rows of K, MXFP4 down; 16 rows of the left operand."""

    @phase(
        f"expert_pair_up_{rows}",
        f"gate and up of two experts, fp8: [3584, 3072], {rows} rows as 16",
        ((2, 3584, 3072), f8),
        ((2, 16, 3072), bf16),
        ((16, 3584), bf16),
        ((2, 16, 768), bf16),
    )
    def up(i, w, scale, x, y):
        acc = 0.0
        for c in range(14):
            acc += dot(x[:, c * 256 : (c + 1) * 256], w[i % 2, c * 256 : (c + 1) * 256]) * scale[i % 2, c : c + 1].astype(f32)
        for e in range(2):
            g, u = acc[:, e * 1536 : e * 1536 + 768], acc[:, e * 1536 + 768 : (e + 1) * 1536]
            y[e] = (4 * jnp.tanh(g / 4) * jax.nn.sigmoid(g) * 25 * jnp.tanh(u / 25)).astype(bf16)

    @phase(
        f"expert_down_{rows}",
        f"down of one expert, MXFP4: [768, 3584], {rows} rows, block-diagonal in chunks of 256",
        ((2, 96, 3584), u32),
        ((2, 32, 3584), jnp.uint8),
        ((16, 768), f32),
        ((8, 3584), f32),
    )
    def down(i, codes, scale, x, y):
        acc = [0.0] * rows
        scales = pltpu.bitcast(scale[i % 2].astype(i32) << 23, f32)
        for c in range(3):
            part = dot(
                batch_major(x[:, c * 256 : (c + 1) * 256], rows, 256, 32),
                pltpu.bitcast(codes[i % 2, c * 32 : (c + 1) * 32], f4).astype(f8),
            )
            for r in range(rows):
                acc[r] += part[r * 8 : (r + 1) * 8] * scales[c * 8 : (c + 1) * 8]
        for r in range(rows):
            y[r : r + 1] += acc[r].sum(0, keepdims=True) * 0.1


for rows in (1, 2, 4, 8):
    pair_of_experts(rows)
