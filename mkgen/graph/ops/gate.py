"""The gate of an attention's output."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value
from mkgen.spec.parts import Gate


@dataclass(frozen=True)
class OutputGate(Op):
    """y = r(x * r(act(z))); z has a number for each channel, or one for each head of `head_dim` channels. act: see spec.parts.Gate."""
    x: Value
    z: Value
    y: Value
    gate: Gate
    head_dim: int
    kind = "output_gate"
    rounds = "the gate, then y"

    def inputs(self):
        return (self.x, self.z)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: spread[self.x.name]}

    def cost(self):
        return Cost(flops=4 * self.y.width)

    def meaning(self, env):
        act = {"sigmoid": jax.nn.sigmoid, "softplus": jax.nn.softplus}[self.gate.act]
        g = env.r(act(env[self.z]))
        env.put(self.y, env[self.x] * (jnp.repeat(g, self.head_dim, -1) if self.gate.per == "head" else g))

    def lower(self, b):
        head = self.gate.per == "head"
        b.step(self, "gate", "output_gate", x=b.read(self.x, "f32" if head else "bf16"), z=b.read(self.z, "f32"), y=b.write(self.y),
               act=self.gate.act, head_dim=self.head_dim if head else 0)


def gate_of(name: str, gate: Gate, heads: int, value_dim: int, groups: int) -> Value:
    """z of a gate, before it is projected; `groups` as of the heads."""
    return Value(name, heads * (1 if gate.per == "head" else value_dim), units=heads, groups=groups)
