"""What the sub-layers of a plan share while it is made: declarations, and where carried values lie."""
from __future__ import annotations

from copy import copy
from dataclasses import dataclass

from mkgen.graph.ir import LayerGraph, State, Weight
from mkgen.plan.experts import OPERAND, ExpertImage, plan_experts
from mkgen.plan.regions import Buffer, Transfer
from mkgen.plan.shard import Mesh
from mkgen.plan.tape import LANES, Matrix, Vector
from mkgen.spec.model import Build
from mkgen.targets import Target

ROWS_PADDED = 8                          # decode rows are padded to one sublane tile


@dataclass(frozen=True)
class Place:
    """Where a value lies: columns [at, at + width) of a buffer, and how complete it is on this rank."""
    buffer: str
    at: int
    width: int
    dtype: str
    spread: str                          # whole | split | partial | rows
    even: bool = False                   # split into equal runs of columns, whatever units the value has
    whole_at: str | None = None          # a buffer that the whole value may go to, when it is gathered
    over: int = 0                        # neighbours that it is split over; the other groups of as many hold copies. 0: all ranks


class Memory:
    """Declarations shared by all sub-layers: buffers, transfers, matrices, vectors, places of carried values."""

    def __init__(self, graph: LayerGraph, build: Build, mesh: Mesh, target: Target):
        self.graph, self.build, self.mesh, self.target = graph, build, mesh, target
        self.slot_rows = build.block_kib * 1024 // (LANES * 4)
        self.ring_depth = build.ring_depth
        self.buffers: dict[str, Buffer] = {}
        self.transfers: dict[str, Transfer] = {}
        self.matrices: dict[str, Matrix] = {}
        self.vectors: dict[str, Vector] = {}
        self.weights: dict[str, Weight] = {}
        self.states: dict[str, tuple[State, Buffer]] = {}
        self.places: dict[str, Place] = {}
        self.experts: dict[str, ExpertImage] = expert_images(graph, build)
        self.embed_rows = 0
        self.notes: list[tuple[str, str]] = []
        self.inboxes: dict[str, tuple[int, int]] = {}  # group -> words a row of a message, and of one that differs by peer
        self.ways: dict[str, str] = {}                 # sum over the ranks -> how it is made
        self.added: set[str] = set()                   # how sums are made that are added to split columns: runs, whole
        self.left: dict[str, tuple[int, int]] = {}     # left operands of products with scales of groups: chunks, rows

    def scratch(self) -> Memory:
        """A copy to try a lowering on."""
        other = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, (dict, list, set)):
                setattr(other, name, copy(value))
        return other

    def need_inbox(self, stage: str, words: int, outbox: bool) -> None:
        most = self.inboxes.get(stage, (0, 0))
        self.inboxes[stage] = max(most[0], words), max(most[1], words if outbox else 0)

    def declare(self, b: Buffer) -> str:
        known = self.buffers.setdefault(b.name, b)
        if known != b:
            raise ValueError(f"buffer {b.name} is declared twice, differently: {known} and {b}")
        return b.name


def identifier(name: str) -> str:
    return name.replace(".", "_")


def expert_images(graph: LayerGraph, build: Build) -> dict[str, ExpertImage]:
    """The image of each kind of routed experts, by the kind's name."""
    found = [(sub.name, op) for sub in graph.sublayers() for op in sub.ops if op.kind == "routed_experts"]
    out = {}
    for kind, op in found:
        name = OPERAND if len(found) == 1 else f"{OPERAND}_{kind}"
        layers = sum(kind in run for run in graph.layers)
        weights, biases = (tuple(w.name for w in ws) for ws in (op.matrices(), op.biases()))
        out[kind] = plan_experts(name, kind, build.formats.get("experts", "bf16"), layers, op.experts, build.expert_parallel,
                                 build.tensor_parallel, op.x.width, op.width, op.down.shape[-1], weights, biases,
                                 build.expert_kib * 1024)
    return out
