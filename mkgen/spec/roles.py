"""Which tensors a checkpoint must hold, with their shapes: one table for the role check and for the parameter
count.

A role is the key under `checkpoint:`. The roles of a kind begin with the name it has in this spec
(`attention.q`). Shapes are those of a Hugging Face checkpoint: matrices are [out, in].
"""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.spec.model import Gate, Gqa, Linear, Mla, Mlp, Model, Moe, Norm


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
    """The ends, the norms around each sub-layer, and what the residual scheme learns."""
    hidden, owners, residual = model.hidden, [], model.residual
    out = [Tensor("embed", (model.vocab, hidden), "model")]
    out += _norm("norm", model.final_norm or model.norm, hidden, "model")
    out += _norm("embed_norm", model.embed_norm, hidden, "model")
    if not model.tied_head:
        out.append(Tensor("head", (model.vocab, hidden), "model"))
    if model.head_bias:
        out.append(Tensor("head_bias", (model.vocab,), "model"))
    if model.mixers:
        owners.append("mixer")
    if model.ffns:
        owners.append("ffn")
    for owner in owners:
        if "pre" in residual.norms and not (residual.kind == "parallel" and owner == "ffn"):
            out += _norm(f"{owner}.norm", model.norm, hidden, "layer", owner)
        if "post" in residual.norms:
            out += _norm(f"{owner}.post_norm", post_norm(model, owner), hidden, "layer", owner)
        if residual.kind == "gated":
            out.append(Tensor(f"{owner}.gate", (hidden,), "layer", owner))
    if residual.kind == "block_softmax":
        for place, per, owner in (("out", "model", None), *((owner, "layer", owner) for owner in owners)):
            out.append(Tensor(f"residual.{place}_norm", (hidden,), per, owner))
            out.append(Tensor(f"residual.{place}_proj", (1, hidden), per, owner))
    return out


def post_norm(model: Model, owner: str) -> Norm:
    """The norm behind a mixer or an ffn."""
    r = model.residual
    return (r.ffn_post_norm if owner == "ffn" else None) or r.post_norm or model.norm


def _norm(role: str, norm: Norm | None, width: int, per: str, owner: str | None = None) -> list[Tensor]:
    """The weight and the bias of a norm, as far as it has them."""
    if norm is None or norm.weight == "none":
        return []
    return [Tensor(role, (width,), per, owner)] + [Tensor(f"{role}_bias", (width,), per, owner)] * norm.bias


def kind_tensors(name: str, kind: Gqa | Mla | Linear | Mlp | Moe, hidden: int) -> list[Tensor]:
    """The tensors of one mixer or ffn, under the name it has in the spec."""
    shapes = _SHAPES[type(kind)](kind, hidden)
    return [Tensor(f"{name}.{role}", shape, "expert" if role.startswith("expert_") and role != "expert_norm" else "layer", name)
            for role, shape in shapes.items()]


