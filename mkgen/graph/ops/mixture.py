"""The block-softmax residual: each sub-layer reads a learned mixture of block snapshots and the running sum."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight


MIX_LANES = 28 * 128                     # mixed at a time, at most: as many as the registers hold


def mixed_at_once(width: int) -> int:
    """Lanes of an even run of the width: all of it, a half, ..."""
    return next((width // n for n in range(-(-width // MIX_LANES), width // 128 + 1) if width % (128 * n) == 0), width)


@dataclass(frozen=True)
class BlockMixture(Op):
    """s_i = (sum_c v_i[c] w[c]) * rsqrt(mean_c v_i[c]^2 + eps) over the live snapshots and the running sum; y = r(sum_i softmax(s)_i v_i).

    `fact` names the per-layer table that says how many snapshots are live; None: all of them."""
    running: Value
    snapshots: Value
    y: Value
    w: Weight
    eps: float
    fact: str | None
    kind = "block_mixture"
    rounds = "y"

    def inputs(self):
        return (self.running, self.snapshots)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,)

    def cost(self):
        return Cost(flops=6 * self.y.width * (self.snapshots.planes + 1))

    def meaning(self, env):
        live = self.snapshots.planes if self.fact is None else env.fact(self.fact)
        v = jnp.concatenate([env[self.snapshots][:live], env[self.running][None]])        # [live + 1, R, D]
        score = jnp.sum(v * env.w(self.w), -1) * jax.lax.rsqrt(jnp.mean(v * v, -1) + self.eps)
        env.put(self.y, jnp.sum(jax.nn.softmax(score, axis=0)[..., None] * v, axis=0))

    def lower(self, b):
        at, w = b.vector_at(self.w)
        b.buffer("mix_sums", (self.snapshots.planes + 1, 8, 256), "f32", "of each snapshot: its weighed and squared features, summed; its share")
        b.step(self, "mixture", "block_mixture", running=b.ref(self.running), snapshots=b.ref(self.snapshots), y=b.write(self.y), at=at,
               w=f"tape_rows(m, g, {at}, {w.rows})", eps=self.eps,
               live=str(self.snapshots.planes) if self.fact is None else b.fact(self.fact), span=mixed_at_once(self.y.width))


@dataclass(frozen=True)
class BlockAdd(Op):
    """running = r(running + x). Where the layer opens a block, running is first kept as a snapshot and then replaced by x.

    `opens`, `block`: per-layer tables (1 where a block opens; the block's index); None for a sub-layer that never opens one."""
    running: Value
    snapshots: Value
    x: Value
    opens: str | None
    block: str | None
    kind = "block_add"
    rounds = "running"

    def inputs(self):
        return (self.running, self.snapshots, self.x)

    def outputs(self):
        return ()

    def cost(self):
        return Cost(flops=self.x.width)

    def meaning(self, env):
        running, x = env[self.running], env[self.x]
        if self.opens is not None and env.fact(self.opens):
            env.put(self.snapshots, env[self.snapshots].at[env.fact(self.block)].set(running))
            env.put(self.running, x)
        else:
            env.put(self.running, running + x)

    def lower(self, b):
        b.step(self, "mixture", "block_add", writes=(self.running.name, self.snapshots.name), running=b.ref(self.running),
               snapshots=b.ref(self.snapshots), x=b.read(self.x, "f32"),
               opens=self.opens and b.fact(self.opens), block=self.block and b.fact(self.block))
