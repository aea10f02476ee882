"""How many experts a group of ranks runs in a layer, when rows choose independently and uniformly."""

from __future__ import annotations

import numpy as np

DRAWS, SEED = 1000, 0


def mean_distinct(experts: int, top_k: int, groups: int, rows: int) -> float:
    """Expected distinct experts of one group."""
    return experts / groups * (1 - (1 - top_k / experts) ** rows)


def busiest(experts: int, top_k: int, groups: int, rows: int) -> float:
    """Expected distinct experts of the group that has most, for which all others wait; the mean of DRAWS layers."""
    rng = np.random.default_rng(SEED)
    most = 0
    for _ in range(DRAWS):
        chosen = np.unique(np.concatenate([rng.choice(experts, top_k, replace=False) for _ in range(rows)]))
        most += np.bincount(chosen * groups // experts, minlength=groups).max()
    return most / DRAWS
