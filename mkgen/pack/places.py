"""Where each weight lies: the share of a rank, and the rows of its tape, expert image and embedding table."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.graph.ir import Weight
from mkgen.plan.experts import ExpertImage
from mkgen.plan.plan import Plan
from mkgen.plan.shard import unit_range
from mkgen.plan.tape import Matrix, Vector


def share(weight: Weight, axis: int, held: Matrix | Vector, ranks: int, rank: int) -> slice:
    """The true elements of `weight` along `axis` that `rank` holds: all, unless that is the axis that is shared out.

    May be shorter than the rank's local width, and empty: the last ranks' share is filled up with zeros.
    """
    if held.whole or weight.split != axis:
        return slice(0, weight.shape[axis])
    ranks = getattr(held, "over", 0) or ranks
    first, last = unit_range(weight.units, ranks, rank % ranks, weight.groups, weight.once)
    unit = weight.shape[axis] // weight.units
    return slice(first * unit, last * unit)


@dataclass(frozen=True)
class Home:
    """One place of a weight on the tape: part `part` of a matrix or vector, `at` local columns from its left edge."""
    of: Matrix | Vector
    part: int
    at: int


class TapePlaces:
    """The tape of a plan, indexed by layer (None: the ends) and name. The same for every rank.

    entries: (layer, matrix or vector name) -> [(block, first row)], block is None for a vector.
    homes: (layer, weight name) -> the matrices and vectors that it is part of; in order of use, the ends first.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.entries: dict[tuple[int | None, str], list[tuple[int | None, int]]] = {}
        self.homes: dict[tuple[int | None, str], list[Home]] = {}
        row = 0
        for layer, region in plan.sequence():
            for chunk in region.chunks:
                for e in chunk.entries:
                    self.entries.setdefault((layer, e.name), []).append((e.block, row + e.row))
                row += chunk.rows
        for layer, name in sorted(self.entries, key=lambda key: key[0] is not None):       # stable: only the ends move
            for weight, home in self._parts(name, layer):
                self.homes.setdefault((layer, weight), []).append(home)

    def _parts(self, name: str, layer: int | None):
        """(weight name, its home) of each part of a matrix or vector. Entries of a matrix have block numbers."""
        at = 0
        if self.entries[layer, name][0][0] is not None:
            matrix = self.plan.matrices[name]
            for i, part in enumerate(matrix.parts):
                yield part.weight, Home(matrix, i, at)
                at += part.width
            return
        vector = self.plan.vectors[name]
        for i, weight in enumerate(vector.weights):
            yield weight, Home(vector, i, at)
            at += local_width(self.plan, self.plan.weights[weight], vector)


def local_width(plan: Plan, weight: Weight, vector: Vector) -> int:
    """Elements of a vector's line on each rank, padding of the last ranks included."""
    axis, ranks = len(weight.shape) - 1, plan.mesh.ranks
    mine = share(weight, axis, vector, ranks, 0)              # no rank holds more than rank 0
    return mine.stop - mine.start


def embedding_weight(plan: Plan) -> Weight | None:
    """The table that the first sub-layer looks tokens up in; None if it has none."""
    tables = [w for op in plan.graph.begin.ops for w in op.weights() if w.assemble == "rows"]
    return tables[0] if tables else None


def embedding_run(plan: Plan, rank: int) -> slice:
    """The tokens whose rows `rank` holds."""
    vocab, run = plan.spec.model.vocab, -(-plan.spec.model.vocab // plan.mesh.ranks)
    return slice(min(rank * run, vocab), min((rank + 1) * run, vocab))


def expert_layers(plan: Plan, image: ExpertImage) -> list[int]:
    """The layers that run these routed experts, in the order of the image."""
    return [n for n, kinds in enumerate(plan.graph.layers) if image.kind in kinds]


def expert_ranks(image: ExpertImage, expert: int) -> range:
    """The ranks that hold a part of `expert`; part i is on the i-th of them."""
    first = expert // image.local_experts * image.tensor_parallel
    return range(first, first + image.tensor_parallel)


def shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Of a rank's u32 arrays, by name: tape, embedding, and the experts of each kind."""
    arrays = {"tape": (plan.tape_rows, 128), "embedding": (plan.embed_rows, 128)}
    return arrays | {image.name: image.shape for image in plan.experts}
