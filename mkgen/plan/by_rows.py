"""Rows shared out over the ranks: of a sum each rank gets its rows, whole, instead of its columns of all rows.

An op that takes each row alone (`Op.by_rows`) then runs for a rank's own rows only, and what it makes is gathered by rows. Rank r
has rows ranks * i + r. A row travels, and lies, as `ranks` equal runs of its columns, run k of that one in row ranks * i + k: so a
message and a buffer are as large as for columns, and to cut rows and to put them together are one and the same swap. That asks for
a number of ranks that is a power of two and divides the rows of every variant. All ranks take part, in one round.
"""
from __future__ import annotations

from mkgen.errors import MkgenError
from mkgen.graph.ir import Op, SubLayer, Value
from mkgen.plan.exchange import ROWS, Run
from mkgen.spec.model import Build


def shareable(sub: SubLayer, build: Build) -> list[str]:
    """Values of a sub-layer that can be shared out by rows, should they be sums over the ranks."""
    divided = build.ranks.bit_count() == 1 < build.ranks and all(rows % build.ranks == 0 for rows in build.rows)
    return [v.name for op in sub.ops if divided and op.by_rows(build.ranks) for v in op.inputs()]


class ByRows:
    """The builder's view of rows that are shared out. `by_row`: are sums shared out so where that may be?"""

    def row_sums(self) -> list[str]:
        """Values that can be shared out by rows, and that no other way is asked for of."""
        return [name for name in shareable(self.sub, self.build) if self.asked(name, (ROWS,)) in ("auto", ROWS)]

    def row_needs(self, op: Op, spread: dict[str, str]) -> dict[str, str]:
        """Which inputs of an op need this rank's rows only, and which all; nothing where none is shared out by rows."""
        rows = {n for n, s in spread.items() if s == ROWS or s == "partial" and self.by_row and n in self.row_sums()}
        rest = dict.fromkeys(spread, "whole")
        return rows and (rest | dict.fromkeys(rows, ROWS) if op.by_rows(self.ranks) else rest)

    def asked(self, name: str, known: tuple[str, ...] = ()) -> str:
        """The way of a sum that `build.reduce` asks for. By rows is none for a sum that cannot go so: asked for by name it is refused."""
        way = self.build.reduce.get(name, self.build.reduce.get("rest", "auto"))
        if way != ROWS or ROWS in known:
            return way
        if name in self.build.reduce:
            raise MkgenError(f"build.reduce: {name} can not be shared out by rows\n  why: the ranks, {self.ranks}, have to be a power of two and divide the rows of "
                             f"every variant, {', '.join(map(str, self.build.rows))}; and what comes behind the sum has to take each row alone\n  fix: auto, or other build.rows")
        return "auto"

    def row_run(self, kind: str, v: Value) -> Run:
        """All ranks at once."""
        path = self.mesh.paths[0]
        if kind == "gather":
            return Run(kind, path, (v,), self.gather_wire([v]), rows=True)
        self.memory.ways[v.name] = ROWS
        return Run(kind, path, (v,), rows=True)
