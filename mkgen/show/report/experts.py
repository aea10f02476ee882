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
from mkgen.simulate.draws import DRAWS, busiest


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


def imbalance(plan: Plan, image: ExpertImage, rows: int, draws: int = DRAWS, seed: int = 0) -> Imbalance:
    """`draws` layers with `rows` rows each, drawn as the simulator draws them."""
    top_k = plan.spec.model.ffns[image.kind].top_k
    found = busiest(np.random.default_rng(seed), draws, rows, image.experts, top_k, image.local_experts)[:, 0]
    share = tuple((n, float(c) / draws) for n, c in enumerate(np.bincount(found)) if c)
    return Imbalance(image.kind, plan.mesh.ranks // image.tensor_parallel, image.local_experts, image.expert_bytes,
                     distinct_experts(plan, image, rows), float(found.mean()), share, image.layers)
