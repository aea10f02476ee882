"""Which tensors a model needs from its checkpoint: every role, for every layer and expert that has it."""
from __future__ import annotations

from collections.abc import Iterator

from mkgen.graph.ir import Weight
from mkgen.pack.expect import MXFP4, Expected
from mkgen.plan.plan import Plan
from mkgen.spec.model import Model
from mkgen.spec.roles import Tensor, tensors

FLOATS = ("bf16", "f32", "f16")


def expected(plan: Plan) -> list[Expected]:
    """One `Expected` a tensor. Experts may come as MXFP4, however they are stored; per-head vectors may be padded."""
    model = plan.spec.model
    split = [w for w in plan.weights.values() if w.split is not None]
    per_head = {r for w in split if w.assemble in ("vector", "exp") for r in w.roles}
    out = []
    for t in tensors(model).values():
        dtypes = (*FLOATS, MXFP4) if t.per == "expert" and len(t.shape) == 2 else FLOATS
        out += [Expected(name, t.shape, dtypes, t.role, t.role in per_head) for name in names(model, t)]
    return out


def names(model: Model, t: Tensor) -> Iterator[str]:
    """The checkpoint's names of one role, layer by layer."""
    pattern = model.checkpoint[t.role]
    experts = range(model.ffns[t.owner].experts) if t.per == "expert" else (None,)
    for layer in [None] if t.per == "model" else layers(model, t.owner):
        yield from (pattern.format(layer=layer, expert=e) for e in experts)


def layers(model: Model, owner: str) -> list[int]:
    """The layers that have `owner`: a kind, or any 'mixer' or 'ffn'."""
    if owner in ("mixer", "ffn"):
        return [n for n, run in enumerate(model.schedule) if getattr(run, owner)]
    return [n for n, run in enumerate(model.schedule) if owner in (run.mixer, run.ffn)]


def tensor_names(plan: Plan, weight: Weight, layer: int | None, expert: int | None = None) -> tuple[str, ...]:
    """The tensors that a weight family of one layer (and one expert) is assembled from."""
    names = plan.spec.model.checkpoint
    return tuple(names[role].format(layer=layer, expert=expert) for role in weight.roles)
