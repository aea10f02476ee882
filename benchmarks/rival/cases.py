"""What is compared: a model as both sides build it, its experts, and the bytes that the rival's weights are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkgen.spec.load import load_spec
from mkgen.spec.model import Moe, Spec
from rival.arrays import dtype_of
from rival.chance import busiest, mean_distinct
from rival.model import Rival

ROOT = Path(__file__).resolve().parents[2]
MOST_GROUPS = 8  # beyond, the busiest group reads more bytes the more groups there are, and a compile takes minutes


@dataclass(frozen=True)
class Case:
    """A model as both sides build it. full_depth: the unrolled form is also compiled as deep as the model is."""

    spec: str
    context: int
    rows: tuple[int, ...]
    sets: tuple[str, ...] = ()
    full_depth: bool = False

    @property
    def path(self) -> str:
        return str(ROOT / "model_specs" / f"{self.spec}.yaml")

    def load(self) -> Spec:
        return load_spec(self.path, sets=self.all_sets)

    @property
    def all_sets(self) -> tuple[str, ...]:
        return (f"build.context={self.context}", *self.sets)


def routed(spec: Spec) -> Moe | None:
    return next((f for f in spec.model.ffns.values() if isinstance(f, Moe)), None)


def layouts(spec: Spec) -> list[int]:
    """Ways to lay experts over the ranks that divide."""
    moe, ranks = routed(spec), spec.build.ranks
    return [
        ep
        for ep in range(1, min(ranks, MOST_GROUPS) + 1)
        if moe and ranks % ep == 0 and moe.experts % ep == 0 and moe.width % (ranks // ep) == 0
    ]


def experts_of(spec: Spec, ep: int, rows: int) -> dict[str, float]:
    """Distinct experts of a layer on the busiest group of ranks and on the mean one."""
    moe = routed(spec)
    return {
        "busiest": float(busiest(moe.experts, moe.top_k, ep, rows)) if moe else 0.0,
        "mean": mean_distinct(moe.experts, moe.top_k, ep, rows) if moe else 0.0,
    }


def weight_bytes(case: Case, rows: int, ep: int, experts: float) -> dict[str, float]:
    """A rank's weights: bytes that it holds, and bytes that a step has to read of them."""
    rival, held, read_ = Rival(case.load(), rows, case.context, "unrolled", ep), 0.0, 0.0

    def one(leaf, _):
        nonlocal held, read_
        size = float(np.prod(leaf.shape)) * np.dtype(dtype_of(leaf.dtype, False)).itemsize
        for axis in leaf.spec:
            for name in (axis,) if isinstance(axis, str) else axis or ():
                size /= {"ep": rival.setup.ep, "tp": rival.setup.tp}[name]
        held += size
        share = {"all": 1.0, "rows": rows / leaf.shape[0], "experts": experts * rival.setup.ep / leaf.shape[0]}[leaf.reads]
        read_ += size * share

    rival.weights(one)
    return {"held_bytes": held, "streamed_bytes": read_}
