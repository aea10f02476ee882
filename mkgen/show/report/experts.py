"""Routed experts are not shared out evenly: how many a layer's busiest ranks have to fetch, drawn with a fixed seed.

Rows choose top_k experts uniformly and independently; the ranks of one expert group fetch each distinct one once. A layer
waits for its busiest group.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkgen.plan.experts import ExpertImage
from mkgen.plan.figures import distinct_experts
from mkgen.plan.plan import Plan

DRAWS, SEED = 1000, 0


@dataclass(frozen=True)
class Imbalance:
    """Of one kind of routed experts. share[n]: part of the draws in which the busiest group fetches n experts."""
    kind: str
    groups: int
    local: int
    each_bytes: int
    mean: float                          # distinct experts of a group
    busiest: float                       # of the busiest group, the mean over the draws
    share: tuple[tuple[int, float], ...]
    layers: int

    @property
    def factor(self) -> float:
        return self.busiest / self.mean if self.mean else 1.0


def imbalance(plan: Plan, image: ExpertImage, rows: int, draws: int = DRAWS, seed: int = SEED) -> Imbalance:
    """`draws` layers with `rows` rows each."""
    top_k = plan.spec.model.ffns[image.kind].top_k
    groups = plan.mesh.ranks // image.tensor_parallel
    rng = np.random.default_rng(seed)
    chosen = np.argpartition(rng.random((draws, rows, image.experts)), top_k - 1, axis=-1)[..., :top_k].reshape(draws, -1)
    hit = np.zeros((draws, image.experts), bool)
    hit[np.arange(draws)[:, None], chosen] = True
    group = np.arange(image.experts) // image.local_experts
    fetched = np.stack([hit[:, group == g].sum(axis=1) for g in range(groups)], axis=1)
    busiest = fetched.max(axis=1)
    counts = np.bincount(busiest)
    return Imbalance(image.kind, groups, image.local_experts, image.expert_bytes, distinct_experts(plan, image, rows),
                     float(busiest.mean()), tuple((n, float(c) / draws) for n, c in enumerate(counts) if c), image.layers)
