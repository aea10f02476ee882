"""What a step costs a core in bytes, padding and time at the least: the figures of a plan, for one number of rows.

Weights only: states are read and written besides. Per-rank numbers are means over the ranks, so that a share that does
not divide counts as what it is, and the words that fill it up count as padding.
"""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.graph.ir import Weight
from mkgen.plan.experts import ExpertImage
from mkgen.plan.plan import Plan
from mkgen.plan.shard import unit_range
from mkgen.plan.tape import ROW_BYTES, Entry
from mkgen.spec.formats import FORMATS

STORED = {"f32": 4, "bf16": 2}


@dataclass(frozen=True)
class Bytes:
    """Of one family on one rank and step: copied from HBM; true, without padding; of the true ones, how many are copies
    of what another rank holds as well."""
    copied: float = 0.0
    true: float = 0.0
    replicated: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.copied + other.copied, self.true + other.true, self.replicated + other.replicated)

    def times(self, n: float) -> Bytes:
        return Bytes(self.copied * n, self.true * n, self.replicated * n)


def held_elements(w: Weight, ranks: int, whole: bool) -> float:
    """True elements of `w` on a rank, the mean over ranks: all of a whole family, its true units of one that is shared out."""
    if whole or w.split is None:
        return w.elements
    ranges = (unit_range(w.units, ranks, rank, w.groups, w.once) for rank in range(ranks))
    return w.elements / w.units * sum(last - first for first, last in ranges) / ranks


def families(plan: Plan) -> dict[str, Bytes]:
    """Per step: each matrix and vector of the tape, by name, summed over the layers that use it."""
    ranks, out = plan.mesh.ranks, {}
    for name, uses in entries(plan).items():
        (entry, _) = uses[0]
        matrix = plan.matrices.get(name) if entry.block is not None else None
        held = matrix or plan.vectors[name]
        weights = [plan.weights[p.weight] for p in matrix.parts] if matrix else [plan.weights[w] for w in held.weights]
        size = [FORMATS[held.format].true_bytes(*w.shape) if matrix else w.elements * STORED[held.dtype] for w in weights]
        true = sum(held_elements(w, matrix.over or ranks if matrix else ranks, held.whole) / w.elements * n for w, n in zip(weights, size))
        share = sum(size) / ranks
        layers = sum(n for e, n in uses if e.block in (None, 0))     # a matrix is counted at its first block
        copied = sum(e.rows * n for e, n in uses) * ROW_BYTES
        out[name] = Bytes(copied, true * layers, (true - share) * layers)
    return out


def entries(plan: Plan) -> dict[str, list[tuple[Entry, int]]]:
    """name -> its entries on the tape, each with the number of times that its sub-layer runs in a step."""
    runs: dict[str, int] = {}
    for _, region in plan.sequence():
        runs[region.name] = runs.get(region.name, 0) + 1
    out: dict[str, list[tuple[Entry, int]]] = {}
    for region in plan.regions.values():
        for e in (e for c in region.chunks for e in c.entries):
            out.setdefault(e.name, []).append((e, runs.get(region.name, 0)))
    return out


def distinct_experts(plan: Plan, image: ExpertImage, rows: int) -> float:
    """Expected distinct experts of a rank in one layer, when `rows` rows choose uniformly and independently."""
    top_k = plan.spec.model.ffns[image.kind].top_k
    return image.experts * image.tensor_parallel / plan.mesh.ranks * (1 - (1 - top_k / image.experts) ** rows)


def side_by_side(image: ExpertImage) -> str:
    """What shares the panels of its first matrices, to put behind other words; empty where each has its own, and all of K."""
    what = ["gate and up"] * (image.joint and image.gated) + [f"{image.fold} parts of K"] * (image.fold > 1)
    return f", {' and '.join(what)} side by side in {image.up.panels} panels" if what else ""


def routed(plan: Plan, rows: int) -> Bytes:
    """Per step: the expected experts of this rank."""
    return sum((Bytes(image.expert_bytes, image.true_bytes).times(image.layers * distinct_experts(plan, image, rows))
                for image in plan.experts), Bytes())


def embedded(plan: Plan, rows: int) -> Bytes:
    """Per step: the rank's part of the embedding rows of all decode rows."""
    hidden = plan.spec.model.hidden
    words = -(-hidden // 256)
    return Bytes(words * ROW_BYTES, hidden * STORED["bf16"]).times(rows / plan.mesh.ranks)


def figures(plan: Plan, rows: int) -> dict[str, int | float]:
    """Of a core and step, `rows` rows active: bytes, fractions, `floor_seconds` = streamed bytes at the HBM's rate."""
    if rows not in plan.spec.build.rows:
        raise ValueError(f"rows is {rows}; the plan has the variants {', '.join(map(str, plan.spec.build.rows))}")
    total = sum(families(plan).values(), routed(plan, rows) + embedded(plan, rows))
    return {
        "rows": rows,
        "padding_fraction": round((total.copied - total.true) / total.true, 6),
        "replicated_bytes": round(total.replicated),
        "streamed_bytes_per_step": round(total.copied),
        "true_bytes_per_step": round(total.true),
        "planned_vmem_bytes": sum(plan.vmem(rows).values()),
        "bytes_per_core": plan.bytes_per_core(rows),
        "floor_seconds": round(total.copied / plan.target.hbm_bytes_per_s, 9),
    }
