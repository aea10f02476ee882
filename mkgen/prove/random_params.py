"""Random weights of any graph, the same in every process: what the kernel is proven on.

Products keep the size of what they multiply, gates and decays fall where they are neither open nor shut, router
logits lie far apart. Keys resemble queries of the same width: a normed head that has seen one token otherwise
hangs on the sign of a dot near zero, and rounding would decide it. Every value is exact in the format that it
is stored in, so that kernel and reference see the same numbers.
"""

from __future__ import annotations

import math
import zlib
from functools import lru_cache

import numpy as np
from ml_dtypes import bfloat16

from mkgen.graph.formats import format_of
from mkgen.graph.ir import LayerGraph, Weight
from mkgen.graph.ops.head_norm import HeadNorm
from mkgen.graph.ops.norm import Normalise
from mkgen.graph.ops.qk import QkNormRope
from mkgen.graph.weights import assemble
from mkgen.pack.coded import Coded, decode, encode
from mkgen.pack.formats import VALUES
from mkgen.spec.formats import FORMATS
from mkgen.spec.model import Spec

CODE_SIZE = float(np.sqrt(np.mean(VALUES**2)))  # of an fp4 value, all codes alike
ROUTER_SPREAD = 1.5
EMBEDDED = 1.0
OUTPUT = 0.5  # what goes back to the residual: it fades, so roundings do
OUTPUTS = ("o", "down", "shared_down", "latent_up")  # the roles that bring it there
GATE = -2.0  # of a residual gate, over its temperature
RESIDUAL_GATES = ("mixer.gate", "ffn.gate")


