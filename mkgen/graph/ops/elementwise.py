"""Additions and gated activations: ops that touch each feature once."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value
from mkgen.spec.model import Activation


@dataclass(frozen=True)
class Add(Op):
    """y = r(a + b). Two partial sums add to a partial sum, so that one reduction serves both."""
    a: Value
    b: Value
    y: Value
    kind = "add"
    rounds = "y"

    def inputs(self):
        return (self.a, self.b)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        same = spread[self.a.name] == spread[self.b.name] and self.y.dtype == "f32"
        return {} if same else {v.name: "whole" for v in self.inputs()}

    def gives(self, spread):
        same = spread[self.a.name] == spread[self.b.name] and self.y.dtype == "f32"
        return {self.y.name: spread[self.a.name] if same else "whole"}

    def cost(self):
        return Cost(flops=self.y.width)

    def meaning(self, env):
        env.put(self.y, env[self.a] + env[self.b])

    def lower(self, b):
        b.step(self, "elementwise", "add", a=b.read(self.a, "f32"), b=b.read(self.b, "f32"), y=b.write(self.y))


def activate(act: Activation, g, u):
    """phi(g, u) in float32; see spec.model.Activation."""
    if act.kind == "silu":
        return jax.nn.silu(g) * u
    return act.beta * jnp.tanh(g / act.beta) * jax.nn.sigmoid(g) * act.linear_beta * jnp.tanh(u / act.linear_beta)


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
               activation=b.activation(self.act))


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
