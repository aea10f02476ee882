"""The norm of each head by itself."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.spec.parts import Norm


@dataclass(frozen=True)
class HeadNorm(Op):
    """y = r(n(x)), head by head, in float32; see spec.parts.Norm. One weight [head_dim] serves all heads."""
    x: Value
    y: Value
    norm: Norm
    w: Weight | None
    head_dim: int
    kind = "head_norm"
    rounds = "y"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return () if self.w is None else (self.w,)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: spread[self.x.name]}

    def cost(self):
        return Cost(flops=5 * self.x.width)

    def meaning(self, env):
        x = env[self.x].reshape(env.rows, -1, self.head_dim)
        gain = 1.0 if self.w is None else self.norm.offset + env.w(self.w)
        x = x * gain if self.norm.weight == "before" else x
        x = x - jnp.mean(x, -1, keepdims=True) if self.norm.kind == "layer" else x
        x = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + self.norm.eps)
        env.put(self.y, (x * gain if self.norm.weight == "after" else x).reshape(env.rows, -1))

    def lower(self, b):
        b.step(self, "head_norm", "head_norm", x=b.read(self.x, "f32"), y=b.write(self.y), norm=self.norm,
               w=None if self.w is None else b.vector(self.w), head_dim=self.head_dim, heads=b.place(self.x).width // self.head_dim)
