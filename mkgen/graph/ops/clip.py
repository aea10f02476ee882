"""A bound on what a projection or a norm makes."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value


@dataclass(frozen=True)
class Clip(Op):
    """y = r(x cut to [-limit, limit]). A partial sum is completed first: its terms alone have no bound."""
    x: Value
    y: Value
    limit: float
    kind = "clip"
    rounds = "y"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return {self.x.name: "whole"} if spread[self.x.name] == "partial" else {}

    def gives(self, spread):
        return {self.y.name: "split" if spread[self.x.name] == "split" else "whole"}

    def cost(self):
        return Cost(flops=2 * self.y.width)

    def meaning(self, env):
        env.put(self.y, jnp.clip(env[self.x], -self.limit, self.limit))

    def lower(self, b):
        b.step(self, "clip", "clip", x=b.read(self.x, "f32"), y=b.write(self.y), limit=self.limit)


def clipped(x: Value, name: str, limit: float) -> Clip:
    """The op that cuts x; what it makes is called `name`."""
    return Clip(name, x, Value(name, x.width, "bf16", x.units, x.groups), limit)
