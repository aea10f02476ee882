"""The block-softmax residual: each sub-layer reads a learned mixture of block snapshots and the running sum."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.spec.parts import Norm


@dataclass(frozen=True)
class WeighPast(Op):
    """The past of the next sub-layer's mixture, weighed with that one's w while this one's result is on its way.

    Where the layer opens a block, the running sum is kept as a snapshot first, and begins anew. Per-layer tables: `live` says how
    many snapshots there are then, `opens` has 1 where a block opens; None: nothing is live, none opens.
    Source of the split: M. Milakov, N. Gimelshein, Online normalizer calculation for softmax, 2018."""
    running: Value
    snapshots: Value
    past: Value                          # sum_i exp(s_i - max s) v_i over the live snapshots
    sums: Value                          # on 128 lanes each: max s, sum_i exp(s_i - max s), sum of the squares of past
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

    def changes(self):
        opened = () if self.opens is None else (self.running, self.snapshots)
        return (self.past, self.sums, *opened)

    def cost(self):
        return Cost(flops=6 * self.running.width * self.snapshots.planes)

    def meaning(self, env):
        """The reference keeps the live snapshots themselves: w is the next sub-layer's."""
        if self.opens is not None and env.fact(self.opens):
            env.put(self.snapshots, env[self.snapshots].at[env.fact(self.live) - 1].set(env[self.running]))
            env.put(self.running, jnp.zeros_like(env[self.running]))
        env.put(self.past, env[self.snapshots][:env.fact(self.live) if self.live else 0])

    def lower(self, b):
        running, snapshots, past, sums = (b.place(v).buffer for v in (self.running, self.snapshots, self.past, self.sums))
        if self.opens is not None:
            b.step(self, "mixture", "open_block", reads=(running, snapshots), writes=(running, snapshots))
        b.step(self, "mixture", "weigh_past", reads=(snapshots,), writes=(past, sums), w=b.ahead(self.past.width), eps=self.eps,
               live=b.fact(self.live) if self.live else "0")


@dataclass(frozen=True)
class BlockMixture(Op):
    """s_i = (sum_c v_i[c] w[c]) * rsqrt(mean_c v_i[c]^2 + eps) over the live snapshots and the running sum; y = r(n(sum_i softmax(s)_i v_i)).

    The snapshots' part is `past`, which the sub-layer before has made. n is an RMS norm with its weight behind it, or nothing. The mean
    square of a past + b v comes from the sums of past^2, past v and v^2: if all but a part p of them cancels, it is known to 1e-7 / p."""
    running: Value
    past: Value
    sums: Value
    y: Value
    w: Weight
    eps: float
    norm: Norm | None = None
    gain: Weight | None = None
    kind = "block_mixture"
    rounds = "y"

    def inputs(self):
        return (self.running, self.past, self.sums)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,) if self.gain is None else (self.w, self.gain)

    def cost(self):
        return Cost(flops=12 * self.y.width)

    def meaning(self, env):
        v = jnp.concatenate([env[self.past], env[self.running][None]])        # [live + 1, R, D]
        score = jnp.sum(v * env.w(self.w), -1) * jax.lax.rsqrt(jnp.mean(v * v, -1) + self.eps)
        y = jnp.sum(jax.nn.softmax(score, axis=0)[..., None] * v, axis=0)
        if self.norm is not None:
            y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.norm.eps) * (self.norm.offset + env.w(self.gain))
        env.put(self.y, y)

    def lower(self, b):
        b.together(*((w,) for w in self.weights()))
        at, w = b.vector_at(self.w)
        if at:
            raise ValueError(f"{self.name}: w lies at row {at}; the sub-layer before looks for it at the beginning of a chunk")
        b.step(self, "mixture", "block_mixture", reads=tuple(b.place(v).buffer for v in self.inputs()), y=b.write(self.y),
               w=f"tape_rows(m, g, 0, {w.rows})", eps=self.eps, norm=self.norm, gain=self.gain and b.vector(self.gain))
