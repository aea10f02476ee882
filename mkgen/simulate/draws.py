"""How many distinct experts the busiest rank has to run in each layer: rows choose independently and uniformly."""
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
    """int [steps, routing layers]: the most distinct experts that any expert-parallel group is asked for.

    Each row takes top_k distinct ones, all sets equally likely (also where a router picks groups first). identical: all rows
    take the same. A group holds a run of local_experts; every layer waits for its busiest one."""
    rng = np.random.default_rng(seed)
    kinds = routed(plan)
    out = np.zeros((steps, len(kinds)), np.int64)
    for image in plan.experts:
        layers = [n for n, kind in enumerate(kinds) if kind == image.kind]
        top_k = plan.spec.model.ffns[image.kind].top_k
        out[:, layers] = busiest(rng, steps * len(layers), rows if tokens == ROWS else 1, image.experts, top_k, image.local_experts).reshape(steps, -1)
    return out


def busiest(rng: np.random.Generator, draws: int, rows: int, experts: int, top_k: int, local: int) -> np.ndarray:
    """int [draws]: the largest number of distinct chosen experts in any run of `local` of them."""
    groups = -(-experts // local)
    asked = np.zeros((draws, groups * local), bool)
    for _ in range(rows):
        chosen = np.argpartition(rng.random((draws, experts), np.float32), top_k - 1, axis=1)[:, :top_k]
        np.put_along_axis(asked, chosen, True, axis=1)
    return asked.reshape(draws, groups, local).sum(axis=2).max(axis=1)
