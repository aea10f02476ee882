"""The plan of a whole decode step: regions, tape, buffers, tables. A frozen artefact; the emitter prints it."""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mkgen.graph.ir import LayerGraph, Weight
from mkgen.plan.experts import ExpertImage
from mkgen.plan.regions import Advance, Buffer, Seq, Transfer, Wait, walk
from mkgen.plan.shard import Mesh
from mkgen.plan.tape import Chunk, Matrix, Vector
from mkgen.plan.vmem import vmem_bytes
from mkgen.spec.model import Spec
from mkgen.targets import Target


@dataclass(frozen=True)
class Region:
    """One sub-layer: its region, and the chunks that it consumes each time it runs."""
    name: str
    role: str
    doc: str
    body: Seq
    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> int:
        return sum(c.rows for c in self.chunks)

    @property
    def awaited(self) -> bool:
        """Has the sub-layer before waited for the first chunk?"""
        first = next((n for n in walk(self.body) if isinstance(n, Advance) or isinstance(n, Wait) and n.transfer == "tape_copy"), None)
        return isinstance(first, Advance)


@dataclass(frozen=True)
class Plan:
    spec: Spec
    graph: LayerGraph
    target: Target
    mesh: Mesh
    regions: dict[str, Region]           # begin, mixers, ffns, end
    buffers: dict[str, Buffer]
    transfers: dict[str, Transfer]
    matrices: dict[str, Matrix]
    vectors: dict[str, Vector]
    weights: dict[str, Weight]
    states: dict[str, str]               # state name -> HBM buffer
    experts: tuple[ExpertImage, ...]     # one a kind of routed experts
    embed_rows: int                      # u32 rows of the rank's embedding table
    ring_depth: int
    slot_rows: int
    why: tuple[tuple[str, str], ...]     # one line a choice
    stages: tuple[tuple[str, int, int], ...] = ()    # groups that exchange: name, size, stride between neighbours
    added: tuple[str, ...] = ()          # how sums are made that are added to split columns: runs, whole
    ways: tuple[tuple[str, str], ...] = ()           # sum over the ranks -> how it is made: scatter, or the groups that reduce it one after another

    # -- the tape -------------------------------------------------------------------------------------------------------

    def sequence(self) -> list[tuple[int | None, Region]]:
        """(layer, region) in the order of execution; the ends have no layer."""
        out: list[tuple[int | None, Region]] = [(None, self.regions["begin"])]
        for n, (mixer, ffn) in enumerate(self.graph.layers):
            out += [(n, self.regions[k]) for k in (mixer, ffn) if k]
        return out + [(None, self.regions["end"])]

    def chunk_table(self) -> np.ndarray:
        """int32[2 * chunks]: first row and rows of chunk g, in the order of consumption."""
        table, at = [], 0
        for _, region in self.sequence():
            for c in region.chunks:
                table += [at, c.rows]
                at += c.rows
        return np.asarray(table, np.int32)

    @property
    def tape_rows(self) -> int:
        return sum(r.rows for _, r in self.sequence())

    @property
    def chunks(self) -> int:
        return sum(len(r.chunks) for _, r in self.sequence())

    # -- per-layer data -------------------------------------------------------------------------------------------------

    @property
    def fact_names(self) -> tuple[str, ...]:
        return ("mixer", "mixer_index", "ffn", "ffn_index", *self.graph.facts)

    def fact_table(self) -> np.ndarray:
        """int32[layers * facts]: which mixer and ffn a layer runs (an index into the sub-layers in use; one past the last: none)."""
        mixers, ffns = list(self.graph.mixers), list(self.graph.ffns)
        rows = []
        for n, ((mixer, ffn), (i, j)) in enumerate(zip(self.graph.layers, self.graph.kind_index())):
            rows.append([mixers.index(mixer) if mixer else len(mixers), i, ffns.index(ffn) if ffn else len(ffns), j,
                         *(f[n] for f in self.graph.facts.values())])
        return np.asarray(rows, np.int32).reshape(-1)

    # -- memory ---------------------------------------------------------------------------------------------------------

    def vmem(self, rows: int) -> dict[str, int]:
        """Tile-padded bytes of each VMEM buffer."""
        return {b.name: vmem_bytes(b, rows) for b in self.buffers.values() if b.space in ("vmem", "out")}

    def state_bytes(self, rows: int) -> int:
        """Bytes of all states in HBM, whose two minor dimensions are padded to tiles as in VMEM."""
        return sum(vmem_bytes(self.buffers[name], rows) for name in self.states.values())

    def bytes_per_core(self, rows: int) -> int:
        """HBM bytes that stay on a core: tape, experts, embedding, states."""
        experts = sum(image.bytes for image in self.experts)
        return self.tape_rows * 512 + experts + self.embed_rows * 512 + self.state_bytes(rows)
