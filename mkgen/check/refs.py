"""Stand-ins for the kernel's refs: `m.ring.at[slot, pl.ds(0, rows)]` gives the buffer and the box that a copy moves."""

from __future__ import annotations

from typing import NamedTuple

Box = tuple[tuple[int, int], ...]  # [first, last) in each dimension

ITEM = {"f32": 4, "u32": 4, "i32": 4, "bf16": 2, "dma": 0, "barrier": 0}


class BadExpression(Exception):
    """Source text of the plan that reads or addresses what does not exist."""


class Run:
    """`pl.ds(start, size)`. No tuple: an index may be a tuple of these."""

    __slots__ = ("start", "size")

    def __init__(self, start: int, size: int):
        self.start, self.size = start, size


class View(NamedTuple):
    """A box of a buffer. shape: without the dimensions that were indexed by a number."""

    buffer: str
    box: Box
    shape: tuple[int, ...]
    dtype: str
    space: str

    @property
    def bytes(self) -> int:
        n = ITEM[self.dtype]
        for s in self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        dims = [str(lo) if hi == lo + 1 else f"{lo}:{hi}" for lo, hi in self.box]
        return f"{self.buffer}[{', '.join(dims)}]"


def overlap(a: Box, b: Box) -> bool:
    for (a0, a1), (b0, b1) in zip(a, b):
        if a0 >= b1 or b0 >= a1:
            return False
    return True


def inside(a: Box, b: Box) -> bool:
    """a lies in b."""
    for (a0, a1), (b0, b1) in zip(a, b):
        if a0 < b0 or a1 > b1:
            return False
    return True


class Ref:
    """A buffer in any memory; `whole` is the view of all of it."""

    def __init__(self, name: str, dims: tuple[int, ...], dtype: str, space: str):
        self.whole = View(name, tuple((0, d) for d in dims), dims, dtype, space)
        self.dims = dims

    @property
    def at(self) -> "Ref":
        return self

    def __getitem__(self, index) -> View:
        index = index if isinstance(index, tuple) else (index,)
        whole = self.whole
        if len(index) > len(self.dims):
            raise BadExpression(f"{whole.buffer} has {len(self.dims)} dimensions, {len(index)} are indexed")
        box, shape = [], []
        for at, size in zip(index, self.dims):
            if isinstance(at, Run):
                first, last = at.start, at.start + at.size
                shape.append(at.size)
            elif isinstance(at, slice):
                first, last = at.start or 0, size if at.stop is None else at.stop
                shape.append(last - first)
            else:
                first, last = at, at + 1
            if not 0 <= first < last <= size:
                raise BadExpression(f"[{first}, {last}) lies outside a dimension of {size} of {whole.buffer}")
            box.append((first, last))
        rest = self.dims[len(index) :]
        return View(whole.buffer, (*box, *((0, d) for d in rest)), (*shape, *rest), whole.dtype, whole.space)


class Table:
    """A table in SMEM with the scenario's numbers; None where nothing has been written."""

    def __init__(self, name: str, values: list[int | None]):
        self.name, self.values = name, values

    def __getitem__(self, at: int) -> int:
        if not 0 <= at < len(self.values):
            raise BadExpression(f"{self.name}[{at}] is read, it has {len(self.values)} entries")
        value = self.values[at]
        if value is None:
            raise BadExpression(f"{self.name}[{at}] is read before it is written")
        return value

    def put(self, at: int, value: int) -> None:
        if not 0 <= at < len(self.values):
            raise BadExpression(f"{self.name}[{at}] is written, it has {len(self.values)} entries")
        self.values[at] = value


def as_view(x) -> View:
    """A ref that is copied whole, or a view."""
    if isinstance(x, Ref):
        return x.whole
    if isinstance(x, View):
        return x
    raise BadExpression(f"{x!r} is no place")
