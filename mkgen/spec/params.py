"""The exact number of parameters of a model, from the shapes of its tensors."""
from __future__ import annotations

import math

from mkgen.spec.model import Model
from mkgen.spec.roles import Tensor, tensors


def copies(model: Model, tensor: Tensor) -> int:
    """How often the checkpoint holds the tensor: over layers, and over experts."""
    if tensor.per == "model":
        return 1
    if tensor.owner in ("mixer", "ffn"):
        return sum(getattr(run, tensor.owner) is not None for run in model.schedule)
    layers = sum(tensor.owner in (run.mixer, run.ffn) for run in model.schedule)
    return layers * model.ffns[tensor.owner].experts if tensor.per == "expert" else layers


def by_role(model: Model) -> dict[str, int]:
    """Parameters in all the copies of each role."""
    return {role: math.prod(t.shape) * copies(model, t) for role, t in tensors(model).items()}


def count(model: Model) -> int:
    """All parameters; a tied head is counted once, with the embedding."""
    return sum(by_role(model).values())
