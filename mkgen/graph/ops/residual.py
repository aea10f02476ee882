"""How the result of a sub-layer goes back to the residual stream."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight

FLOOR = 1e-3                                 # of alpha^2 in a gated residual


@dataclass(frozen=True)
class ResidualAdd(Op):
    """running = r(alpha base + beta x); base is the stream itself, or what the sub-layer read."""
    running: Value
    x: Value
    base: Value
    alpha: float = 1.0
    beta: float = 1.0
    kind = "residual_add"
    rounds = "running"

    def inputs(self):
        return (self.base, self.x)

    def outputs(self):
        return ()

    def cost(self):
        return Cost(flops=3 * self.x.width)

    def meaning(self, env):
        env.put(self.running, self.alpha * env[self.base] + self.beta * env[self.x])

    def lower(self, b):
        terms = [text if factor == 1.0 else f"{factor!r} * {text}"
                 for factor, text in ((self.alpha, b.read(self.base, "f32")), (self.beta, b.read(self.x, "f32")))]
        b.step(self, "elementwise", "add", a=terms[0], b=terms[1], y=b.write(self.running))


@dataclass(frozen=True)
class GatedAdd(Op):
    """running = r(alpha running + beta x): beta = sigmoid(g / temperature), alpha = sqrt(max(1 - beta^2, 1e-3)), both a channel."""
    running: Value
    x: Value
    g: Weight
    temperature: float
    kind = "gated_add"
    rounds = "running"

    def inputs(self):
        return (self.running, self.x)

    def outputs(self):
        return ()

    def weights(self):
        return (self.g,)

    def cost(self):
        return Cost(flops=10 * self.x.width)

    def meaning(self, env):
        beta = jax.nn.sigmoid(env.w(self.g) / self.temperature)
        alpha = jnp.sqrt(jnp.maximum((1 - beta) * (1 + beta), FLOOR))
        env.put(self.running, alpha * env[self.running] + beta * env[self.x])

    def lower(self, b):
        g = b.vector(self.g)
        b.step(self, "residual", "gated_add", running=b.read(self.running, "f32"), x=b.read(self.x, "f32"), y=b.write(self.running), g=g,
               temperature=self.temperature, floor=FLOOR, width=self.x.width)


@dataclass(frozen=True)
class Round(Op):
    """y = r(x): what a sub-layer without a norm in front of it reads of a float32 stream."""
    x: Value
    y: Value
    kind = "round"
    rounds = "y"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return () if self.y.carried else (self.y,)

    def meaning(self, env):
        env.put(self.y, env[self.x])

    def lower(self, b):
        b.step(self, "residual", "store", x=b.read(self.x, "f32"), y=b.write(self.y))


def one_term(b, x: Value) -> str:
    """Source text of x as one rank's term of a sum over the ranks: a value that all ranks hold counts once."""
    text = b.read(x, "f32")
    return text if b.ranks == 1 or b.place(x).spread == "partial" else f'jnp.where(lax.axis_index("tp") == 0, {text}, 0.0)'


def unless_split(spread: dict[str, str], x: Value) -> dict[str, str]:
    return {x.name: "whole"} if spread.get(x.name) == "split" else {}


@dataclass(frozen=True)
class KeepBranch(Op):
    """branch = x, for the sub-layer that runs beside this one: a partial sum, so that one reduction serves both."""
    x: Value
    branch: Value
    kind = "keep_branch"
    rounds = "none"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return ()

    def needs(self, spread):
        return unless_split(spread, self.x)

    def meaning(self, env):
        env.put(self.branch, env[self.x])

    def lower(self, b):
        b.step(self, "residual", "store", x=one_term(b, self.x), y=b.write(self.branch))


@dataclass(frozen=True)
class AddBranch(Op):
    """y = branch + x, still a partial sum."""
    branch: Value
    x: Value
    y: Value
    kind = "add_branch"
    rounds = "none"

    def inputs(self):
        return (self.branch, self.x)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return unless_split(spread, self.x)

    def gives(self, spread):
        return {self.y.name: "partial"}

    def cost(self):
        return Cost(flops=self.x.width)

    def meaning(self, env):
        env.put(self.y, env[self.branch] + env[self.x])

    def lower(self, b):
        b.step(self, "elementwise", "add", a=b.read(self.branch, "f32"), b=one_term(b, self.x), y=b.write(self.y))
