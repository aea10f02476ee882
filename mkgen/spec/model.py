"""What a spec says, as frozen dataclasses: the model along orthogonal axes, and how to build it.

Field names are those of the YAML. Widths are in elements, never in bytes. Nothing here knows a model by name;
`load.py` makes these objects from a file, `validate.py` refuses the ones that cannot be.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mkgen.spec.ffns import Mlp, Moe, Router
from mkgen.spec.mixers import Conv, Decay, Gqa, Linear, LinearGate, LinearNorm, Mla
from mkgen.spec.parts import Activation, Gate, Norm, QkNorm, QueryTemperature, Rope, RopeScaling
from mkgen.spec.yaml_lines import Where

__all__ = ["Activation", "Build", "Conv", "Decay", "Gate", "Gqa", "Linear", "LinearGate", "LinearNorm", "Mla", "Mlp", "Model",
           "Moe", "Norm", "QkNorm", "QueryTemperature", "Residual", "Rope", "RopeScaling", "Router", "Run", "Spec"]


@dataclass(frozen=True)
class Residual:
    """How a sub-layer f reads the stream x and writes it back; n and m are the norms in front of f and behind it.

    add: x + multiplier m(f(n(x))). `norms` says which of n ('pre') and m ('post') there are.
    parallel: x + mixer(n(x)) + ffn(n(x)), one norm for both.
    alpha_beta: y = n(x); alpha y + beta f(y), the constants by name of the kind.
    gated: alpha x + beta m(f(n(x))), a learned vector g a sub-layer: beta = sigmoid(g / temperature),
        alpha = sqrt(max(1 - beta^2, 1e-3)).
    block_softmax: a learned mixture of snapshots, one every `block` layers, and the running sum.
    """
    kind: Literal["add", "parallel", "alpha_beta", "gated", "block_softmax"] = "add"
    norms: tuple[str, ...] = ("pre",)            # add, gated: pre | post | both
    post_norm: Norm | None = None                # the norm behind; None: as model.norm
    ffn_post_norm: Norm | None = None            # that behind an ffn, where it is another; None: as post_norm
    multiplier: float = 1.0                      # add, parallel
    alpha: dict[str, float] = field(default_factory=dict)
    beta: dict[str, float] = field(default_factory=dict)
    temperature: float = 1.0                     # gated
    block: int = 0
    eps: float = 1e-5                            # block_softmax
    dtype: Literal["bf16", "f32"] = "bf16"       # of the stream between sub-layers


@dataclass(frozen=True)
class Run:
    """One layer as the schedule names it: a mixer and an ffn, either may be None ('-')."""
    mixer: str | None
    ffn: str | None


@dataclass(frozen=True)
class Model:
    name: str
    hidden: int
    vocab: int
    layers: int
    mixer: str                                   # the run-length columns as written
    ffn: str
    mixers: dict[str, Gqa | Mla | Linear]
    ffns: dict[str, Mlp | Moe]
    schedule: tuple[Run, ...] = field(metadata={"derived": True})    # the columns expanded, one entry a layer
    norm: Norm = field(default_factory=Norm)
    residual: Residual = field(default_factory=Residual)
    final_norm: Norm | None = None               # in front of the head; None: as `norm`
    embed_scale: float = 1.0
    embed_norm: Norm | None = None               # on the embedding, before the first layer
    tied_head: bool = False
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float = 0.0                   # logits become softcap tanh(logits / softcap); 0: none
    usable_vocab: int = 0                        # ids from here on are padding and never chosen; 0: all are usable
    parameters: int | None = None                # published total, checked when given
    checkpoint: dict[str, str] = field(default_factory=dict)   # role -> name pattern and its cuts, see checkpoint.py
    ignore: tuple[str, ...] = ()                 # shell patterns of the checkpoint's tensors that the decoder has no use for
    sources: dict[str, str] = field(default_factory=dict)


MOST_UNROLL = 8                          # blocks of a turn; a matrix's blocks are shaped for up to so many, whatever a build asks for


@dataclass(frozen=True)
class Build:
    """How to build it. Layout fields are hashed into the packed weights; the rest is schedule."""
    # layout
    chip: str
    mesh: dict[str, int]                         # factor -> size, outermost first; rank = row-major index
    expert_parallel: int = 1
    tensor_parallel: int = 1                     # the inner factor; the product of both is the ranks
    formats: dict[str, str] = field(default_factory=dict)      # family, 'experts' or 'rest' -> format, see formats.py
    replicate: tuple[str, ...] = ()              # weight families kept whole on every rank
    over: dict[str, str] = field(default_factory=dict)         # family -> group of neighbouring ranks that it is cut over; other groups hold copies
    block_kib: int = 2048                        # largest block of a streamed matrix = one ring slot
    expert_kib: int = 6144                       # largest piece of a routed expert = one expert slot
    mla_cache: Literal["latent", "expanded"] = "latent"
    # schedule
    activations: Literal["bf16", "f32"] = "bf16"     # f32: products then take two bf16 terms of each activation
    rows: tuple[int, ...] = (1,)
    tokens: int = 1
    context: int = 4096
    kv_tile: int = 256                           # tokens in one tile of a positional cache
    ring_depth: int = 12
    unroll: int = MOST_UNROLL                    # blocks of a matrix that a turn of its loop multiplies in straight-line code, at most
    expert_slots: int = 4
    expert_batch: int = 1                        # experts that are multiplied in one basic block
    first_experts: int = 2                       # of a layer, that are fetched before others: more share the memory, and all come late
    kv_slots: int = 16
    kv_batch: int = 8                            # tiles that are computed at a time
    lone_experts: bool = True                    # an expert that one of several rows chose is multiplied for that row alone, where its format allows it
    late_refills: int = 0                        # of the ring, the last in front of a layer's experts, which wait for these; 0: those behind the choice
    reduce: dict[str, str] = field(default_factory=dict)       # sum over the ranks, or 'rest' -> auto | scatter | groups of ranks, see exchanges.py
    gather: str = "auto"                         # groups of ranks, innermost first: 'chip_core host'
    scatter: str = "auto"
    wire: Literal["f32", "bf16"] = "f32"         # what sums over the ranks travel as
    add: Literal["auto", "runs", "whole"] = "auto"             # what is added to split columns: each rank's run of the sum, or all of it
    spill_kib: int = 2816                        # VMEM left to the compiler

    @property
    def tiles_at_once(self) -> int:
        """kv_batch, or what is left of it: while half of the slots is computed, the other half is filled."""
        return max(1, min(self.kv_batch, self.kv_slots // 2, max(self.rows) * self.context // self.kv_tile))

    @property
    def ranks(self) -> int:
        n = 1
        for size in self.mesh.values():
            n *= size
        return n

    @property
    def first_in_route(self) -> bool:
        """Is a layer's first expert fetched before the others are known? Only where it is certain to be one of each rank's own."""
        return self.expert_parallel == 1

    @property
    def experts_at_once(self) -> int:
        """first_experts, or as many as there are slots for."""
        return min(self.first_experts, self.experts_ahead)

    @property
    def experts_ahead(self) -> int:
        """Experts that may be on their way: while one is computed, or until a batch is."""
        return self.expert_slots - 1 if self.expert_batch == 1 else self.expert_slots


@dataclass(frozen=True)
class Spec:
    model: Model
    build: Build
    path: str
    where: Where = field(default_factory=Where, compare=False, repr=False)     # where each value was written
