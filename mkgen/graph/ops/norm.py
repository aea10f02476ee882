"""RMS norm over the features of a row."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight


@dataclass(frozen=True)
class RmsNorm(Op):
    """y = r(x * rsqrt(mean(x^2) + eps) * (offset + w)), in float32 (Zhang and Sennrich, 2019)."""
    x: Value
    y: Value
    w: Weight
    eps: float
    offset: float = 0.0
    kind = "rms_norm"
    rounds = "y"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,)

    def cost(self):
        return Cost(flops=4 * self.x.width)

    def meaning(self, env):
        x = env[self.x]
        scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.eps)
        env.put(self.y, x * scale * (self.offset + env.w(self.w)))

    def lower(self, b):
        b.step(self, "norm", "rms_norm", x=b.read(self.x, "f32"), y=b.write(self.y), w=b.vector(self.w),
               width=self.x.width, eps=self.eps, offset=self.offset)
