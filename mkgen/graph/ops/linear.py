"""y = x W, for one or several matrices that read the same x: one streamed run of blocks, one output each."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight


@dataclass(frozen=True)
class Linear(Op):
    """x [R, K] -> y_i [R, N_i] = r(x W_i), f32 accumulation; `y_i` is not rounded when its dtype is f32.

    `along`: 'columns' (each rank makes its units of y), 'rows' (x is split, y is a partial sum) or 'whole'."""
    x: Value
    ys: tuple[Value, ...]
    ws: tuple[Weight, ...]
    along: str = "columns"
    kind = "linear"
    rounds = "y to its dtype, once, after the whole sum"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return self.ys

    def weights(self):
        return self.ws

    def cost(self):
        return Cost(flops=2 * sum(w.elements for w in self.ws))

    def needs(self, spread):
        return {} if self.along == "rows" else {self.x.name: "whole"}

    def gives(self, spread):
        kind = {"columns": "split", "rows": "partial", "whole": "whole"}[self.along]
        return {y.name: kind for y in self.ys}

    def meaning(self, env):
        x = env[self.x]
        for y, w in zip(self.ys, self.ws):
            env.put(y, jnp.dot(x, env.w(w), precision="highest"))

    def lower(self, b):
        b.matmul(self)
