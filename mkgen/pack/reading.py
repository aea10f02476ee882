"""Tensors of a checkpoint on their way to the images: each read once, checked for NaN, rounded, counted."""
from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import numpy as np
from ml_dtypes import bfloat16

from mkgen.errors import MkgenError
from mkgen.graph.ir import Weight
from mkgen.graph.weights import assemble
from mkgen.pack import formats
from mkgen.pack.expect import Source
from mkgen.pack.hub import NUMPY
from mkgen.pack.image import Stored, store_values
from mkgen.pack.wanted import tensor_names
from mkgen.plan.plan import Plan

RUN = 1 << 24                                # elements that are looked at together: no second copy of a large tensor
EXPONENT = {np.dtype(bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}
MOVES = ("linear", "rows", "vector", "first_half_heads", "second_half_heads")      # rules that only move elements


class Reader:
    """Logical weights from matched sources, in the dtype in which they are stored.

    rounded: tensor -> how many values had to be rounded to bf16. converted: the same to mxfp4 (`convert` only).
    read_bytes: of the checkpoint, so far; total_bytes: of all sources.
    """

    def __init__(self, plan: Plan, sources: dict[str, Source], convert: bool):
        self.plan, self.sources, self.convert = plan, sources, convert
        self.format = plan.experts[0].format if plan.experts else "bf16"
        self.rounded: Counter[str] = Counter()
        self.converted: Counter[str] = Counter()
        self.read_bytes, self.total_bytes = 0, sum(map(_bytes, sources.values()))
        self._held: dict[str, np.ndarray] = {}

    def weights(self, wanted: list[tuple[int | None, Weight]]) -> Iterator[tuple[int | None, Weight, np.ndarray]]:
        """(layer, weight, logical array) of each (layer, weight); a tensor stays no longer than somebody needs it."""
        users = [(layer, w, tensor_names(self.plan, w, layer)) for layer, w in wanted]
        left = Counter(name for *_, names in users for name in names)
        exact = {name for _, w, names in users if w.dtype == "f32" or not _moves(w) for name in names}
        for layer, w, names in users:
            value = assemble(w.assemble, *(self._tensor(n, n not in exact) for n in names), layer=layer)
            if not _moves(w):
                value = self._stored(w, " x ".join(names), value)
            yield layer, w, value
            del value
            left.subtract(names)
            for name in names:
                if not left[name]:
                    self._held.pop(name, None)

    def expert(self, name: str) -> Stored:
        """One expert's matrix as the image keeps it."""
        source = self.sources[name]
        self.read_bytes += _bytes(source)
        if source.packed and self.format == "mxfp4":
            words, scale = source.expected.packed_names
            scales = source.checkpoint.read(scale).view(np.uint8)
            formats.check_exponents(scales, scale)
            return Stored("mxfp4", source.checkpoint.read(words), scales)
        w = source.read()                                                         # [N, K]
        check_finite(name, w)
        return self._quantised(name, w) if self.format == "mxfp4" else store_values("bf16", self._rounded(name, w).T)

    def expert_bias(self, name: str) -> np.ndarray:
        """A bias of one expert, float32: the image keeps it so."""
        source = self.sources[name]
        self.read_bytes += _bytes(source)
        bias = source.read()
        check_finite(name, bias)
        return bias.astype(np.float32)

    def check_first_expert(self) -> None:
        """Refuses a checkpoint whose experts cannot be stored as they are at once, rather than in the middle."""
        plain = (n for n, s in self.sources.items() if "mxfp4" in s.expected.dtypes and not s.packed)
        name = next(plain, None)
        if name and self.format == "mxfp4" and not self.convert:
            self._quantised(name, self.sources[name].read())

    def _quantised(self, name: str, w: np.ndarray) -> Stored:
        check_finite(name, w)
        stored = store_values("mxfp4", w.T)
        back = formats.dequantise_mxfp4(*formats.from_hub(stored.data, stored.scales))[:w.shape[1]]
        changed = int(np.count_nonzero(back.T != w.astype(np.float32, copy=False)))
        if changed and not self.convert:
            raise MkgenError(f"{name}: {changed} of {w.size} values are not exact in mxfp4\n"
                             "  why: build.formats.experts is mxfp4, the checkpoint's experts are not\n"
                             "  fix: --set build.formats.experts=bf16 to keep them, or --convert to round them")
        if changed:
            self.converted[name] += changed
        return stored

    def _tensor(self, name: str, as_bf16: bool) -> np.ndarray:
        if name not in self._held:
            source = self.sources[name]
            value = source.read()
            self.read_bytes += _bytes(source)
            check_finite(name, value)
            self._held[name] = self._rounded(name, value) if as_bf16 else value
        return self._held[name]

    def _stored(self, weight: Weight, name: str, value: np.ndarray) -> np.ndarray:
        """A computed weight in its own dtype."""
        check_finite(name, value)
        return self._rounded(name, value) if weight.dtype == "bf16" else value

    def _rounded(self, name: str, a: np.ndarray) -> np.ndarray:
        """`a` as bf16, the values that this changes counted; MkgenError if one is too large."""
        if a.dtype == bfloat16:
            return a
        out = np.empty(a.shape, bfloat16)
        old, new = np.ascontiguousarray(a).reshape(-1), out.reshape(-1)
        for at in range(0, old.size, RUN):
            exact = old[at:at + RUN].astype(np.float32, copy=False)
            new[at:at + RUN] = exact.astype(bfloat16)
            changed = int(np.count_nonzero(new[at:at + RUN].astype(np.float32) != exact))
            if changed:
                self.rounded[name] += changed
        check_finite(name, out, "too large for bf16")
        return out


def check_finite(name: str, a: np.ndarray, what: str = "NaN or infinite") -> None:
    """MkgenError if a value of `a` is not finite."""
    flat, bad = np.ascontiguousarray(a).reshape(-1), 0
    mask = EXPONENT.get(flat.dtype)
    for at in range(0, flat.size, RUN):
        run = flat[at:at + RUN]
        bad += int(np.count_nonzero((run.view(np.uint16) & mask) == mask if mask else ~np.isfinite(run)))
    if bad:
        raise MkgenError(f"{name}: {bad} of {flat.size} values are {what}\n  why: one such weight spoils every token\n"
                         "  fix: a sound checkpoint")


def grouped(counts: Counter[str]) -> dict[str, dict[str, int]]:
    """Counts a tensor -> {pattern: {tensors, values}}, the numbers in a name replaced by #."""
    out: dict[str, dict[str, int]] = {}
    for name, n in counts.items():
        group = out.setdefault(re.sub(r"\d+", "#", name), {"tensors": 0, "values": 0})
        group["tensors"] += 1
        group["values"] += n
    return out


def _moves(w: Weight) -> bool:
    return w.assemble.partition("(")[0] in MOVES


def _bytes(source: Source) -> int:
    """Of the source's tensors in the checkpoint."""
    e, c = source.expected, source.checkpoint
    names = e.packed_names if source.packed else (e.name,)
    return sum(math.prod(c.shape(n)) * np.dtype(NUMPY[c.dtype(n)]).itemsize for n in names)
