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


def local_units(units: int, ranks: int) -> int:
    """Units that each rank holds; the last ranks' share may be padding. Fewer units than ranks: one each, repeated."""
    return -(-units // ranks)


def unit_range(units: int, ranks: int, rank: int) -> tuple[int, int]:
    """[first, last) of the true units on `rank`; both are clipped to `units`. Fewer units than ranks: the repeated one."""
    if units < ranks:
        at = rank * units // ranks
        return at, at + 1
    share = local_units(units, ranks)
    return min(rank * share, units), min((rank + 1) * share, units)
