"""Rows shared out over the ranks: of a sum each rank gets its rows, whole, instead of its columns of all rows.

An op that takes each row alone (`Op.by_rows`) then runs for a rank's own rows only, and what it makes is gathered by rows. Rank r
has rows ranks * i + r. A row travels, and lies, as `ranks` equal runs of its columns, run k of that one in row ranks * i + k: so a
message and a buffer are as large as for columns, and to cut rows and to put them together are one and the same swap. That asks for
a number of ranks that is a power of two and divides the rows of every variant. A sum goes by one round or several, of groups of which
the innermost comes first, so that the cores of a chip add up what then goes to other chips; what is gathered goes in one round.
"""
from __future__ import annotations

from mkgen.errors import MkgenError
from mkgen.graph.ir import Op, SubLayer, Value
from mkgen.plan.exchange import ROWS, Run, is_rows
from mkgen.spec.model import Build


def shareable(sub: SubLayer, build: Build) -> list[str]:
    """Values of a sub-layer that can be shared out by rows, should they be sums over the ranks."""
    divided = build.ranks.bit_count() == 1 < build.ranks and all(rows % build.ranks == 0 for rows in build.rows)
    return [v.name for op in sub.ops if divided and op.by_rows(build.ranks) for v in op.inputs()]


class ByRows:
    """The builder's view of rows that are shared out. `by_row`: are sums shared out so where that may be?"""

    def row_sums(self) -> list[str]:
        """Values that can be shared out by rows, and that no other way is asked for of."""
        return [name for name in shareable(self.sub, self.build) if self.way(name) == "auto" or is_rows(self.way(name))]

    def row_needs(self, op: Op, spread: dict[str, str]) -> dict[str, str]:
        """Which inputs of an op need this rank's rows only, and which all; nothing where none is shared out by rows."""
        rows = {n for n, s in spread.items() if s == ROWS or s == "partial" and self.by_row and n in self.row_sums()}
        rest = dict.fromkeys(spread, "whole")
        return rows and (rest | dict.fromkeys(rows, ROWS) if op.by_rows(self.ranks) else rest)

    def way(self, name: str) -> str:
        """What `build.reduce` says of a sum."""
        return self.build.reduce.get(name, self.build.reduce.get("rest", "auto"))

    def asked(self, name: str) -> str:
        """The way that is asked for of a sum which is not shared out by rows: where that is asked for by name, it is refused."""
        if not is_rows(self.way(name)):
            return self.way(name)
        if name in self.build.reduce:
            raise MkgenError(f"build.reduce: {name} can not be shared out by rows\n  why: the ranks, {self.ranks}, have to be a power of two and divide the rows of "
                             f"every variant, {', '.join(map(str, self.build.rows))}; and what comes behind the sum has to take each row alone\n  fix: auto, or other build.rows")
        return "auto"

    def row_run(self, kind: str, v: Value) -> Run:
        """How a sum is shared out by rows, or what is made of one is gathered."""
        paths = self.mesh.paths
        if kind == "gather":
            return Run(kind, paths[0], (v,), self.gather_wire([v]), rows=True)
        named = tuple(self.way(v.name).split()[1:])
        if named and named not in paths:
            raise MkgenError(f"build.reduce: {v.name}: {' '.join(named)!r} does not lead to all {self.ranks} ranks\n"
                             f"  fix: one of {', '.join(' '.join((ROWS, *p)) for p in paths)}")
        path = named or min(paths, key=lambda path: self.seconds(kind, path, v.width // self.ranks))
        self.memory.ways[v.name] = " ".join((ROWS, *path))
        return Run(kind, path, (v,), rows=True)
