"""Full depth from a few depths: what the ends cost, plus so much a layer of each kind."""

from __future__ import annotations

from collections import Counter

import numpy as np

from mkgen.spec.model import Spec


FITTED = (
    "cpu_seconds",
    "compile_seconds",
    "launches_fixed",
    "launches_per_expert",
    "collectives",
    "cycles",
    "mean_cycles",
    "own_cycles",
    "free_cycles",
    "profile_cycles",
    "moved_bytes",
    "code_bytes",
)


def kinds(spec: Spec, layers: int) -> Counter:
    """Layers of each kind among the first so many."""
    return Counter((run.mixer, run.ffn) for run in spec.model.schedule[:layers])


def extrapolate(spec: Spec, seen: list[dict]) -> tuple[dict, dict]:
    """Full depth from some depths: what the ends cost, plus so much a layer of each kind (least squares, none below zero). A
    kind that stands in each depth alike is counted with the ends. Returns the figures and the worst relative residual of
    each."""
    counts = [kinds(spec, s["layers"]) for s in seen]
    whole = kinds(spec, spec.model.layers)
    varying = [k for k in whole if len({c[k] for c in counts}) > 1]
    if any(whole[k] != counts[0][k] for k in whole if k not in varying):
        raise ValueError(f"depths {[s['layers'] for s in seen]} do not tell all kinds of layers apart")
    a = np.array([[1.0, *(c[k] for k in varying)] for c in counts])
    full, worst = {}, {}
    for name in (n for n in FITTED if all(n in s for s in seen)):
        y = np.array([s[name] for s in seen], float)
        x = nonnegative(a, y)
        full[name] = float(np.array([1.0, *(whole[k] for k in varying)]) @ x)
        worst[name] = float(np.max(np.abs(a @ x - y) / np.maximum(y, 1e-9))) if y.any() else 0.0
    return {k: v for k, v in seen[-1].items() if k not in FITTED} | full, worst


def nonnegative(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with x >= 0, by dropping columns whose share is below zero: a handful of columns, so all subsets are
    tried."""
    best = None
    for mask in range(1, 1 << a.shape[1]):
        on = [j for j in range(a.shape[1]) if mask >> j & 1]
        part, *_ = np.linalg.lstsq(a[:, on], y, rcond=None)
        if (part >= -1e-9).all():
            x = np.zeros(a.shape[1])
            x[on] = part
            error = float(np.sum((a @ x - y) ** 2))
            if best is None or error < best[0] * (1 - 1e-9) - 1e-12:
                best = error, x
    return best[1] if best else np.zeros(a.shape[1])
