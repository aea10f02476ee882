"""Rotary position embedding: one table of cosines and sines a step and kind, and how it turns heads."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.frequencies import magnitude
from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.spec.parts import Rope


@dataclass(frozen=True)
class Rotation:
    """A rope on heads of `head_dim` features, the first `width` of them turned, and its table: cos and sin are [R, head_dim]."""
    rope: Rope
    width: int
    head_dim: int
    cos: Value
    sin: Value

    @property
    def values(self) -> tuple[Value, Value]:
        return self.cos, self.sin

    def turn(self, x, cos, sin):
        """x cos + (the other of its pair) sin; x [R, heads, head_dim], cos and sin [R, head_dim], float32. The sign is the sine's."""
        half, width = self.width // 2, self.width
        if self.rope.layout == "half":
            other = jnp.concatenate([x[..., half:width], x[..., :half], x[..., width:]], -1)
        else:
            pairs = x[..., :width].reshape(*x.shape[:-1], half, 2)
            other = jnp.concatenate([pairs[..., ::-1].reshape(*x.shape[:-1], width), x[..., width:]], -1)
        return x * cos[:, None] + other * sin[:, None]

    def text(self, x: str, cos: str, sin: str) -> str:
        """Source text of the same, x [8, heads * head_dim] float32."""
        if self.rope.layout == "half":
            return f"rotate_halves({x}, {self.head_dim}, {self.width}, {cos}, {sin})"
        return f"rotate_pairs({x}, {self.head_dim}, {cos}, {sin})"


def rotation(kind: str, rope: Rope | None, head_dim: int) -> Rotation | None:
    """The rotation of a kind's heads; its table is made at the beginning of a step (`tables`)."""
    if rope is None:
        return None
    cos, sin = (Value(f"{kind}.{c}", head_dim, "f32", carried=True) for c in ("cos", "sin"))
    return Rotation(rope, head_dim if rope.width is None else rope.width, head_dim, cos, sin)


def tables(rotations: dict[str, Rotation]) -> list[Op]:
    """The ops that make the tables of all kinds; no two kinds share one, as little as it is."""
    return [RopeTable(f"{kind}.rope", r, rope_weight(kind, r)) for kind, r in rotations.items()]


def rope_weight(kind: str, r: Rotation) -> Weight:
    """The frequencies as a vector of the tape that no checkpoint has: the rule that makes it holds all of its numbers."""
    s = r.rope.scaling
    numbers = [r.rope.layout, r.head_dim, r.width, r.rope.base]
    if s is not None:
        numbers += [s.kind, s.factor, s.original_context, s.low_freq_factor, s.high_freq_factor, s.beta_fast, s.beta_slow, int(s.truncate)]
    return Weight(f"{kind}.rope", (r.head_dim,), (), f"rope({','.join(map(str, numbers))})", "f32")


@dataclass(frozen=True)
class RopeTable(Op):
    """cos, sin [R, head_dim] of position * frequency, times the rope's magnitude where features are turned; 1 and 0 elsewhere."""
    rotation: Rotation
    w: Weight
    kind = "rope_table"
    rounds = "none: float32"

    def inputs(self):
        return ()

    def outputs(self):
        return self.rotation.values

    def weights(self):
        return (self.w,)

    def cost(self):
        return Cost(flops=40 * self.rotation.head_dim)

    def meaning(self, env):
        frequency = env.w(self.w)
        angle = jnp.maximum(env.positions, 0).astype(jnp.float32)[:, None] * frequency
        size = jnp.where(frequency == 0, 1.0, magnitude(self.rotation.rope))
        env.put(self.rotation.cos, jnp.cos(angle) * size)
        env.put(self.rotation.sin, jnp.sin(angle) * size)

    def lower(self, b):
        r = self.rotation
        b.step(self, "rope", "rope_table", cos=b.write(r.cos), sin=b.write(r.sin), frequency=b.vector(self.w), head_dim=r.head_dim,
               magnitude=magnitude(r.rope))
