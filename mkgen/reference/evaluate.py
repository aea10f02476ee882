"""The oracle of the kernel: the graph, run op by op with each op's own meaning, through caches and states.

`exact=True` rounds nothing (float32, to be held against other people's code); otherwise every value is rounded where its op
says so, unless the build keeps activations in float32. Ops run one at a time, so that no compiler fuses a rounding away.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Callable, Protocol

import jax.numpy as jnp
import numpy as np

from mkgen.graph.ir import LayerGraph, SubLayer, Value, Weight


class Params(Protocol):
    """Logical weights by family and layer: matrices [K, N], vectors [n], one expert's matrix [K, N]. float32."""

    def weight(self, weight: Weight, layer: int) -> np.ndarray: ...

    def expert(self, weight: Weight, layer: int, expert: int) -> np.ndarray: ...


def round_bf16(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@dataclass
class Decoder:
    """Decodes `rows` sequences side by side. States are kept here, one array a state: [layers of that kind, rows, ...]."""
    graph: LayerGraph
    params: Params
    rows: int
    context: int
    exact: bool = False
    activations: str = "bf16"            # as in the spec: with f32 only the positional caches are rounded
    states: dict[str, np.ndarray] = field(default_factory=dict)
    notes: list[tuple[str, int, np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self):
        for sub in self.graph.sublayers():
            layers = sum(sub.name in run for run in self.graph.layers)
            for op in sub.ops:
                for s in op.states():
                    shape = (layers, self.rows, *((self.context,) if s.positional else ()), *s.shape)
                    self.states.setdefault(s.name, np.zeros(shape, np.float32))

    def step(self, tokens, positions) -> np.ndarray:
        """tokens [rows], positions [rows] (-1: inactive) -> logits [rows, vocab] float32; states move on. `notes` holds the
        routing of this step: (op, layer, chosen [rows, experts], gap [rows])."""
        self.notes = []
        env = Env(self, jnp.asarray(tokens, jnp.int32), jnp.asarray(positions, jnp.int32))
        env.run(self.graph.begin, 0, 0)
        for layer, ((mixer, ffn), (i, j)) in enumerate(zip(self.graph.layers, self.graph.kind_index())):
            if mixer:
                env.run(self.graph.mixers[mixer], layer, i)
            if ffn:
                env.run(self.graph.ffns[ffn], layer, j)
        env.run(self.graph.end, len(self.graph.layers), 0)
        return np.asarray(env.values["logits"])


class Env:
    """What an op's meaning may touch while one sub-layer runs."""

    def __init__(self, decoder: Decoder, tokens, positions):
        self.decoder, self.tokens, self.positions = decoder, tokens, positions
        self.rows, self.active = decoder.rows, positions >= 0
        self.values: dict[str, jnp.ndarray] = {}
        self.layer = self.index = 0

    def run(self, sub: SubLayer, layer: int, index: int) -> None:
        self.layer, self.index = layer, index
        for op in sub.order():
            op.meaning(self)

    def __getitem__(self, value: Value):
        if value.name not in self.values and value.carried:
            self.values[value.name] = jnp.zeros((value.planes, self.rows, value.width), jnp.float32)
        return self.values[value.name]

    def put(self, value: Value, x) -> None:
        self.values[value.name] = self.r(x) if value.dtype == "bf16" else x

    def r(self, x):
        return x if self.decoder.exact or self.decoder.activations == "f32" else round_bf16(x)

    def w(self, weight: Weight):
        return jnp.asarray(self.decoder.params.weight(weight, self.layer), jnp.float32)

    def expert(self, weight: Weight, e: int):
        return jnp.asarray(self.decoder.params.expert(weight, self.layer, e), jnp.float32)

    def fact(self, name: str) -> int:
        return self.decoder.graph.facts[name][self.layer]

    def chosen(self, route) -> list[int]:
        return np.flatnonzero(np.asarray(route).any(0)).tolist()

    def note(self, name: str, chosen, gap) -> None:
        self.decoder.notes.append((name, self.layer, np.asarray(chosen), np.asarray(gap)))

    def state(self, name: str):
        """This layer's state [rows, ...]; zero for a row at position 0."""
        s = jnp.asarray(self.decoder.states[name][self.index])
        fresh = (self.positions <= 0).reshape((-1,) + (1,) * (s.ndim - 1))
        return jnp.where(fresh, 0.0, s)

    def set_state(self, name: str, s) -> None:
        live = np.asarray(self.active)
        self.decoder.states[name][self.index][live] = np.asarray(s)[live]

    def append(self, name: str, new):
        """Writes new [rows, ...] at each active row's position and returns the cache [rows, context, ...]."""
        cache = self.decoder.states[name][self.index]
        new = new if self.decoder.exact else round_bf16(new)
        for row, p in enumerate(np.asarray(self.positions)):
            if p >= 0:
                cache[row, p] = np.asarray(new[row])
        return jnp.asarray(cache)

    def attend(self, scores, weigh: Callable, oldest=0, sink=None):
        """softmax over tokens oldest..position: weigh(exp(s - max)) / sum, the weights rounded before the product. scores
        [rows, ..., T]; oldest [rows]; sink [...]: one more score that has no token."""
        per_row = (-1,) + (1,) * (scores.ndim - 1)
        t = jnp.arange(scores.shape[-1])
        live = (t <= self.positions.reshape(per_row)) & (t >= jnp.asarray(oldest).reshape(per_row))
        s = jnp.where(live, scores, -jnp.inf)
        top = jnp.max(s, -1, keepdims=True)
        top = top if sink is None else jnp.maximum(top, sink)
        top = jnp.where(jnp.isfinite(top), top, 0.0)
        p = jnp.where(live, jnp.exp(s - top), 0.0)
        total = jnp.sum(p, -1, keepdims=True) + (0.0 if sink is None else jnp.exp(sink - top))
        return weigh(self.r(p)) / jnp.maximum(total, 1e-30)
