"""Additions and gated activations: ops that touch each feature once."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.spec.model import Activation


@dataclass(frozen=True)
class Add(Op):
    """y = r(a + scale b). Two partial sums add to a partial sum, so that one reduction serves both."""
    a: Value
    b: Value
    y: Value
    scale: float = 1.0
    kind = "add"
    rounds = "y"
    columnwise = True

    def inputs(self):
        return (self.a, self.b)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return {} if self.alike(spread) else {v.name: "whole" for v in self.inputs()}

    def alike(self, spread) -> bool:
        """Both split, or both whole; or both partial, where y is not rounded."""
        a, b = spread[self.a.name], spread[self.b.name]
        return a == b and (a != "partial" or self.y.dtype == "f32")

    def gives(self, spread):
        return {self.y.name: spread[self.a.name] if self.alike(spread) else "whole"}

    def cost(self):
        return Cost(flops=self.y.width)

    def meaning(self, env):
        env.put(self.y, env[self.a] + self.scale * env[self.b])

    def lower(self, b):
        b.step(self, "elementwise", "add", a=b.read(self.a, "f32"), b=b.read(self.b, "f32"), y=b.write(self.y), scale=self.scale)


def activate(act: Activation, g, u=None):
    """phi(g, u) in float32, or phi(g) of an ffn that is not gated; see spec.model.Activation."""
    if act.limit:
        g = jnp.minimum(g, act.limit)
    if act.kind == "silu":
        y = g * jax.nn.sigmoid(act.alpha * g)
    elif act.kind in ("gelu", "gelu_tanh"):
        y = jax.nn.gelu(g, approximate=act.kind == "gelu_tanh")
    elif act.kind in ("relu", "relu2"):
        y = jnp.maximum(g, 0.0) ** (2 if act.kind == "relu2" else 1)
    else:
        y = act.beta * jnp.tanh(g / act.beta) * jax.nn.sigmoid(g)
    if u is None:
        return y
    if act.limit:
        u = jnp.clip(u, -act.limit, act.limit)
    u = u + act.up_offset
    return y * (act.linear_beta * jnp.tanh(u / act.linear_beta) if act.kind == "situ" else u)


@dataclass(frozen=True)
class GatedActivation(Op):
    """y = r(phi(gate, up))."""
    gate: Value
    up: Value
    y: Value
    act: Activation
    kind = "gated_activation"
    rounds = "y"

    def inputs(self):
        return (self.gate, self.up)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: spread[self.gate.name]}

    def cost(self):
        return Cost(flops=8 * self.y.width)

    def meaning(self, env):
        env.put(self.y, activate(self.act, env[self.gate], env[self.up]))

    def lower(self, b):
        b.step(self, "elementwise", "gated_activation", gate=b.read(self.gate, "f32"), up=b.read(self.up, "f32"), y=b.write(self.y),
               **b.activation(self.act))


@dataclass(frozen=True)
class PlainActivation(Op):
    """y = r(phi(x))."""
    x: Value
    y: Value
    act: Activation
    kind = "activation"
    rounds = "y"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: spread[self.x.name]}

    def cost(self):
        return Cost(flops=6 * self.y.width)

    def meaning(self, env):
        env.put(self.y, activate(self.act, env[self.x]))

    def lower(self, b):
        b.step(self, "elementwise", "activation", x=b.read(self.x, "f32"), y=b.write(self.y), **b.activation(self.act, gated=False))


@dataclass(frozen=True)
class TokenGate(Op):
    """y = x sigmoid(h . w): one gate a token. A partial sum stays one: it is multiplied by the same number everywhere."""
    x: Value
    h: Value
    y: Value
    w: Weight                            # [h.width]
    kind = "token_gate"
    rounds = "y to its dtype"

    def inputs(self):
        return (self.x, self.h)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.w,)

    def needs(self, spread):
        return {self.h.name: "whole"}

    def gives(self, spread):
        return {self.y.name: spread[self.x.name]}

    def cost(self):
        return Cost(flops=2 * self.h.width + self.y.width)

    def meaning(self, env):
        z = jnp.sum(env[self.h] * env.w(self.w), axis=-1, keepdims=True)
        env.put(self.y, env[self.x] * jax.nn.sigmoid(z))

    def lower(self, b):
        b.step(self, "elementwise", "token_gate", x=b.read(self.x, "f32"), h=b.read(self.h, "f32"), w=b.vector(self.w),
               width=self.h.width, y=b.write(self.y))


@dataclass(frozen=True)
class Split(Op):
    """ys = x cut into consecutive runs of columns: names for parts, no work."""
    x: Value
    ys: tuple[Value, ...]
    kind = "split"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return self.ys

    def meaning(self, env):
        at = 0
        for y in self.ys:
            env.put(y, env[self.x][:, at:at + y.width])
            at += y.width

    def lower(self, b):
        b.alias(self.x, self.ys)
