"""Which tensors a checkpoint must hold, with their shapes: one table for the role check and for the parameter
count.

A role is the key under `checkpoint:`. The roles of a kind begin with the name it has in this spec
(`attention.q`). Shapes are those of a Hugging Face checkpoint: matrices are [out, in].
"""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.spec.model import Gqa, Kda, Mla, Mlp, Model, Moe


@dataclass(frozen=True)
class Tensor:
    """One role. `per`: model (once), layer, or expert (of each layer).

    `owner`: the kind, or 'mixer' / 'ffn' for what any layer with one has; None for the model's own.
    """
    role: str
    shape: tuple[int, ...]
    per: str = "layer"
    owner: str | None = None


def tensors(model: Model) -> dict[str, Tensor]:
    """Every tensor that the model needs, by role."""
    out = {t.role: t for t in model_tensors(model)}
    for name, kind in (*model.mixers.items(), *model.ffns.items()):
        out.update((t.role, t) for t in kind_tensors(name, kind, model.hidden))
    return out


def model_tensors(model: Model) -> list[Tensor]:
    """The ends, the norm in front of each sub-layer, and what the residual scheme learns."""
    hidden, owners = model.hidden, []
    out = [Tensor("embed", (model.vocab, hidden), "model"), Tensor("norm", (hidden,), "model")]
    if not model.tied_head:
        out.append(Tensor("head", (model.vocab, hidden), "model"))
    if model.mixers:
        owners.append("mixer")
    if model.ffns:
        owners.append("ffn")
    out += [Tensor(f"{owner}.norm", (hidden,), "layer", owner) for owner in owners]
    if model.residual.kind == "block_softmax":
        for place, per, owner in (("out", "model", None), *((owner, "layer", owner) for owner in owners)):
            out.append(Tensor(f"residual.{place}_norm", (hidden,), per, owner))
            out.append(Tensor(f"residual.{place}_proj", (1, hidden), per, owner))
    return out


def kind_tensors(name: str, kind: Gqa | Mla | Kda | Mlp | Moe, hidden: int) -> list[Tensor]:
    """The tensors of one mixer or ffn, under the name it has in the spec."""
    shapes = _SHAPES[type(kind)](kind, hidden)
    return [Tensor(f"{name}.{role}", shape, "expert" if role.startswith("expert_") else "layer", name)
            for role, shape in shapes.items()]


def _gqa(a: Gqa, hidden: int) -> dict[str, tuple[int, ...]]:
    q, kv = a.heads * a.head_dim, a.kv_heads * a.head_dim
    out = {"q": (q, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, q)}
    if a.qk_norm is not None:
        out |= {"q_norm": (a.head_dim,), "k_norm": (a.head_dim,)}
    if a.output_gate:
        out["g"] = (q, hidden)
    return out


def _mla(a: Mla, hidden: int) -> dict[str, tuple[int, ...]]:
    wide = a.heads * a.v_dim
    out = {"q_a": (a.q_rank, hidden), "q_norm": (a.q_rank,),
           "q_b": (a.heads * (a.nope_dim + a.rope_dim), a.q_rank),
           "kv_a": (a.kv_rank + a.rope_dim, hidden), "kv_norm": (a.kv_rank,),
           "kv_b": (a.heads * (a.nope_dim + a.v_dim), a.kv_rank), "o": (hidden, wide)}
    if a.output_gate:
        out["g"] = (wide, hidden)
    return out


def _kda(a: Kda, hidden: int) -> dict[str, tuple[int, ...]]:
    wide = a.heads * a.head_dim
    return {**{c: (wide, hidden) for c in ("q", "k", "v", "g")}, "b": (a.heads, hidden),
            "f_a": (a.decay_rank, hidden), "f_b": (wide, a.decay_rank),
            **{f"{c}_conv": (wide, 1, a.conv) for c in ("q", "k", "v")},
            "a_log": (a.heads,), "dt_bias": (wide,), "o_norm": (a.head_dim,), "o": (hidden, wide)}


def _mlp(f: Mlp, hidden: int) -> dict[str, tuple[int, ...]]:
    return {"gate": (f.width, hidden), "up": (f.width, hidden), "down": (hidden, f.width)}


def _moe(f: Moe, hidden: int) -> dict[str, tuple[int, ...]]:
    inner = f.latent if f.latent else hidden
    out = {"router": (f.experts, hidden), "expert_gate": (f.width, inner), "expert_up": (f.width, inner),
           "expert_down": (inner, f.width)}
    if f.router.bias:
        out["router_bias"] = (f.experts,)
    if f.latent:
        out |= {"latent_down": (f.latent, hidden), "latent_up": (hidden, f.latent)}
    if f.latent and f.latent_norm is not None:
        out["latent_norm"] = (inner,)
    if f.shared_width:
        wide = f.shared_width
        out |= {"shared_gate": (wide, hidden), "shared_up": (wide, hidden), "shared_down": (hidden, wide)}
    return out


_SHAPES = {Gqa: _gqa, Mla: _mla, Kda: _kda, Mlp: _mlp, Moe: _moe}
