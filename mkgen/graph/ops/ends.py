"""The ends of the model: token ids in, logits and the greedy token out."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight


@dataclass(frozen=True)
class Embed(Op):
    """x = table[token]; the table is split by vocabulary, a row outside the rank's part is zero, so x is a partial sum."""
    x: Value
    table: Weight
    snapshots: Value | None
    kind = "embed"
    rounds = "none: rows are copied"

    def inputs(self):
        return ()

    def outputs(self):
        return (self.x,)

    def weights(self):
        return (self.table,)

    def gives(self, spread):
        return {self.x.name: "partial"}

    def meaning(self, env):
        x = jnp.take(env.w(self.table), env.tokens, axis=0)
        env.put(self.x, jnp.where(env.active[:, None], x, 0.0))

    def lower(self, b):
        b.embed(self)


@dataclass(frozen=True)
class Greedy(Op):
    """token = argmax(logits), ties to the lowest id. The logits stay split by vocabulary."""
    logits: Value
    token: Value
    kind = "greedy"

    def inputs(self):
        return (self.logits,)

    def outputs(self):
        return (self.token,)

    def needs(self, spread):
        return {}

    def cost(self):
        return Cost(flops=self.logits.width)

    def meaning(self, env):
        env.values[self.token.name] = jnp.argmax(env[self.logits], axis=-1).astype(jnp.int32)

    def lower(self, b):
        b.greedy(self)
