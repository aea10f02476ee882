"""Feed-forward kinds: a plain or gated MLP, and a routed mixture of experts."""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from mkgen.spec.parts import Activation, Norm


@dataclass(frozen=True)
class Mlp:
    """down(phi(gate(x), up(x))), or down(phi(up(x))) where it is not gated."""
    width: int
    gated: bool = True
    activation: Activation = field(default_factory=Activation)
    bias: bool = False                           # of all its matrices


@dataclass(frozen=True)
class Router:
    """z = logit_scale (x W (+ linear_bias)); score(z) -> (+ bias, for the selection only) -> group mask -> top_k ->
    after -> renorm -> scale. Ties go to the lowest id.

    groups: experts in equal runs; a run is as good as its best expert (`max`) or the sum of its best two (`top2`); only the
    `group_top_k` best runs are chosen from. after: what is done to the chosen scores alone.
    """
    score: Literal["softmax", "sigmoid", "logits"] = "softmax"
    logit_scale: float = 1.0
    linear_bias: bool = False                    # role router_linear_bias
    bias: bool = False                           # role router_bias
    groups: int = 1
    group_top_k: int = 1
    group_score: Literal["top2", "max"] = "top2"
    after: Literal["none", "softmax", "sigmoid"] = "none"
    renorm: bool = True
    renorm_eps: float = 0.0                      # added to the sum
    scale: float = 1.0
    scale_input: bool = False                    # an expert reads weight * x, and its output is added as it is


@dataclass(frozen=True)
class Moe:
    """y = (sum of the chosen experts, each weighed) + shared experts."""
    experts: int
    top_k: int
    width: int                                   # of one expert
    gated: bool = True                           # experts and shared experts alike
    router: Router = field(default_factory=Router)
    activation: Activation = field(default_factory=Activation)
    bias: bool = False                           # of the experts' matrices
    shared_width: int = 0                        # all shared experts together; 0: none
    shared_gate: bool = False                    # shared * sigmoid(x w), one gate a token
    shared_multiplier: float = 1.0               # of what shared experts add
    latent: int = 0                              # width of the experts' input and output; 0: the hidden width
    latent_input_norm: Norm | None = None        # on what enters the latent
    latent_norm: Norm | None = None              # on the sum of the experts, before it leaves the latent
    expert_norm: Norm | None = None              # on each expert's output, before it is weighed
