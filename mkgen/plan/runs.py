"""Repetition in a list, found and written short: `(kda*3 mla)*23 mla`, or `7 * ([1] + 11 * [0]) + [1]` as Python."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Times:
    """`body`, `count` times over; its entries are plain items and further `Times`."""
    count: int
    body: tuple[Any, ...]


def fold(items: Sequence) -> tuple[Any, ...]:
    """Items and `Times` that expand to `items`. Greedy: at each place, the repetition that saves the most."""
    items, out, i = tuple(items), [], 0
    while i < len(items):
        found = [repeat_at(items, i, period) for period in range(1, (len(items) - i) // 2 + 1)]
        saved, period, count = max(found, key=lambda f: f[0], default=(0, 1, 1))    # the shortest of equal ones
        if saved < 2:
            out.append(items[i])
            i += 1
        else:
            out.append(Times(count, fold(items[i:i + period])))
            i += period * count
    return tuple(out)


def repeat_at(items: tuple, i: int, period: int) -> tuple[int, int, int]:
    """(items saved, period, count) of the repetition of items[i:i + period] that starts at i."""
    count = 1
    while items[i + count * period:i + (count + 1) * period] == items[i:i + period]:
        count += 1
    return period * (count - 1), period, count


def as_schedule(folded: tuple) -> str:
    """The notation of a spec's columns; '-' for None."""
    def word(x: Any) -> str:
        if not isinstance(x, Times):
            return "-" if x is None else str(x)
        inner = as_schedule(x.body)
        return f"{inner}*{x.count}" if len(x.body) == 1 and not isinstance(x.body[0], Times) else f"({inner})*{x.count}"
    return " ".join(word(x) for x in folded)


def as_python(folded: tuple) -> str:
    """A Python expression for the list, with double quotes; `[]` when it is empty."""
    terms, loose = [], []

    def flush() -> None:
        if loose:
            terms.append(f"[{', '.join(loose)}]")
            loose.clear()

    for x in folded:
        if isinstance(x, Times):
            flush()
            inner = as_python(x.body)
            single = inner.startswith("[") and inner.count("[") == 1
            terms.append(f"{x.count} * {inner}" if single else f"{x.count} * ({inner})")
        else:
            loose.append(f'"{x}"' if isinstance(x, str) else repr(x))
    flush()
    return " + ".join(terms) or "[]"


def as_numbers(items: Sequence[int]) -> str:
    """A Python expression for a list of small numbers; many runs are written as np.repeat(values, lengths)."""
    folded = fold(items)
    if len(folded) <= 4:
        return as_python(folded)
    values, lengths = [], []
    for x in items:
        if values[-1:] == [x]:
            lengths[-1] += 1
        else:
            values.append(x)
            lengths.append(1)
    return f"np.repeat({values}, {lengths})" if len(values) < len(items) // 2 else as_python(folded)
