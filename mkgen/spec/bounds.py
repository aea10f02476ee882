"""Bounds that hold for a number wherever it stands in a spec, by its type, its default and its name."""
from __future__ import annotations

from typing import Any

_POSITIVE = ("eps", "qk_eps", "rank_eps", "scale", "beta", "linear_beta", "base", "multiplier", "temperature", "embed_scale", "logit_scale")
_CAPS = ("softcap", "logit_softcap", "limit", "clip")


def out_of_bounds(name: str, value: Any, default: Any = None) -> tuple[str, str] | None:
    """(why, fix) if a value is out of bounds, else None.

    A whole number may be 0 only if that is its default, where it means "none".
    """
    if type(value) is int:
        least = 0 if type(default) is int and default == 0 else 1
        if value < least:
            return f"it is a count, and must be at least {least}", f"write a whole number of {least} or more"
    if type(value) is float and name in _POSITIVE and value <= 0:
        return "it divides, scales or keeps a root from zero", "write a number greater than 0"
    if type(value) is float and name in _CAPS and value < 0:
        return "it bounds a magnitude", "write a number greater than 0, or 0 for none"
    return None
