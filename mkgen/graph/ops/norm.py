"""The norm of a row's features: RMS or layer norm, with its weight behind it, in front of it, or without one."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.spec.parts import Norm


@dataclass(frozen=True)
class Normalise(Op):
    """y = r(n(x)), in float32; see spec.parts.Norm.

    rms (Zhang and Sennrich, 2019): x * rsqrt(mean(x^2) + eps); layer (Ba et al., 2016): the same of x - mean(x), + bias.
    The weight multiplies as offset + w what comes out ('after') or what goes in ('before')."""
    x: Value
    y: Value
    norm: Norm
    w: Weight | None
    bias: Weight | None = None
    rounds = "y"

    @property
    def kind(self) -> str:
        return f"{self.norm.kind}_norm"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return () if self.y.carried else (self.y,)

    def weights(self):
        return tuple(w for w in (self.w, self.bias) if w is not None)

    def cost(self):
        return Cost(flops=4 * self.x.width)

    def meaning(self, env):
        x = env[self.x]
        gain = 1.0 if self.w is None else self.norm.offset + env.w(self.w)
        if self.norm.weight == "before":
            x = x * gain
        if self.norm.kind == "layer":
            x = x - jnp.mean(x, axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.norm.eps)
        if self.norm.weight == "after":
            x = x * gain
        env.put(self.y, x if self.bias is None else x + env.w(self.bias))

    def lower(self, b):
        b.together(*((w,) for w in self.weights()))
        w, bias = (None if w is None else b.vector(w) for w in (self.w, self.bias))
        b.step(self, "norm", "norm", x=b.read(self.x, "f32"), y=b.write(self.y), norm=self.norm, w=w, bias=bias, width=self.x.width)


def norm(name: str, x: Value, y: Value, n: Norm, role: str | None = None, dtype: str = "bf16") -> Normalise:
    """y = n(x). Its weight, as far as it has one, is the checkpoint's `role` (None: `name`), its bias `<role>_bias`; on the tape
    both are `dtype`."""
    role = role or name
    vector = lambda r: Weight(r, (x.width,), (r,), "vector", dtype)
    return Normalise(name, x, y, n, None if n.weight == "none" else vector(role), vector(f"{role}_bias") if n.bias else None)
