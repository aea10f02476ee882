"""Multi-head latent attention, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value
from mkgen.graph.kinds.common import Made, columns, out
from mkgen.graph.ops.cache import Seen
from mkgen.graph.ops.elementwise import Split
from mkgen.graph.ops.gate import OutputGate, gate_of
from mkgen.graph.ops.gqa_attention import GqaAttention
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.mla_attention import MlaAttention
from mkgen.graph.ops.mla_rope import MlaRope, SpreadKey
from mkgen.graph.ops.norm import norm
from mkgen.graph.ops.rope import rotation
from mkgen.spec.model import Mla, Norm, Spec


def mla(name: str, a: Mla, h: Value, spec: Spec) -> Made:
    """Multi-head latent attention."""
    g = gate_of(f"{name}.g", a.gate, a.heads, a.v_dim, a.heads) if a.gate else None
    (q_first, *q_rest), q = queries(name, a, h)
    (kv_first, split, kv_norm), latent, key = latents(name, a, h)
    gate = [Linear(g.name, h, (g,), (columns(g.name, h.width, g.width, a.heads, groups=a.heads),))] if g else []
    # what reads h, then what needs an exchange: the norms side by side lie in one chunk
    ops: list[Op] = [q_first, kv_first, *gate, split, *q_rest[:1], kv_norm, *q_rest[1:]]
    turn = rotation(name, a.rope, a.rope_dim) if a.rope_dim else None
    if turn or a.query_temperature:
        qt, kt = per_head(f"{name}.q_rope", q.width, a.heads), Value(f"{name}.key_rope", a.rope_dim)
        ops.append(MlaRope(f"{name}.rope", q, key, qt, kt if turn else None, a.heads, a.rope_dim, turn, a.query_temperature))
        q, key = qt, kt if turn else key
    attend = expanded if spec.build.mla_cache == "expanded" else absorbed
    more, o = attend(name, a, q, latent, key, spec)
    ops += more
    if g:
        gated = per_head(f"{name}.gated", o.width, a.heads)
        ops.append(OutputGate(f"{name}.gate", o, g, gated, a.gate, a.v_dim))
        o = gated
    last, y = out(name, o, h.width)
    return ops + last, y


def per_head(name: str, width: int, heads: int) -> Value:
    return Value(name, width, units=heads, groups=heads)


def queries(name: str, a: Mla, h: Value) -> tuple[list[Op], Value]:
    """Each head's [nope | rope], from the hidden width or through a low rank."""
    q = per_head(f"{name}.q", a.heads * (a.nope_dim + a.rope_dim), a.heads)
    if not a.q_rank:
        return [Linear(q.name, h, (q,), (columns(q.name, h.width, q.width, a.heads, groups=a.heads),))], q
    down, normed = Value(f"{name}.q_a", a.q_rank, units=a.q_rank), Value(f"{name}.q_latent", a.q_rank)
    return [Linear(down.name, h, (down,), (columns(down.name, h.width, a.q_rank),)),
            norm(f"{name}.q_norm", down, normed, Norm(eps=a.rank_eps)),
            Linear(f"{name}.q_b", normed, (q,), (columns(f"{name}.q_b", a.q_rank, q.width, a.heads, groups=a.heads),))], q


def latents(name: str, a: Mla, h: Value) -> tuple[list[Op], Value, Value | None]:
    """The normed latent, and the shared key as it is projected."""
    width = a.kv_rank + a.rope_dim
    kv, raw = Value(f"{name}.kv_a", width, units=width), Value(f"{name}.latent_raw", a.kv_rank)
    latent, key = Value(f"{name}.latent", a.kv_rank), Value(f"{name}.key", a.rope_dim) if a.rope_dim else None
    return [Linear(kv.name, h, (kv,), (columns(kv.name, h.width, width),)),
            Split(f"{name}.kv", kv, (raw, key) if key else (raw,)),
            norm(f"{name}.kv_norm", raw, latent, Norm(eps=a.rank_eps))], latent, key


def up(name: str, a: Mla, part: str):
    """The half of role kv_b that makes keys (k) or values (v) of a latent."""
    rule, dim = ("first_half_heads", a.nope_dim) if part == "k" else ("second_half_heads", a.v_dim)
    return columns(f"{name}.{part}_up", a.kv_rank, a.heads * dim, a.heads, f"{rule}({a.nope_dim},{a.v_dim})", f"{name}.kv_b", a.heads)


def absorbed(name: str, a: Mla, q: Value, latent: Value, key: Value | None, spec: Spec) -> tuple[list[Op], Value]:
    """The cache holds the latent and the shared key; heads meet them there."""
    o = per_head(f"{name}.attended", a.heads * a.v_dim, a.heads)
    return [MlaAttention(f"{name}.attention", q, latent, key, o, up(name, a, "k"), up(name, a, "v"), a.heads, a.nope_dim, a.rope_dim,
                         a.v_dim, a.kv_rank, a.scale, spec.build.context, f"{name}.cache")], o


def expanded(name: str, a: Mla, q: Value, latent: Value, key: Value | None, spec: Spec) -> tuple[list[Op], Value]:
    """The cache holds each head's own key and value."""
    o = per_head(f"{name}.attended", a.heads * a.v_dim, a.heads)
    k, v = (per_head(f"{name}.{c}", a.heads * dim, a.heads) for c, dim in (("k_nope", a.nope_dim), ("v", a.v_dim)))
    ops: list[Op] = [Linear(f"{name}.kv_b", latent, (k, v), (up(name, a, "k"), up(name, a, "v")))]
    if key:
        whole = per_head(f"{name}.k", a.heads * (a.nope_dim + a.rope_dim), a.heads)
        ops.append(SpreadKey(f"{name}.spread_key", k, key, whole, a.heads))
        k = whole
    ops.append(GqaAttention(f"{name}.attention", q, k, v, o, None, a.heads, a.heads, a.nope_dim + a.rope_dim, a.v_dim, a.scale, 0.0, 1.0,
                            Seen(), spec.build.context, f"{name}.cache"))
    return ops, o
