"""The right side of `model.checkpoint`: a tensor's name pattern, and the cuts that take a role's matrix out of it.

    model.layers.{layer}.self_attn.qkv_proj.weight | rows 0:4096

A name has {layer}, and {expert} where every expert has a tensor of its own; a role of experts whose name has no {expert}
means a tensor with the experts on its first axis. Cuts apply in order, to the matrix [out, in] (or vector) of one layer and
expert:

    T               stored as [in, out]
    rows a:b        rows a to b - 1
    each n a:b      of every run of n rows, rows a to b - 1: `each 2 0:1` the even ones, `each 512 0:256` the first half of
                    every head of 512
    reshape         to the role's shape, where only that differs; the last cut

`uncut` goes the way back: from a role's shape to that of the tensor which it is cut out of.
"""
from __future__ import annotations

import re
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_CUT = re.compile(r"T|reshape|rows (\d+):(\d+)|each (\d+) (\d+):(\d+)")


class BadPattern(ValueError):
    """What is wrong with a pattern, in words."""


@dataclass(frozen=True)
class Cut:
    """kind: T | rows | each | reshape. every: length of a run (0: all rows are one run)."""
    kind: str
    first: int = 0
    last: int = 0
    every: int = 0

    def __call__(self, w: np.ndarray) -> np.ndarray:
        if self.kind == "T":
            return w.swapaxes(-1, -2)
        if self.kind == "reshape":
            return w
        if self.every == 0:
            return w[self.first:self.last]
        runs = w.reshape(-1, self.every, *w.shape[1:])
        return runs[:, self.first:self.last].reshape(-1, *w.shape[1:])

    def __str__(self) -> str:
        if self.kind in ("T", "reshape"):
            return self.kind
        return f"each {self.every} {self.first}:{self.last}" if self.every else f"rows {self.first}:{self.last}"


@dataclass(frozen=True)
class Pattern:
    name: str
    cuts: tuple[Cut, ...] = ()

    @property
    def fields(self) -> set[str]:
        """The placeholders of the name; '?' for one that has a format or conversion."""
        try:
            parts = [p for p in string.Formatter().parse(self.name) if p[1] is not None]
        except ValueError:
            return {"?"}
        return {name if not form and not conversion else "?" for _, name, form, conversion in parts}

    def format(self, layer: int | None = None, expert: int | None = None) -> str:
        return self.name.format(layer=layer, expert=expert)

    def take(self, tensor: np.ndarray, expert: int | None = None) -> np.ndarray:
        """The role's part of a stored tensor; of one expert, where the tensor holds all of them."""
        w = tensor[expert] if expert is not None and "expert" not in self.fields else tensor
        for cut in self.cuts:
            w = cut(w)
        return w


def parse(text: str) -> Pattern:
    """Raises BadPattern."""
    name, *cuts = (part.strip() for part in text.split("|"))
    found = tuple(_cut(c) for c in cuts)
    if any(c.kind == "reshape" for c in found[:-1]):
        raise BadPattern("`reshape` is the last cut: it gives the role's shape")
    return Pattern(name, found)


@dataclass(frozen=True)
class Axis:
    """Of a stored tensor: its size, or the least that it may have (`exact` is False: a cut takes a part of it)."""
    size: int
    exact: bool = True

    def fits(self, size: int) -> bool:
        return size == self.size if self.exact else size >= self.size

    def __str__(self) -> str:
        return str(self.size) if self.exact else f">={self.size}"


def uncut(cuts: tuple[Cut, ...], shape: tuple[int, ...]) -> tuple[Axis, ...] | None:
    """The axes of a tensor of which `cuts` take `shape`; None if a `reshape` leaves them open. Raises BadPattern."""
    axes = [Axis(n) for n in shape]
    for cut in reversed(cuts):
        if cut.kind == "reshape":
            return None
        if cut.kind == "T":
            if len(axes) < 2:
                raise BadPattern("`T` turns a matrix, and this is a vector")
            axes[-2:] = axes[:-3:-1]
            continue
        size, width = axes[0].size, cut.last - cut.first
        if cut.every:
            if axes[0].exact and size % width:
                raise BadPattern(f"`{cut}` takes a multiple of {width} rows, not {size}")
            axes[0] = Axis(-(-size // width) * cut.every, axes[0].exact)
        else:
            if not axes[0].fits(width):
                raise BadPattern(f"`{cut}` takes {width} rows, not {axes[0]}")
            axes[0] = Axis(cut.last, False)
    return tuple(axes)


def picks(cuts: tuple[Cut, ...], shape: tuple[int, ...]) -> list[Sequence[int]]:
    """Of each axis of a stored tensor, the indices that `cuts` take, in their order. Raises BadPattern where runs do not fit."""
    axes: list[tuple[int, Sequence[int]]] = [(i, range(n)) for i, n in enumerate(shape)]
    for cut in cuts:
        if cut.kind == "T":
            axes[-2:] = axes[:-3:-1]
            continue
        if cut.kind == "reshape":
            continue
        axis, taken = axes[0]
        if len(taken) % (cut.every or 1) or cut.last > (cut.every or len(taken)):
            raise BadPattern(f"`{cut}` does not fit {len(taken)} rows")
        if cut.every:
            taken = [i for at in range(0, len(taken), cut.every) for i in taken[at + cut.first:at + cut.last]]
        else:
            taken = taken[cut.first:cut.last]
        axes[0] = axis, taken
    return [taken for _, taken in sorted(axes, key=lambda a: a[0])]


def _cut(text: str) -> Cut:
    m = _CUT.fullmatch(text)
    if not m:
        raise BadPattern(f"{text!r} is no cut; one is `T`, `rows a:b`, `each n a:b` or `reshape`")
    if text in ("T", "reshape"):
        return Cut(text)
    first, last, every, a, b = (int(g) if g else 0 for g in m.groups())
    cut = Cut("rows", first, last) if not every else Cut("each", a, b, every)
    if not cut.first < cut.last or every and cut.last > every:
        raise BadPattern(f"{text!r} takes no rows")
    return cut
