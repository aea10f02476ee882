"""Who holds what: ranks of the mesh, and the local share of a family's units."""
from __future__ import annotations

from dataclasses import dataclass


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
