"""Who holds what: ranks of the mesh, and the local share of a family's units."""
from __future__ import annotations

from dataclasses import dataclass
from math import prod


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


@dataclass(frozen=True)
class Mesh:
    """Factors outermost first; rank is the row-major index. `stages`: factors of size > 1, innermost first."""
    factors: tuple[tuple[str, int], ...]

    @property
    def ranks(self) -> int:
        n = 1
        for _, size in self.factors:
            n *= size
        return n

    @property
    def stages(self) -> tuple[tuple[str, int, int], ...]:
        """(name, size, stride of the factor in the rank), innermost first, sizes above 1 only."""
        out, stride = [], 1
        for name, size in reversed(self.factors):
            if size > 1:
                out.append((name, size, stride))
            stride *= size
        return tuple(out)

    @property
    def groups(self) -> dict[str, tuple[int, int, tuple[str, ...]]]:
        """Ranks that can exchange in one round, those that differ in neighbouring factors: name -> ranks, stride, factors."""
        out = {}
        for i in range(len(self.stages)):
            for j in range(i + 1, len(self.stages) + 1):
                names = tuple(name for name, _, _ in reversed(self.stages[i:j]))
                name = "all" if j - i == len(self.stages) else "_".join(names)
                out[name] = (prod(size for _, size, _ in self.stages[i:j]), self.stages[i][2], names)
        return out

    def reach(self, path: tuple[str, ...]) -> int:
        """Ranks that exchanges along a path of groups bring together."""
        return prod(self.groups[name][0] for name in path)

    def neighbours(self, name: str) -> int:
        """Ranks of a group of neighbours, which has numbers that follow each other; 0: there is no such group."""
        size, stride, _ = self.groups.get(name, (0, 1, ()))
        return size if stride == 1 else 0

    @property
    def paths(self) -> list[tuple[str, ...]]:
        """Groups, innermost first, that together reach all ranks: in one round, or in several."""
        return self.paths_between(1, self.ranks)

    def paths_between(self, first: int, last: int) -> list[tuple[str, ...]]:
        """Groups, innermost first, by which groups of `first` neighbours come to be groups of `last`."""
        names = {factors: name for name, (_, _, factors) in self.groups.items()}

        def cut(stages: tuple) -> list[tuple[str, ...]]:
            whole = [(names[tuple(name for name, _, _ in reversed(stages))],)] if stages else [()]
            return whole + [(*first, *rest) for i in range(1, len(stages)) for first in [(names[tuple(n for n, _, _ in reversed(stages[:i]))],)]
                            for rest in cut(stages[i:])]

        return cut(tuple(s for s in self.stages if first <= s[2] < last))


def local_units(units: int, ranks: int, groups: int = 0) -> int:
    """Units that a rank has room for; what a rank has no true unit for is padding.

    groups: units in `groups` equal runs that no rank mixes (query heads by their KV head). With as many groups as ranks or
    more, a rank takes whole groups; with fewer, a group is spread over ranks // groups neighbours. 0: units stand alone."""
    if groups >= ranks or not groups:
        return -(-(groups or units) // ranks) * (units // (groups or units))
    return -(-(units // groups) // sharers(ranks, groups))


def sharers(ranks: int, groups: int) -> int:
    """Ranks that share one group; those left over hold none."""
    return max(1, ranks // groups) if groups else 1


def unit_range(units: int, ranks: int, rank: int, groups: int = 0, once: bool = False) -> tuple[int, int]:
    """[first, last) of the true units on `rank`; empty where it holds padding alone. A group of one unit is repeated on all
    ranks that share it, unless every unit must be there `once` (rows of a matrix whose products are added up)."""
    share = local_units(units, ranks, groups)
    if groups >= ranks or not groups:
        return min(rank * share, units), min((rank + 1) * share, units)
    (group, part), each = divmod(rank, sharers(ranks, groups)), units // groups
    if group >= groups:
        return units, units
    if each == 1 and not once:
        part = 0
    return group * each + min(part * share, each), group * each + min((part + 1) * share, each)


def apart(width: int, units: int, groups: int, ranks: int, size: int) -> bool:
    """Does every run of `size` of `width` columns, which lie in `units` units, lie on one rank (or on copies of it)?"""
    local = width // units * local_units(units, ranks, groups)
    return ranks == 1 or local % size == 0 and (sharers(ranks, groups) == 1 or width // groups % size == 0)
