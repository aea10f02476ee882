"""Multi-head latent attention, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value
from mkgen.graph.kinds.common import Made, columns, out
from mkgen.graph.ops.elementwise import Split
from mkgen.graph.ops.gate import OutputGate, gate_of
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.mla_attention import MlaAttention
from mkgen.graph.ops.norm import norm
from mkgen.spec.model import Mla, Norm, Spec


def mla(name: str, a: Mla, h: Value, spec: Spec) -> Made:
    """Multi-head latent attention; the cache holds the normed latent and the shared key."""
    hidden, heads, score = h.width, a.heads, a.nope_dim + a.rope_dim
    qa = Value(f"{name}.q_a", a.q_rank, units=a.q_rank)
    kv = Value(f"{name}.kv_a", a.kv_rank + a.rope_dim, units=a.kv_rank + a.rope_dim)
    ops: list[Op] = [Linear(f"{name}.q_a", h, (qa,), (columns(f"{name}.q_a", hidden, a.q_rank),)),
                     Linear(f"{name}.kv_a", h, (kv,), (columns(f"{name}.kv_a", hidden, kv.width),))]
    if a.gate:
        g = gate_of(f"{name}.g", a.gate, heads, a.v_dim, heads)
        ops.append(Linear(f"{name}.g", h, (g,), (columns(f"{name}.g", hidden, g.width, heads, groups=heads),)))
    lat, key = Value(f"{name}.latent_raw", a.kv_rank), Value(f"{name}.key", a.rope_dim)
    ops.append(Split(f"{name}.kv", kv, (lat, key)))
    ql, latent = Value(f"{name}.q_latent", a.q_rank), Value(f"{name}.latent", a.kv_rank)
    for c, x, y in (("q", qa, ql), ("kv", lat, latent)):
        ops.append(norm(f"{name}.{c}_norm", x, y, Norm(eps=a.rank_eps)))
    q = Value(f"{name}.q", heads * score, units=heads, groups=heads)
    ops.append(Linear(f"{name}.q_b", ql, (q,), (columns(f"{name}.q_b", a.q_rank, q.width, heads, groups=heads),)))
    o = Value(f"{name}.attended", heads * a.v_dim, units=heads, groups=heads)
    k_up = columns(f"{name}.k_up", a.kv_rank, heads * a.nope_dim, heads, f"first_half_heads({a.nope_dim},{a.v_dim})", f"{name}.kv_b",
                   heads)
    v_up = columns(f"{name}.v_up", a.kv_rank, heads * a.v_dim, heads, f"second_half_heads({a.nope_dim},{a.v_dim})", f"{name}.kv_b",
                   heads)
    ops.append(MlaAttention(f"{name}.attention", q, latent, key, o, k_up, v_up, heads, a.nope_dim, a.rope_dim, a.v_dim, a.kv_rank,
                            spec.build.context, f"{name}.cache"))
    if a.gate:
        gated = Value(f"{name}.gated", o.width, units=heads, groups=heads)
        ops.append(OutputGate(f"{name}.gate", o, g, gated, a.gate, a.v_dim))
        o = gated
    last, y = out(name, o, hidden)
    return ops + last, y
