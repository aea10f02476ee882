"""Logical weights for the reference, assembled from hub tensors by the same rules as the packer uses."""
from __future__ import annotations

from functools import lru_cache
from typing import Mapping

import numpy as np

from mkgen.graph.ir import Weight
from mkgen.graph.weights import assemble
from mkgen.pack.coded import Coded, decode
from mkgen.pack.expect import cuts_of, pick
from mkgen.pack.hub import Arrays
from mkgen.pack.vendor import find
from mkgen.spec.checkpoint import parse


class TensorParams:
    """`tensors`: hub name -> array, any float dtype, or quantised in a layout of pack.vendor; or a `pack.hub.Checkpoint`.
    `names`: role -> pattern of spec.checkpoint."""

    def __init__(self, tensors, names: Mapping[str, str]):
        self.tensors, self.names = Arrays(tensors) if isinstance(tensors, Mapping) else tensors, names
        self._weight = lru_cache(maxsize=4096)(self._assemble)

    def _assemble(self, weight: Weight, layer: int, expert: int | None) -> np.ndarray:
        parts = [self._role(role, layer, expert) for role in weight.roles]
        if weight.assemble in ("vector", "exp"):
            parts = [p.reshape(-1)[:weight.elements] for p in parts]        # per-head vectors may be padded in a checkpoint
        return np.ascontiguousarray(assemble(weight.assemble, *parts, layer=layer), np.float32)

    def _role(self, role: str, layer: int, expert: int | None) -> np.ndarray:
        pattern = parse(self.names[role])
        stacked = expert is not None and "expert" not in pattern.fields
        layout = find(self.tensors, pattern.format(layer, expert), int(stacked))
        if layout is None:
            raise KeyError(pattern.format(layer, expert))
        whole = pick(cuts_of(pattern.cuts, layout.turned), layout.read(expert if stacked else None))
        return decode(whole) if isinstance(whole, Coded) else whole.astype(np.float32)

    def weight(self, weight: Weight, layer: int) -> np.ndarray:
        return self._weight(weight, layer, None)

    def expert(self, weight: Weight, layer: int, expert: int) -> np.ndarray:
        return self._weight(weight, layer, expert)
