"""Bytes: what a step copies by family, where it lies on the tape, and what a core holds."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.figures import Bytes, distinct_experts, embedded, entries, families, side_by_side
from mkgen.plan.plan import Plan, Region
from mkgen.plan.tape import ROW_BYTES


@dataclass(frozen=True)
class Family:
    """A matrix, the vectors of a sub-layer or a stream: bytes of one core and step."""
    name: str
    region: str
    shape: str
    stored: str
    runs: int
    bytes: Bytes

    @property
    def padding(self) -> float:
        return self.bytes.copied - self.bytes.true


@dataclass(frozen=True)
class Piece:
    """A run of one family on the tape of a sub-layer; chunks that it begins."""
    name: str
    bytes: int
    chunks: int


def owners(plan: Plan) -> dict[str, str]:
    """What lies on the tape -> the sub-layer that reads it; of shared names the first."""
    out: dict[str, str] = {}
    for region in plan.regions.values():
        for c in region.chunks:
            for e in c.entries:
                out.setdefault(e.name, region.name)
    return out


def per_family(plan: Plan, rows: int) -> list[Family]:
    """Largest first. Vectors of a sub-layer are one line: each is a few rows."""
    uses, owner, named = entries(plan), owners(plan), families(plan)
    out, vectors = [], {}
    for name, b in named.items():
        m = plan.matrices.get(name)
        if m is None or uses[name][0][0].block is None:
            vectors[owner[name]] = vectors.get(owner[name], Bytes()) + b
            continue
        runs = sum(n for entry, n in uses[name] if entry.block in (None, 0))
        stored = f"{m.format}, {m.blocks} × [{m.block_k}, {m.block_n}] {m.layout}"
        out.append(Family(name, owner[name], f"[{m.k}, {m.n}]" + (", whole" if m.whole else ""), stored, runs, b))
    runs: dict[str, int] = {}
    for _, region in plan.sequence():
        runs[region.name] = runs.get(region.name, 0) + 1
    out += [Family("vectors", region, "norms, biases, small tables", "rows of 128 lanes", runs[region], b) for region, b in vectors.items()]
    for image in plan.experts:
        fetched = image.layers * distinct_experts(plan, image, rows)       # by a rank in a step, on average
        out.append(Family(f"routed {image.name}", image.kind, f"[{image.k}, {image.width}] × {len(image.weights)}",
                          f"{image.format}, one image an expert", image.layers, Bytes(image.expert_bytes, image.true_bytes).times(fetched)))
    out.append(Family("embedding rows", "begin", f"[{plan.spec.model.hidden}] a row", "bf16", 1, embedded(plan, rows)))
    return sorted(out, key=lambda f: -f.bytes.copied)


def tape_of(region: Region) -> list[Piece]:
    """What lies on the tape for one run of a sub-layer, in order, neighbours of one family joined."""
    out: list[Piece] = []
    for c in region.chunks:
        for i, e in enumerate(c.entries):
            began = int(i == 0)
            if out and out[-1].name == e.name:
                out[-1] = Piece(e.name, out[-1].bytes + e.rows * ROW_BYTES, out[-1].chunks + began)
            else:
                out.append(Piece(e.name, e.rows * ROW_BYTES, began))
    return out


def held(plan: Plan, rows: int) -> list[tuple[str, int, str]]:
    """(what, bytes, note): what stays in a core's HBM."""
    out = [("tape", plan.tape_rows * ROW_BYTES, f"{plan.chunks:,} chunks")]
    out += [(image.name, image.bytes, f"{image.layers} layers × {image.local_experts} × {image.expert_bytes:,} bytes, {image.format}{side_by_side(image)}")
            for image in plan.experts]
    out.append(("embedding", plan.embed_rows * ROW_BYTES, "this core's rows of the vocabulary"))
    out.append(("states", plan.state_bytes(rows), ", ".join(plan.states.values()) or "none"))
    return out
