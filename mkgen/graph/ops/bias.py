"""A bias behind a product."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.graph.ir import Cost, Op, Value, Weight


@dataclass(frozen=True)
class AddBias(Op):
    """y = r(x + w), w a vector shared out as x is. A partial sum is completed first: the bias counts once."""
    x: Value
    w: Weight
    y: Value
    kind = "add_bias"
    rounds = "y (x is a product that is not rounded before)"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,)

    def needs(self, spread):
        return {self.x.name: "whole"} if spread[self.x.name] == "partial" else {}

    def gives(self, spread):
        return {self.y.name: "split" if spread[self.x.name] == "split" else "whole"}

    def cost(self):
        return Cost(flops=self.y.width)

    def meaning(self, env):
        env.put(self.y, env[self.x] + env.w(self.w))

    def lower(self, b):
        x = b.place(self.x)
        b.step(self, "bias", "add_bias", x=b.read(self.x, "f32"), y=b.write(self.y), w=b.vector(self.w, whole=x.spread == "whole"),
               width=x.width)


def biased(x: Value, name: str, role: str | None = None, y: str | None = None, dtype: str = "bf16") -> AddBias:
    """The op that adds the checkpoint's `role` (None: `name`) to x, a product of dtype f32; its sum is called `y`."""
    w = Weight(name, (x.width,), (role or name,), "vector", "f32", split=0 if x.units > 1 else None, units=x.units, groups=x.groups)
    return AddBias(name, x, w, Value(y or f"{name}ed", x.width, dtype, x.units, x.groups))
