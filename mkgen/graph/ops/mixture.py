"""The block-softmax residual: each sub-layer reads a learned mixture of block snapshots and the running sum."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight


@dataclass(frozen=True)
class WeighPast(Op):
    """The past of the next sub-layer's mixture, weighed with that one's w while this one's result is on its way.

    Where the layer opens a block, the running sum is kept as a snapshot first, and begins anew. Per-layer tables: `live` says how
    many snapshots there are then, `opens` has 1 where a block opens; None: nothing is live, none opens.
    Source of the split: M. Milakov, N. Gimelshein, Online normalizer calculation for softmax, 2018."""
    running: Value
    snapshots: Value
    past: Value                          # sum_i exp(s_i - max s) v_i over the live snapshots
    softmax: Value                       # max s on the first half of its lanes, sum_i exp(s_i - max s) on the second
    eps: float
    live: str | None = None
    opens: str | None = None
    kind = "weigh_past"
    rounds = "none"
    ahead = True

    def inputs(self):
        return (self.running, self.snapshots)

    def outputs(self):
        return ()

    def cost(self):
        return Cost(flops=6 * self.running.width * self.snapshots.planes)

    def meaning(self, env):
        """The reference keeps the live snapshots themselves: w is the next sub-layer's."""
        if self.opens is not None and env.fact(self.opens):
            env.put(self.snapshots, env[self.snapshots].at[env.fact(self.live) - 1].set(env[self.running]))
            env.put(self.running, jnp.zeros_like(env[self.running]))
        env.put(self.past, env[self.snapshots][:env.fact(self.live) if self.live else 0])

    def lower(self, b):
        running, snapshots, past, softmax = (b.place(v).buffer for v in (self.running, self.snapshots, self.past, self.softmax))
        if self.opens is not None:
            b.step(self, "mixture", "open_block", reads=(running, snapshots), writes=(running, snapshots))
        b.step(self, "mixture", "weigh_past", reads=(snapshots,), writes=(past, softmax), w=b.ahead(self.past.width), eps=self.eps,
               live=b.fact(self.live) if self.live else "0")


@dataclass(frozen=True)
class BlockMixture(Op):
    """s_i = (sum_c v_i[c] w[c]) * rsqrt(mean_c v_i[c]^2 + eps) over the live snapshots and the running sum; y = r(sum_i softmax(s)_i v_i).

    The snapshots' part is `past`, which the sub-layer before has made."""
    running: Value
    past: Value
    softmax: Value
    y: Value
    w: Weight
    eps: float
    kind = "block_mixture"
    rounds = "y"

    def inputs(self):
        return (self.running, self.past, self.softmax)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,)

    def cost(self):
        return Cost(flops=8 * self.y.width)

    def meaning(self, env):
        v = jnp.concatenate([env[self.past], env[self.running][None]])        # [live + 1, R, D]
        score = jnp.sum(v * env.w(self.w), -1) * jax.lax.rsqrt(jnp.mean(v * v, -1) + self.eps)
        env.put(self.y, jnp.sum(jax.nn.softmax(score, axis=0)[..., None] * v, axis=0))

    def lower(self, b):
        at, w = b.vector_at(self.w)
        if at:
            raise ValueError(f"{self.name}: w lies at row {at}; the sub-layer before looks for it at the beginning of a chunk")
        b.step(self, "mixture", "block_mixture", reads=tuple(b.place(v).buffer for v in self.inputs()), y=b.write(self.y),
               w=f"tape_rows(m, g, 0, {w.rows})", eps=self.eps)
