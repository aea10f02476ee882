"""What sharding wastes: units that no rank truly has, filled up so that all ranks run one program. By family, all ranks
together: tile padding is not in it (`figures.families` has both)."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.graph.ir import Weight
from mkgen.plan.figures import STORED, held_elements
from mkgen.plan.plan import Plan
from mkgen.plan.shard import local_units
from mkgen.plan.tape import ROW_BYTES


@dataclass(frozen=True)
class Padding:
    """what: heads | columns | vocabulary | experts | expert columns. units: true ones; room: of all ranks together, repeated
    units counted once. bytes: of padding, in all ranks' HBM; held: with it."""
    what: str
    units: int
    room: int
    bytes: int
    held: int

    @property
    def fraction(self) -> float:
        """Of what is held."""
        return self.bytes / self.held


def paddings(plan: Plan) -> dict[str, Padding]:
    """Weight family (or 'experts') -> its padding, where there is any."""
    out, layers = {}, family_layers(plan)
    for name, held, item in _stored(plan):
        w = plan.weights[name]
        if not held.whole and w.split is not None and name in layers:
            what = "vocabulary" if name == "head" else "heads" if _headed(w) else "columns"
            out[name] = _of(plan, w, item * layers[name], what, getattr(held, "over", 0))
    table = next((w for w in plan.weights.values() if w.assemble == "rows"), None)
    if table is not None:
        out[table.name] = _of(plan, table, STORED["bf16"], "vocabulary")
    return {name: p for name, p in (out | expert_paddings(plan)).items() if p.bytes}


def _headed(w: Weight) -> bool:
    """Units of several features, or of few groups: heads."""
    return w.groups > 0 and (w.units < w.shape[w.split] or w.groups < w.units)


def _stored(plan: Plan):
    """(family, matrix or vector that holds it, bytes of an element)."""
    for m in plan.matrices.values():
        yield from ((part.weight, m, m.rows * ROW_BYTES / (m.k_padded * m.n_padded)) for part in m.parts)
    for v in plan.vectors.values():
        yield from ((name, v, STORED[v.dtype]) for name in v.weights)


def family_layers(plan: Plan) -> dict[str, int]:
    """Family -> times that its sub-layer runs in a step."""
    out: dict[str, int] = {}
    for sub in plan.graph.sublayers():
        runs = sum(sub.name in pair for pair in plan.graph.layers) if sub.role in ("mixer", "ffn") else 1
        out.update((w.name, runs) for op in sub.ops for w in op.weights())
    return out


def _of(plan: Plan, w: Weight, item: float, what: str, over: int = 0) -> Padding:
    """over: ranks that it is cut over, if not all; the others hold copies, with the same padding."""
    ranks, unit = over or plan.mesh.ranks, w.elements // w.units * item
    local, true = local_units(w.units, ranks, w.groups), held_elements(w, ranks, False) * ranks * item
    held = ranks * local * unit
    copies = plan.mesh.ranks // ranks
    return Padding(what, w.units, w.units + round((held - true) / unit), round((held - true) * copies), round(held * copies))


def expert_paddings(plan: Plan) -> dict[str, Padding]:
    """Experts that no rank has, and columns of those that are there."""
    out = {}
    for image in plan.experts:
        parts, size = image.tensor_parallel, image.layers * image.expert_bytes
        room = plan.mesh.ranks // parts * image.local_experts
        wide = image.width * parts * image.pieces
        slots, columns = (room - image.experts) * parts * size, image.experts * parts * size * (wide - image.whole_width) // wide
        out[image.name] = Padding("experts", image.experts, room, slots, room * parts * size)
        out[image.name.replace("experts", "expert columns")] = Padding("expert columns", image.whole_width, wide, columns,
                                                                       image.experts * parts * size)
    return out
