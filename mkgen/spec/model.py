"""What a spec says, as frozen dataclasses: the model along orthogonal axes, and how to build it.

Field names are those of the YAML. Widths are in elements, never in bytes. Nothing here knows a model by name;
`load.py` makes these objects from a file, `validate.py` refuses the ones that cannot be.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from mkgen.spec.yaml_lines import Where


@dataclass(frozen=True)
class Norm:
    """RMS norm: x * rsqrt(mean(x^2) + eps) * (offset + w)."""
    eps: float = 1e-6
    offset: float = 0.0


@dataclass(frozen=True)
class Rope:
    """Rotary embedding on the first `width` features of a head (all of them when None); half-split pairs."""
    base: float = 10000.0
    width: int | None = None


@dataclass(frozen=True)
class Activation:
    """phi(g, u). silu: silu(g) u. situ: beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)."""
    kind: str = "silu"
    beta: float = 4.0
    linear_beta: float = 25.0


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention with a positional cache."""
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = None
    qk_norm: Norm | None = None
    output_gate: bool = False                    # o * sigmoid(h W_g), one gate a channel


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention; the cache holds the normed latent and the shared key (absorbed form)."""
    heads: int
    q_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int                                # of the key shared by all heads; rotated only with `rope`
    v_dim: int
    rank_eps: float = 1e-6
    rope: Rope | None = None
    output_gate: bool = False


@dataclass(frozen=True)
class Kda:
    """Kimi Delta Attention (arXiv 2510.26692): a delta rule, a decay per key channel, a short convolution."""
    heads: int
    head_dim: int
    conv: int                                    # taps of the causal depthwise convolution on q, k and v
    decay_rank: int                              # h W_fa W_fb: width of the bottleneck of the decay
    decay_floor: float                           # log decay = decay_floor * sigmoid(exp(A_log) (z + dt_bias))
    qk_eps: float = 1e-6
    norm: Norm = field(default_factory=Norm)     # per-head norm on the output, before the output gate


@dataclass(frozen=True)
class Mlp:
    width: int
    activation: Activation = field(default_factory=Activation)


@dataclass(frozen=True)
class Router:
    """score -> (+ bias, for the selection only) -> top_k -> renorm -> scale. Ties go to the lowest id."""
    score: str = "softmax"                       # softmax | sigmoid
    bias: bool = False
    renorm: bool = True
    scale: float = 1.0


@dataclass(frozen=True)
class Moe:
    experts: int
    top_k: int
    width: int                                   # of one expert
    router: Router = field(default_factory=Router)
    activation: Activation = field(default_factory=Activation)
    shared_width: int = 0                        # all shared experts together; 0: none
    latent: int = 0                              # width of the experts' input and output; 0: the hidden width
    latent_norm: Norm | None = None              # on the sum of the experts, before it leaves the latent


@dataclass(frozen=True)
class Residual:
    """add: x + f(norm(x)).

    block_softmax: a learned mixture of snapshots, one every `block` layers, and the running sum.
    """
    kind: str = "add"
    block: int = 0
    eps: float = 1e-5


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
    mixers: dict[str, Gqa | Mla | Kda]
    ffns: dict[str, Mlp | Moe]
    schedule: tuple[Run, ...] = field(metadata={"derived": True})    # the columns expanded, one entry a layer
    norm: Norm = field(default_factory=Norm)
    residual: Residual = field(default_factory=Residual)
    tied_head: bool = False
    parameters: int | None = None                # published total, checked when given
    checkpoint: dict[str, str] = field(default_factory=dict)   # role -> tensor name with {layer}, {expert}
    sources: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Build:
    """How to build it. Layout fields are hashed into the packed weights; the rest is schedule."""
    # layout
    chip: str
    mesh: dict[str, int]                         # factor -> size, outermost first; rank = row-major index
    expert_parallel: int = 1
    tensor_parallel: int = 1                     # the inner factor; the product of both is the ranks
    formats: dict[str, str] = field(default_factory=dict)      # family -> bf16 | mxfp4
    replicate: tuple[str, ...] = ()              # weight families kept whole on every rank
    block_kib: int = 2048                        # largest block of a streamed matrix = one ring slot
    # schedule
    activations: str = "bf16"                    # bf16 | f32: products then take two bf16 terms of each activation
    rows: tuple[int, ...] = (1,)
    tokens: int = 1
    context: int = 4096
    kv_tile: int = 256                           # tokens in one tile of a positional cache
    ring_depth: int = 12
    expert_slots: int = 4
    kv_slots: int = 8
    spill_kib: int = 2816                        # VMEM left to the compiler

    @property
    def ranks(self) -> int:
        n = 1
        for size in self.mesh.values():
            n *= size
        return n


@dataclass(frozen=True)
class Spec:
    model: Model
    build: Build
    path: str
    where: Where = field(default_factory=Where, compare=False, repr=False)     # where each value was written
