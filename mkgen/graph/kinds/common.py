"""What the kinds have in common: weights that are shared out by columns or by rows, and the projection back."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.ops.linear import Linear

Made = tuple[list[Op], Value]


def columns(name: str, k: int, n: int, units: int | None = None, assemble: str = "linear", role: str | None = None,
            groups: int = 0) -> Weight:
    """A matrix [k, n] whose columns are shared out in `units` pieces, in `groups` runs."""
    return Weight(name, (k, n), (role or name,), assemble, split=1, units=units or n, groups=groups)


def rows(name: str, x: Value, n: int) -> Weight:
    """A matrix [x.width, n] whose rows are shared out as the columns of x are."""
    return Weight(name, (x.width, n), (name,), "linear", split=0, units=x.units, groups=x.groups)


def out(name: str, x: Value, hidden: int, dtype: str = "bf16") -> Made:
    y = Value(f"{name}.out", hidden, dtype)
    return [Linear(f"{name}.o", x, (y,), (rows(f"{name}.o", x, hidden),), along="rows")], y
