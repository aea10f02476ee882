"""How many distinct experts the busiest rank has to run in each layer, and how many of them for one row: rows choose independently
and uniformly."""
from __future__ import annotations

import numpy as np

from mkgen.plan.plan import Plan

DRAWS = 1000                             # layers drawn at the least
ROWS, IDENTICAL = "independent", "identical"         # what rows have to do with each other


def routed(plan: Plan) -> list[str]:
    """The kind of each layer that routes, in order."""
    kinds = {image.kind for image in plan.experts}
    return [ffn for _, ffn in plan.graph.layers if ffn in kinds]


def steps_for(plan: Plan, draws: int = DRAWS) -> int:
    """Steps that have `draws` routing layers together."""
    return -(-draws // max(1, len(routed(plan)))) if plan.experts else 1


def draw_experts(plan: Plan, rows: int, steps: int, seed: int = 0, tokens: str = ROWS) -> np.ndarray:
    """int [steps, routing layers, 2]: the most distinct experts that any expert-parallel group is asked for, and how many of these one
    row alone asks for: all but the most that several rows ask any group for, which take longer. So no group is slower than that.

    Each row takes top_k distinct ones, all sets equally likely (also where a router picks groups first). identical: all rows
    take the same. A group holds a run of local_experts; every layer waits for its busiest one."""
    rng = np.random.default_rng(seed)
    kinds = routed(plan)
    out = np.zeros((steps, len(kinds), 2), np.int64)
    for image in plan.experts:
        layers = [n for n, kind in enumerate(kinds) if kind == image.kind]
        top_k = plan.spec.model.ffns[image.kind].top_k
        found = busiest(rng, steps * len(layers), rows if tokens == ROWS else 1, image.experts, top_k, image.local_experts)
        out[:, layers] = found.reshape(steps, -1, 2)
    if tokens == IDENTICAL and rows > 1:
        out[..., 1] = 0
    return out


def busiest(rng: np.random.Generator, draws: int, rows: int, experts: int, top_k: int, local: int) -> np.ndarray:
    """int [draws, 2]: the largest number of distinct chosen experts in any run of `local` of them, and that less the largest number
    which several rows chose."""
    groups = -(-experts // local)
    asked = np.zeros((draws, groups * local), np.int8)
    for _ in range(rows):
        chosen = np.argpartition(rng.random((draws, experts), np.float32), top_k - 1, axis=1)[:, :top_k]
        np.put_along_axis(asked, chosen, np.take_along_axis(asked, chosen, axis=1) + 1, axis=1)
    asked = asked.reshape(draws, groups, local)
    distinct, several = ((asked >= rows_least).sum(axis=2).max(axis=1) for rows_least in (1, 2))
    return np.stack([distinct, distinct - several], axis=1)
