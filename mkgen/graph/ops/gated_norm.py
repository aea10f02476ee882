"""The norm and the gate on a linear recurrence's output."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.spec.mixers import LinearGate, LinearNorm

ACTS = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}


@dataclass(frozen=True)
class GatedNorm(Op):
    """Norm, then gate: y = r(r(rms(x) w) * r(act(g))); gate, then norm: y = r(rms(x act(g)) w). Either may be missing.

    rms over each run of `size` channels; w serves every run if it is `size` long, otherwise it has a number a channel.
    g is the gate's projection + bias."""
    x: Value
    g: Value | None
    y: Value
    w: Weight | None
    bias: Weight | None
    size: int
    norm: LinearNorm | None
    gate: LinearGate | None
    kind = "gated_norm"
    rounds = "y; where the gate comes after the norm, the norm and the gate"

    def inputs(self):
        return (self.x,) if self.g is None else (self.x, self.g)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return tuple(w for w in (self.w, self.bias) if w is not None)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: spread[self.x.name]}

    def cost(self):
        return Cost(flops=8 * self.x.width)

    @property
    def first(self) -> bool:
        """Is the gate on the norm's input?"""
        return self.norm is not None and self.norm.gate_first

    def meaning(self, env):
        x, gate = env[self.x], None
        if self.gate is not None:
            gate = ACTS[self.gate.act](env[self.g] + (0.0 if self.bias is None else env.w(self.bias)))
        if self.first and gate is not None:
            x = x * gate
        if self.norm is not None:
            runs = x.reshape(env.rows, -1, self.size)
            x = (runs * jax.lax.rsqrt(jnp.mean(runs * runs, -1, keepdims=True) + self.norm.eps)).reshape(x.shape)
            x = x * jnp.tile(env.w(self.w), x.shape[1] // self.w.elements)
        env.put(self.y, x if self.first or gate is None else env.r(x) * env.r(gate))

    def lower(self, b):
        place = b.place(self.x)
        g = None if self.g is None else b.read(self.g, "f32")
        act = dict(act=self.gate.act if self.gate else None, size=self.size, eps=self.norm.eps if self.norm else None)
        if self.norm is None or b.apart(self.x, self.size):
            b.together(*((w,) for w in self.weights()))
            w, bias = (None if v is None else b.vector(v) for v in (self.w, self.bias))
            b.step(self, "gated_norm", "gated_norm", x=b.read(self.x, "f32"), g=g, y=b.write(self.y), w=w, bias=bias,
                   shared=self.w is not None and self.w.split is None, first=self.first, width=place.width, **act)
            return
        # a run of channels lies on several ranks: its sum of squares goes round
        runs = dict(runs=self.x.width // self.size, start=b.first_column(self.x), width=place.width, **act)
        first, last = ((g, self.bias), (None, None)) if self.first else ((None, None), (g, self.bias))
        x = b.room(f"{self.name}_x", place.width, "f32", "what is normed")
        squares = b.room(f"{self.name}_squares", -(-runs["runs"] // 128) * 128, "f32", "sums of squares, a run of channels a lane")
        b.step(self, "gated_norm", "squares", writes=(x, squares), x=b.read(self.x, "f32"), g=first[0],
               bias=b.vector(first[1]) if first[1] else None, u=f"m.{x}", squares=f"m.{squares}",
               counts=b.counts(self.x), **runs)
        b.all_reduce_buffer(squares)
        b.together((self.w,), *([(last[1],)] if last[1] else []))
        b.step(self, "gated_norm", "spanning", u=f"m.{x}", g=last[0], y=b.write(self.y), w=b.vector(self.w),
               bias=b.vector(last[1]) if last[1] else None, squares=f"m.{squares}", **runs)