class RandomParams:
    """Logical weights as `reference.evaluate.Params` wants them, float32; `coded` and `expert_coded` as they are stored."""

    def __init__(self, graph: LayerGraph, seed: int, spec: Spec):
        self.graph, self.seed, self.spec = graph, seed, spec
        self._ends = {w.name for sub in (graph.begin, graph.end) for op in sub.ops for w in op.weights()}
        ops = [op for sub in graph.sublayers() for op in sub.ops]
        self._weights = [w for op in ops for w in op.weights()]
        normed = (op for op in ops if isinstance(op, (Normalise, HeadNorm, QkNormRope)))
        self._norms = {w.name: op.norm for op in normed for w in op.weights() if not w.name.endswith("_bias")}
        model = spec.model
        self._embedded = 1.0 if model.embed_norm else EMBEDDED / model.embed_scale
        self._output = OUTPUT / model.residual.multiplier
        self._coded: dict[tuple[str, int], Coded] = {}
        self._weight = lru_cache(maxsize=None)(self._make)
        self._expert = lru_cache(maxsize=None)(self._make_expert)

    def weight(self, weight: Weight, layer: int) -> np.ndarray:
        """The logical array of one layer; the ends' own families ignore the layer."""
        return self._weight(weight, 0 if weight.name in self._ends else layer)

    def expert(self, weight: Weight, layer: int, expert: int) -> np.ndarray:
        """[K, N] of one expert."""
        return self._expert(weight, layer, expert)

    def expert_coded(self, weight: Weight, layer: int, expert: int) -> Coded:
        """The same as it is stored, [N, K]; of mxfp4, every code there is."""
        _, k, n = weight.shape
        fmt, rng = format_of(self.spec.build, weight), self._rng(weight, layer, expert)
        if fmt != "mxfp4":
            return encode(fmt, rng.standard_normal((n, k)) / math.sqrt(k))
        exponent = round(math.log2(1 / (CODE_SIZE * math.sqrt(k))))
        codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
        exponents = exponent + rng.integers(-1, 2, (n, -(-k // FORMATS[fmt].group)))
        return Coded(fmt, codes, np.ldexp(np.float32(1), exponents))

    def _rng(self, weight: Weight, *key: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(weight.name.encode()), *key])

    def _make_expert(self, weight: Weight, layer: int, expert: int) -> np.ndarray:
        if weight.assemble == "vector":  # a bias: large enough to be missed
            return _bf16(0.5 * self._rng(weight, layer, expert).standard_normal(weight.shape[1]))
        if format_of(self.spec.build, weight) != "bf16":
            return decode(self.expert_coded(weight, layer, expert)).T
        _, k, n = weight.shape
        return _bf16(self._rng(weight, layer, expert).standard_normal((k, n)) / math.sqrt(k))

    def _make(self, weight: Weight, layer: int) -> np.ndarray:
        if not weight.roles:  # a constant of the spec
            return assemble(weight.assemble, layer=layer)
        w = self._draw(weight, self._rng(weight, layer))
        twin = self._queries(weight)
        if twin is not None:
            w = (w + 2 * self._draw(twin, self._rng(twin, layer))) / math.sqrt(5)
        w, fmt = w.astype(np.float32), format_of(self.spec.build, weight)
        if fmt == "bf16":
            return w if weight.dtype == "f32" else _bf16(w)
        coded = self._coded[weight.name, layer] = encode(fmt, w.T)
        return decode(coded).T

    def coded(self, weight: Weight, layer: int) -> Coded:
        """A matrix that is stored in another format than bf16, as it is stored."""
        self.weight(weight, layer)
        return self._coded[weight.name, 0 if weight.name in self._ends else layer]

    def _queries(self, weight: Weight) -> Weight | None:
        """The query weights that these key weights resemble: of the same kind and width."""
        kind, _, role = weight.name.rpartition(".")
        twin = {"k": "q", "k_conv": "q_conv"}.get(role)
        return (
            next((w for w in self._weights if w.name == f"{kind}.{twin}" and w.shape == weight.shape), None)
            if twin
            else None
        )

    def _draw(self, weight: Weight, rng: np.random.Generator) -> np.ndarray:
        role = weight.name.rpartition(".")[2]
        if weight.assemble == "exp":  # exp(A_log), A_log the logarithm of 1 .. 16
            return np.exp(rng.uniform(0, math.log(16), weight.shape))
        if role == "dt_bias":
            return rng.uniform(-3, 0.5, weight.shape)
        if role in ("q_conv_bias", "k_conv_bias", "v_conv_bias", "g_bias", "d"):
            return 0.3 * rng.standard_normal(weight.shape)
        if role == "router_bias":
            return rng.uniform(-0.3, 0.3, weight.shape)
        if role == "router_linear_bias":
            return rng.uniform(-1, 1, weight.shape) / self._logit_scale(weight)
        if role == "shared_scale":  # as a projection: gates neither open nor shut
            return rng.standard_normal(weight.shape) / math.sqrt(weight.shape[0])
        if weight.name in self._norms:
            n, behind = self._norms[weight.name], role == "post_norm"
            size = OUTPUT if behind and n.weight == "after" else 1.0
            return size * (1 + self._spread(role) * rng.standard_normal(weight.shape)) - n.offset
        if role.endswith("_bias"):
            return 0.2 * rng.standard_normal(weight.shape)
        if role == "sinks":  # about as large as the scores that they join
            return rng.standard_normal(weight.shape)
        if weight.name in RESIDUAL_GATES:  # mostly shut: a stream that each branch replaces carries roundings on, twice as large
            return self.spec.model.residual.temperature * (GATE + rng.standard_normal(weight.shape))
        if weight.assemble == "vector":  # norms
            return 1 + self._spread(role) * rng.standard_normal(weight.shape)
        w = rng.standard_normal(weight.shape)
        if weight.assemble == "taps":  # mostly the newest input
            return 0.3 * w + np.eye(len(w))[-1][:, None]
        if weight.assemble == "rows":
            return self._embedded * w
        size = self._output if role in OUTPUTS else ROUTER_SPREAD / self._logit_scale(weight) if role == "router" else 1
        return w / math.sqrt(weight.shape[0]) * size

    def _spread(self, role: str) -> float:
        """Of a norm's weight: within an ffn far from 1, so that its place in front of or behind the scaling tells."""
        return 0.5 if role in ("expert_norm", "latent_input_norm", "latent_norm") else 0.1

    def _logit_scale(self, weight: Weight) -> float:
        """Of the router that a weight belongs to: what it multiplies lies as much further apart."""
        return self.spec.model.ffns[weight.name.rpartition(".")[0]].router.logit_scale


def _bf16(w: np.ndarray) -> np.ndarray:
    return w.astype(np.float32).astype(bfloat16).astype(np.float32)
