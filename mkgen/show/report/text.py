"""Numbers as the page writes them."""
from __future__ import annotations

import re


def us(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f}"


def mib(n: float) -> str:
    return f"{n / 2**20:,.2f}"


def mb(n: float) -> str:
    return f"{n / 1e6:,.1f}"


def size(n: float) -> str:
    """Bytes with a decimal unit, three digits or so."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= scale:
            return f"{n / scale:,.{1 if n >= 10 * scale else 2}f} {unit}"
    return f"{n:,.0f} B"


def count(n: float) -> str:
    return f"{n:,.0f}"


def pct(part: float, whole: float, digits: int = 1) -> str:
    return f"{100 * part / whole:.{digits}f} %" if whole else "–"


def slug(name: str) -> str:
    """Fit for a class name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower())


FILTERS = {"us": us, "ms": ms, "mib": mib, "mb": mb, "size": size, "count": count, "slug": slug}
