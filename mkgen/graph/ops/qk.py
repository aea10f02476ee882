"""What happens to queries and keys between their projection and the scores: norm, rotation, temperature."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.graph.ops.rope import Rotation
from mkgen.spec.parts import QkNorm, QueryTemperature


@dataclass(frozen=True)
class QkSquares(Op):
    """[sum of q^2, sum of k^2] over all heads: what a norm of full width needs to know of the other ranks' heads."""
    q: Value
    k: Value
    y: Value
    kind = "qk_squares"
    rounds = "none: float32"

    def inputs(self):
        return (self.q, self.k)

    def outputs(self):
        return (self.y,)

    def needs(self, spread):
        return {}

    def gives(self, spread):
        return {self.y.name: "partial" if spread[self.q.name] == "split" else "whole"}

    def cost(self):
        return Cost(flops=2 * (self.q.width + self.k.width))

    def meaning(self, env):
        env.put(self.y, jnp.stack([jnp.sum(env[x] * env[x], -1) for x in (self.q, self.k)], -1))

    def lower(self, b):
        q, k = (b.read(x, "f32") for x in (self.q, self.k))
        b.step(self, "qk", "qk_squares", q=q, k=k, y=b.write(self.y), k_counts=b.counts(self.k))


@dataclass(frozen=True)
class QkNormRope(Op):
    """Queries and keys, each head: y = r(rope(r(norm(x)))), or r(norm(r(rope(x)))) where the norm comes after; queries times
    their temperature before the last rounding. Each part only where the model has it.

    norm of a head: x rsqrt(mean x^2 + eps) (offset + w); of full width the mean is over all heads: `squares` / width."""
    q: Value
    k: Value
    q_out: Value
    k_out: Value
    head_dim: int
    norm: QkNorm | None
    q_norm: Weight | None
    k_norm: Weight | None
    squares: Value | None
    rotation: Rotation | None
    temperature: QueryTemperature | None
    kind = "qk_norm_rope"
    rounds = "between norm and rotation; at the end"

    def inputs(self):
        return (self.q, self.k, *([self.squares] if self.squares else []), *(self.rotation.values if self.rotation else ()))

    def outputs(self):
        return (self.q_out, self.k_out)

    def weights(self):
        return tuple(w for w in (self.q_norm, self.k_norm) if w is not None)

    def needs(self, spread):
        return {self.squares.name: "whole"} if self.squares else {}

    def gives(self, spread):
        return {self.q_out.name: spread[self.q.name], self.k_out.name: spread[self.k.name]}

    def cost(self):
        return Cost(flops=10 * (self.q.width + self.k.width))

    def stages(self) -> list[str]:
        both = [s for s, there in (("norm", self.norm), ("rope", self.rotation)) if there]
        return both[::-1] if self.norm and self.norm.after_rope else both

    def meaning(self, env):
        for i, (x, y, w) in enumerate(((self.q, self.q_out, self.q_norm), (self.k, self.k_out, self.k_norm))):
            v = env[x].reshape(env.rows, -1, self.head_dim)
            for n, stage in enumerate(self.stages()):
                v = env.r(v) if n else v
                v = self.normed(env, v, w, i, x.width) if stage == "norm" else self.rotation.turn(v, *(env[t] for t in self.rotation.values))
            if self.temperature is not None and x is self.q:
                v = v * temperature(self.temperature, env.positions)[:, None, None]
            env.put(y, v.reshape(env.rows, -1))

    def normed(self, env, x, w: Weight | None, i: int, width: int):
        n = self.norm
        mean = jnp.mean(x * x, -1, keepdims=True) if self.squares is None else env[self.squares][:, i, None, None] / width
        gain = 1.0 if w is None else n.offset + env.w(w).reshape(-1, self.head_dim)
        return x * jax.lax.rsqrt(mean + n.eps) * gain

    def lower(self, b):
        full = self.squares is not None
        whole = [full and b.place(x).spread == "whole" for x in (self.q, self.k)]
        b.together(*((w,) for w in self.weights()))
        norms = [None if w is None else b.vector(w, whole=all_of_it) for w, all_of_it in zip((self.q_norm, self.k_norm), whole)]
        text = (lambda c: self.rotation.text(c, "cos", "sin")) if self.rotation else (lambda c: "")
        tables = [b.read(t, "f32") for t in self.rotation.values] if self.rotation else ("", "")
        b.step(self, "qk", "qk", stages=self.stages(), q=b.read(self.q, "f32"), k=b.read(self.k, "f32"), cos=tables[0], sin=tables[1],
               squares=b.read(self.squares, "f32") if full else "", q_out=b.write(self.q_out), k_out=b.write(self.k_out), norm=self.norm,
               q_norm=norms[0], k_norm=norms[1], widths=(self.q.width, self.k.width),
               local=tuple(b.place(x).width for x in (self.q, self.k)), head_dim=self.head_dim, turned=(text("q"), text("k")),
               temperature=self.temperature)


def temperature(t: QueryTemperature, positions):
    """[R] float32: 1 + beta ln(1 + floor((position + shift) / length)); the half keeps a quotient away from the next number."""
    p = jnp.maximum(positions, 0).astype(jnp.float32)
    return 1.0 + t.beta * jnp.log(1.0 + jnp.floor((p + (t.shift + 0.5)) / t.length))
