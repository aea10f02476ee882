"""From checkpoint tensors to logical arrays: one rule a weight family, used by the reference and by the packer alike.

Hub linears are [out, in]; logical matrices are [K, N] = [in, out]. All rules are exact: they move or multiply nothing but
what is named here, in float32.
"""
from __future__ import annotations

import numpy as np

from mkgen.graph.frequencies import lanes
from mkgen.spec.parts import Rope, RopeScaling


def linear(w: np.ndarray) -> np.ndarray:
    """[N, K] -> [K, N]."""
    return w.T


def rows(w: np.ndarray) -> np.ndarray:
    """Kept as stored: an embedding table [vocab, hidden]."""
    return w


def vector(w: np.ndarray) -> np.ndarray:
    return w.reshape(-1)


def product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """A norm weight folded into the one-row projection that follows it: proj(norm(x)) = rsqrt(..) * sum(x * a * b)."""
    return a.astype(np.float32).reshape(-1) * b.astype(np.float32).reshape(-1)


def taps(*convs: np.ndarray) -> np.ndarray:
    """Depthwise filters [channels, 1, taps] side by side -> [taps, channels]."""
    return np.concatenate([c.reshape(c.shape[0], -1).T for c in convs], axis=1).astype(np.float32)


def exp(a_log: np.ndarray) -> np.ndarray:
    return np.exp(a_log.astype(np.float32)).reshape(-1)


def lightning_decay(layer: int, heads: int, layers: int) -> np.ndarray:
    """[heads] the decay of a linear attention that learns none: exp(-s (1 - layer / (layers - 1 + 1e-5) + 1e-5)),
    s = 2^(-8 (head + 1) / heads)."""
    slope = 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
    return np.exp(-slope * (1 - layer / (layers - 1 + 1e-5) + 1e-5)).astype(np.float32)


def first_half_heads(w: np.ndarray, first: int, second: int) -> np.ndarray:
    """[heads (first + second), K] -> [K, heads first]: each head's leading columns."""
    heads = w.shape[0] // (first + second)
    return w.reshape(heads, first + second, -1)[:, :first].reshape(heads * first, -1).T


def second_half_heads(w: np.ndarray, first: int, second: int) -> np.ndarray:
    """[heads (first + second), K] -> [K, heads second]: each head's trailing columns."""
    heads = w.shape[0] // (first + second)
    return w.reshape(heads, first + second, -1)[:, first:].reshape(heads * second, -1).T


def rope(layout: str, head_dim: str, width: str, base: str, kind: str = "", *numbers: str) -> np.ndarray:
    """Rotary frequencies of a head's features, see graph.frequencies; `numbers` are RopeScaling's fields up to `truncate`."""
    scaling = None
    if kind:
        factor, context, low, high, fast, slow, truncate = numbers
        scaling = RopeScaling(kind, float(factor), int(context), float(low), float(high), float(fast), float(slow), truncate == "1")
    return lanes(Rope(float(base), layout=layout, scaling=scaling), int(width), int(head_dim))


RULES = {f.__name__: f for f in (linear, rows, vector, product, taps, exp)}


def assemble(rule: str, *tensors: np.ndarray, layer: int | None = None) -> np.ndarray:
    """`rule` is a name in RULES; first_half_heads(a,b) / second_half_heads(a,b) with its two widths; or, of no tensor, rope(..)
    with all that it says, lightning_decay(heads,layers) of a `layer`."""
    if "(" in rule:
        name, args = rule[:-1].split("(")
        if name == "rope":
            return rope(*args.split(","))
        first, second = (int(a) for a in args.split(","))
        if name == "lightning_decay":
            return lightning_decay(layer, first, second)
        return {"first_half_heads": first_half_heads, "second_half_heads": second_half_heads}[name](tensors[0], first, second)
    return RULES[rule](*tensors)