def _gate(gate: Gate | None, heads: int, value_dim: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {} if gate is None else {"g": (heads if gate.per == "head" else heads * value_dim, hidden)}


def _gqa(a: Gqa, hidden: int) -> dict[str, tuple[int, ...]]:
    vd = a.value_dim or a.head_dim
    wide = {"q": a.heads * a.head_dim, "k": a.kv_heads * a.head_dim, "v": a.kv_heads * vd}
    out = {**{c: (n, hidden) for c, n in wide.items()}, "o": (hidden, a.heads * vd)}
    if a.qk_norm is not None and a.qk_norm.weight != "none":
        out |= {f"{c}_norm": (a.head_dim if a.qk_norm.scope == "head" else wide[c],) for c in "qk"}
    out |= _gate(a.gate, a.heads, vd, hidden)
    if a.sinks:
        out["sinks"] = (a.heads,)
    if a.output_norm is not None and a.output_norm.weight != "none":
        out["o_norm"] = (vd,)
    return out | {f"{c}_bias": (out[c][0],) for c in a.bias}


def _mla(a: Mla, hidden: int) -> dict[str, tuple[int, ...]]:
    score = a.heads * (a.nope_dim + a.rope_dim)
    q = {"q_a": (a.q_rank, hidden), "q_norm": (a.q_rank,), "q_b": (score, a.q_rank)} if a.q_rank else {"q": (score, hidden)}
    return {**q, "kv_a": (a.kv_rank + a.rope_dim, hidden), "kv_norm": (a.kv_rank,),
            "kv_b": (a.heads * (a.nope_dim + a.v_dim), a.kv_rank), "o": (hidden, a.heads * a.v_dim),
            **_gate(a.gate, a.heads, a.v_dim, hidden)}


def _linear(a: Linear, hidden: int) -> dict[str, tuple[int, ...]]:
    keys, values = (a.key_heads or a.heads) * a.key_dim, a.heads * a.value_dim
    wide = {"q": keys, "k": keys, "v": values}
    out: dict[str, tuple[int, ...]] = {c: (n, hidden) for c, n in wide.items()}
    if a.gate is not None:
        out |= _low_rank("g", a.gate.rank, values, hidden)
        if a.gate.bias:
            out["g_bias"] = (values,)
    if a.write == "sigmoid":
        out["b"] = (a.heads, hidden)
    if a.decay.kind != "constant":
        decays = a.heads * (a.key_dim if a.decay.per == "channel" else 1)
        out |= _low_rank("f", a.decay.rank, decays, hidden) | {"a_log": (a.heads,), "dt_bias": (decays,)}
    if a.conv is not None:
        out |= {f"{c}_conv": (n, 1, a.conv.taps) for c, n in wide.items()}
        out |= {f"{c}_conv_bias": (n,) for c, n in wide.items() if a.conv.bias}
    if a.skip:
        out["d"] = (a.heads,)
    if a.norm is not None:
        out["o_norm"] = (a.value_dim if a.norm.scope == "head" else values,)
    return out | {"o": (hidden, values)}


def _low_rank(role: str, rank: int, wide: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {f"{role}_a": (rank, hidden), f"{role}_b": (wide, rank)} if rank else {role: (wide, hidden)}


def _mlp(f: Mlp, hidden: int) -> dict[str, tuple[int, ...]]:
    out = {**({"gate": (f.width, hidden)} if f.gated else {}), "up": (f.width, hidden), "down": (hidden, f.width)}
    return out | {f"{m}_bias": shape[:1] for m, shape in out.items() if f.bias}


def _moe(f: Moe, hidden: int) -> dict[str, tuple[int, ...]]:
    inner, r = f.latent or hidden, f.router
    out: dict[str, tuple[int, ...]] = {"router": (f.experts, hidden)}
    if r.linear_bias:
        out["router_linear_bias"] = (f.experts,)
    if r.bias:
        out["router_bias"] = (f.experts,)
    matrices = {**({"gate": (f.width, inner)} if f.gated else {}), "up": (f.width, inner), "down": (inner, f.width)}
    out |= {f"expert_{m}": shape for m, shape in matrices.items()}
    if f.bias:
        out |= {f"expert_{m}_bias": shape[:1] for m, shape in matrices.items()}
    if f.expert_norm is not None and f.expert_norm.weight != "none":
        out["expert_norm"] = (inner,)
    if f.latent:
        out |= {"latent_down": (f.latent, hidden), "latent_up": (hidden, f.latent)}
    for role, norm in (("latent_input_norm", f.latent_input_norm), ("latent_norm", f.latent_norm)):
        if f.latent and norm is not None and norm.weight != "none":
            out[role] = (inner,)
        if f.latent and norm is not None and norm.bias:
            out[f"{role}_bias"] = (inner,)
    if f.shared_width:
        wide = f.shared_width
        out |= {**({"shared_gate": (wide, hidden)} if f.gated else {}), "shared_up": (wide, hidden), "shared_down": (hidden, wide)}
        if f.shared_gate:
            out["shared_scale"] = (1, hidden)
    return out


_SHAPES = {Gqa: _gqa, Mla: _mla, Linear: _linear, Mlp: _mlp, Moe: _moe}
