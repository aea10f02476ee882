"""The short causal convolution in front of a linear recurrence."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, State, Value, Weight


@dataclass(frozen=True)
class ShortConv(Op):
    """Causal depthwise convolution over the last `taps` inputs, then SiLU:
    y_t = r(silu(sum_tau w[tau] x_{t - taps + 1 + tau} + bias))."""
    xs: tuple[Value, ...]
    ys: tuple[Value, ...]
    ws: tuple[Weight, ...]
    taps: int
    state: str
    biases: tuple[Weight, ...] = ()
    kind = "short_conv"
    rounds = "y"

    def inputs(self):
        return self.xs

    def outputs(self):
        return self.ys

    def weights(self):
        return (*self.ws, *self.biases)

    def states(self):
        return (State(self.state, (self.taps - 1, sum(x.width for x in self.xs)), "f32"),)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {y.name: spread[x.name] for x, y in zip(self.xs, self.ys)}

    def cost(self):
        return Cost(flops=2 * self.taps * sum(x.width for x in self.xs))

    def meaning(self, env):
        x = jnp.concatenate([env[v] for v in self.xs], -1)
        window = jnp.concatenate([env.state(self.state), x[:, None]], 1)                  # [R, taps, C]
        w = jnp.concatenate([env.w(v) for v in self.ws], -1)
        y = jnp.sum(window * w, axis=1)
        y = jax.nn.silu(y + jnp.concatenate([env.w(v) for v in self.biases]) if self.biases else y)
        env.set_state(self.state, window[:, 1:])
        at = 0
        for v in self.ys:
            env.put(v, y[:, at:at + v.width])
            at += v.width

    def lower(self, b):
        width = sum(b.place(x).width for x in self.xs)
        window = b.state(self.states()[0], (self.taps - 1, 8, width), "f32", "inputs, oldest first")
        held = b.buffer(b.held(self.state), (self.taps - 1, 8, width), "f32", "the window of this layer")
        read, write = f"{held}_read", f"{held}_write"
        b.semaphores(f"{held}_in", (), "window in")
        b.semaphores(f"{held}_out", (), "window out")
        size = 8 * (self.taps - 1) * width * 4
        b.transfer(read, ("m", "index"), f"{window}.at[index]", f"m.{held}", f"m.{held}_in", size,
                   "The layer's convolution window, in.", reads=(window[2:],), writes=(held,))
        b.transfer(write, ("m", "index"), f"m.{held}", f"{window}.at[index]", f"m.{held}_out", size,
                   "The layer's convolution window, out.", reads=(held,), writes=(window[2:],))
        b.start_early(read, "m", "index")
        b.wait(read, "m", "index")
        b.together(self.ws, *([self.biases] if self.biases else []))
        y = b.join(self.ys, self.name)
        b.step(self, "conv", "short_conv", writes=(held,), x=b.columns(self.xs), window=f"m.{held}", y=y, w=b.vector(*self.ws),
               bias=b.vector(*self.biases) if self.biases else None, taps=self.taps, width=width)
        b.start(write, "m", "index")
        b.wait_late(write, "m", "index")
