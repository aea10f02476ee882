"""What a jaxpr is made of: its nested jaxprs, what is read, places in refs, and the lines that a slice can do without."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
from jax._src import core

NESTED = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class Place:
    """A ref, or a part of one, as source text: [(first, size or None for a single index)] a dimension of the whole."""

    buffer: str
    dims: tuple[tuple[str, str | None], ...]

    @property
    def text(self) -> str:
        spans = [
            f"({a}, {a} + {n or 1}),"
            if not (a.isdigit() and (n or "1").isdigit())
            else f"({a}, {int(a) + int(n or 1)}),"
            for a, n in self.dims
        ]
        return f"'{self.buffer}', ({' '.join(spans)})"


def scalar(aval) -> bool:
    return (
        getattr(aval, "shape", None) == ()
        and getattr(aval, "dtype", None) is not None
        and np.dtype(aval.dtype).kind in "biu"
    )


def nested(eqn) -> list[tuple]:
    """(inner jaxpr, [(its argument, what is given for it)]) of an equation, but for the test of a while loop."""
    p, name = eqn.params, eqn.primitive.name
    if name == "cond":
        return [(b.jaxpr, list(zip(b.jaxpr.invars, eqn.invars[1:]))) for b in p["branches"]]
    if name == "while":
        body = p["body_jaxpr"].jaxpr
        return [(body, list(zip(body.invars, eqn.invars[p["cond_nconsts"] :])))]
    out = []
    for key in NESTED:
        inner = p.get(key)
        if inner is not None and (hasattr(inner, "jaxpr") or hasattr(inner, "eqns")):
            inner = getattr(inner, "jaxpr", inner)
            out.append((inner, list(zip(inner.invars, eqn.invars))))
    return out


def used(jaxpr):
    """Variables that something reads."""
    for eqn in jaxpr.eqns:
        yield from (v for v in eqn.invars if not isinstance(v, core.Literal))
        for inner, _ in nested(eqn):
            yield from used(inner)
        if eqn.primitive.name == "while":
            yield from used(eqn.params["cond_jaxpr"].jaxpr)
    yield from (v for v in jaxpr.outvars if not isinstance(v, core.Literal))


NAME = re.compile(r"\bv\d+\b")
PURE = re.compile(r"\s*(v\d+) = (?!.*\b(?:fetch|need)\()")


def needed(lines: list[str]) -> list[str]:
    """Without assignments that nothing reads; what reads stands behind, or in an assignment of several names."""
    count: dict[str, int] = {}
    for line in lines:
        for name in NAME.findall(line):
            count[name] = count.get(name, 0) + 1
    out = []
    for line in reversed(lines):
        pure = PURE.match(line)
        if pure and count[pure[1]] == 1:
            for name in NAME.findall(line):
                count[name] -= 1
        else:
            out.append(line)
    return out[::-1]
