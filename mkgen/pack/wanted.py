"""Which tensors a model needs from its checkpoint, and which part of each is which role's."""
from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mkgen.graph.ir import Weight
from mkgen.plan.plan import Plan
from mkgen.spec.checkpoint import Cut, parse
from mkgen.spec.model import Model
from mkgen.spec.roles import Tensor, tensors


@dataclass(frozen=True)
class Part:
    """What one role takes of a tensor (of one expert's, if they are stacked).

    shape: of the role. narrow: a vector that may be longer there; its first elements count."""
    role: str
    shape: tuple[int, ...]
    cuts: tuple[Cut, ...] = ()
    narrow: bool = False


@dataclass(frozen=True)
class Expected:
    """One tensor by its name in the spec. experts: how many are stacked on its first axis; 0: it is one matrix or vector."""
    name: str
    parts: tuple[Part, ...]
    experts: int = 0

    @property
    def parameters(self) -> int:
        return sum(math.prod(p.shape) for p in self.parts) * (self.experts or 1)


def expected(plan: Plan) -> list[Expected]:
    """One `Expected` a tensor, in the order of the roles. Per-head vectors may be padded in a checkpoint."""
    return expected_of(plan.spec.model, per_head(plan.weights.values()))


def per_head(weights: Iterable[Weight]) -> set[str]:
    """Roles of vectors with an element a head or channel."""
    return {r for w in weights if w.split is not None and w.assemble in ("vector", "exp") for r in w.roles}


def expected_of(model: Model, narrow: set[str] = frozenset()) -> list[Expected]:
    """narrow: the roles whose vectors may be longer in a checkpoint."""
    found: dict[str, Expected] = {}
    for t in tensors(model).values():
        pattern = parse(model.checkpoint[t.role])
        part = Part(t.role, t.shape, pattern.cuts, t.role in narrow and not pattern.cuts)
        stacked = model.ffns[t.owner].experts if t.per == "expert" and "expert" not in pattern.fields else 0
        for name in names(model, t):
            before = found.get(name)
            found[name] = Expected(name, (*(before.parts if before else ()), part), stacked)
    return list(found.values())


def names(model: Model, t: Tensor) -> Iterator[str]:
    """The tensors of one role, layer by layer, each once."""
    pattern = parse(model.checkpoint[t.role])
    each = t.per == "expert" and "expert" in pattern.fields
    experts = range(model.ffns[t.owner].experts) if each else (None,)
    for layer in [None] if t.per == "model" else layers(model, t.owner):
        yield from (pattern.format(layer, e) for e in experts)


def layers(model: Model, owner: str) -> list[int]:
    """The layers that have `owner`: a kind, or any 'mixer' or 'ffn'."""
    if owner in ("mixer", "ffn"):
        return [n for n, run in enumerate(model.schedule) if getattr(run, owner)]
    return [n for n, run in enumerate(model.schedule) if owner in (run.mixer, run.ffn)]


def tensor_names(plan: Plan, weight: Weight, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
    """The tensors that a weight family of one layer (and one expert) is assembled from."""
    patterns = plan.spec.model.checkpoint
    return tuple(parse(patterns[role]).format(layer, expert) for role in weight.roles)
