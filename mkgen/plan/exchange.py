"""What is exchanged: the words in which the builder and the arrangement of a sub-layer speak of it."""
from __future__ import annotations

from dataclasses import dataclass, replace

from mkgen.graph.ir import Value

BESIDE = "beside"                        # a sum that is needed whole, in the rounds of one that is scattered
ROWS = "rows"                            # a spread: each rank has its rows, see by_rows.py; and the way of a sum that becomes so


def is_rows(way: str) -> bool:
    """Is it by rows: as fast as can be, or by the groups that are named behind it?"""
    return way.partition(" ")[0] == ROWS


@dataclass(frozen=True)
class Exchange:
    """One exchange of one or several values of a sub-layer."""
    kind: str                            # gather | scatter
    values: tuple[str, ...]
    over: int = 0                        # scatter: to so many neighbours; 0: to any number, since it is gathered later
    rows: bool = False                   # a rank's share is its rows, not its columns

    def joined(self, others: tuple[Exchange, ...]) -> Exchange:
        return replace(self, values=tuple(v for e in (self, *others) for v in e.values), over=max(e.over for e in (self, *others)))

    def meets(self, other: Exchange) -> bool:
        """May both be one exchange?"""
        return self.kind == other.kind and not (self.rows or other.rows) and (self.over == other.over or 0 in (self.over, other.over))


@dataclass(frozen=True)
class Run:
    """Values that go by the same rounds: what one start and one finish stand for."""
    kind: str                            # gather | scatter | reduce
    path: tuple[str, ...]                # the group of each round
    values: tuple[Value, ...]
    wire: str | None = None              # f32 | bf16; None: build.wire
    over: int = 0                        # scatter: neighbours that sums are shared out to; 0: all ranks
    beside: int = 0                      # scatter: of the values, the last ones go whole
    rows: bool = False                   # a rank's share is its rows

    def by_kind(self) -> list[tuple[str, Value]]:
        """Each value, and what becomes of it."""
        cut = len(self.values) - self.beside
        return [("reduce" if i >= cut else self.kind, v) for i, v in enumerate(self.values)]


def rounds(name: str, spread: str, need: str, over: int = 0) -> list[Exchange]:
    """What brings a value from one spread to another. over: neighbours that it is to be split over."""
    if spread in (need, "whole"):
        return []
    if ROWS in (spread, need):
        return [Exchange("gather" if spread == ROWS else "scatter", (name,), rows=True)]
    kinds = ("gather",) if spread == "split" else ("scatter",) if need == "split" else ("scatter", "gather")
    return [Exchange(kind, (name,), over) for kind in kinds]
