"""Sub-layer kinds: how each mixer and each ffn of the spec is composed from ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.ops.attention import GqaAttention, MlaAttention, QkNormRope
from mkgen.graph.ops.delta import DeltaRule, GatedNorm, ShortConv
from mkgen.graph.ops.elementwise import Add, GatedActivation, SigmoidGate, Split
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.moe import Route, RoutedExperts
from mkgen.graph.ops.norm import RmsNorm
from mkgen.spec.model import Gqa, Kda, Mla, Mlp, Moe, Spec

Made = tuple[list[Op], Value]


def columns(name: str, k: int, n: int, units: int | None = None, assemble: str = "linear", role: str | None = None) -> Weight:
    """A matrix [k, n] whose columns are shared out in `units` pieces."""
    return Weight(name, (k, n), (role or name,), assemble, split=1, units=units or n)


def rows(name: str, k: int, n: int, units: int | None = None) -> Weight:
    """A matrix [k, n] whose rows are shared out in `units` pieces."""
    return Weight(name, (k, n), (name,), "linear", split=0, units=units or k)


def out(name: str, x: Value, hidden: int) -> Made:
    y = Value(f"{name}.out", hidden)
    return [Linear(f"{name}.o", x, (y,), (rows(f"{name}.o", x.width, hidden, x.units),), along="rows")], y


def gqa(name: str, a: Gqa, h: Value, spec: Spec) -> Made:
    """Grouped-query attention with a positional cache."""
    hd, hidden = a.head_dim, h.width
    q, k, v = (Value(f"{name}.{c}", n * hd, units=n) for c, n in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)))
    ys = [q, k, v]
    ops: list[Op] = []
    if a.output_gate:
        ys.append(Value(f"{name}.g", a.heads * hd, units=a.heads))
    ws = tuple(columns(y.name, hidden, y.width, y.units) for y in ys)
    ops.append(Linear(f"{name}.qkv", h, tuple(ys), ws))
    if a.qk_norm or a.rope:
        qr, kr = (Value(f"{v.name}_rope", v.width, units=v.units) for v in (q, k))
        norms = [Weight(f"{name}.{c}_norm", (hd,), (f"{name}.{c}_norm",), "vector") if a.qk_norm else None for c in "qk"]
        ops.append(QkNormRope(f"{name}.qk", q, k, qr, kr, *norms, eps=a.qk_norm.eps if a.qk_norm else 0.0, head_dim=hd,
                              base=a.rope.base if a.rope else None, width=(a.rope.width or hd) if a.rope else 0))
        q, k = qr, kr
    o = Value(f"{name}.attended", a.heads * hd, units=a.heads)
    ops.append(GqaAttention(f"{name}.attention", q, k, v, o, a.heads, a.kv_heads, hd, spec.build.context, f"{name}.cache"))
    if a.output_gate:
        gated = Value(f"{name}.gated", o.width, units=a.heads)
        ops.append(SigmoidGate(f"{name}.gate", o, ys[3], gated))
        o = gated
    last, y = out(name, o, hidden)
    return ops + last, y


def mla(name: str, a: Mla, h: Value, spec: Spec) -> Made:
    """Multi-head latent attention; the cache holds the normed latent and the shared key."""
    hidden, heads, score = h.width, a.heads, a.nope_dim + a.rope_dim
    qa = Value(f"{name}.q_a", a.q_rank, units=a.q_rank)
    kv = Value(f"{name}.kv_a", a.kv_rank + a.rope_dim, units=a.kv_rank + a.rope_dim)
    g = Value(f"{name}.g", heads * a.v_dim, units=heads)
    ops: list[Op] = [Linear(f"{name}.q_a", h, (qa,), (columns(f"{name}.q_a", hidden, a.q_rank),)),
                     Linear(f"{name}.kv_a", h, (kv,), (columns(f"{name}.kv_a", hidden, kv.width),))]
    if a.output_gate:
        ops.append(Linear(f"{name}.g", h, (g,), (columns(f"{name}.g", hidden, g.width, heads),)))
    lat, key = Value(f"{name}.latent_raw", a.kv_rank), Value(f"{name}.key", a.rope_dim)
    ops.append(Split(f"{name}.kv", kv, (lat, key)))
    ql, latent = Value(f"{name}.q_latent", a.q_rank), Value(f"{name}.latent", a.kv_rank)
    for c, x, y in (("q", qa, ql), ("kv", lat, latent)):
        w = Weight(f"{name}.{c}_norm", (x.width,), (f"{name}.{c}_norm",), "vector")
        ops.append(RmsNorm(f"{name}.{c}_norm", x, y, w, a.rank_eps))
    q = Value(f"{name}.q", heads * score, units=heads)
    ops.append(Linear(f"{name}.q_b", ql, (q,), (columns(f"{name}.q_b", a.q_rank, q.width, heads),)))
    o = Value(f"{name}.attended", heads * a.v_dim, units=heads)
    k_up = columns(f"{name}.k_up", a.kv_rank, heads * a.nope_dim, heads, f"first_half_heads({a.nope_dim},{a.v_dim})", f"{name}.kv_b")
    v_up = columns(f"{name}.v_up", a.kv_rank, heads * a.v_dim, heads, f"second_half_heads({a.nope_dim},{a.v_dim})", f"{name}.kv_b")
    ops.append(MlaAttention(f"{name}.attention", q, latent, key, o, k_up, v_up, heads, a.nope_dim, a.rope_dim, a.v_dim, a.kv_rank,
                            spec.build.context, f"{name}.cache"))
    if a.output_gate:
        gated = Value(f"{name}.gated", o.width, units=heads)
        ops.append(SigmoidGate(f"{name}.gate", o, g, gated))
        o = gated
    last, y = out(name, o, hidden)
    return ops + last, y


def kda(name: str, a: Kda, h: Value, spec: Spec) -> Made:
    """Kimi Delta Attention: short convolution, delta rule with a decay per key channel, norm."""
    hidden, heads, wide = h.width, a.heads, a.heads * a.head_dim
    per_head = lambda c: Value(f"{name}.{c}", wide, units=heads)
    q, k, v, g = (per_head(c) for c in "qkvg")
    beta, fa, z = Value(f"{name}.b", heads, units=heads), Value(f"{name}.f_a", a.decay_rank, units=a.decay_rank), per_head("z")
    ops: list[Op] = [Linear(f"{name}.f_a", h, (fa,), (columns(f"{name}.f_a", hidden, a.decay_rank),)),
                     Linear(f"{name}.f_b", fa, (z,), (columns(f"{name}.f_b", a.decay_rank, wide, heads),)),
                     Linear(f"{name}.b", h, (beta,), (columns(f"{name}.b", hidden, heads),)),
                     Linear(f"{name}.qkvg", h, (q, k, v, g), tuple(columns(x.name, hidden, wide, heads) for x in (q, k, v, g)))]
    convs = tuple(Weight(f"{name}.{c}_conv", (a.conv, wide), (f"{name}.{c}_conv",), "taps", "f32", 1, heads) for c in "qkv")
    qc, kc, vc = (per_head(f"{c}_conv") for c in "qkv")
    ops.append(ShortConv(f"{name}.conv", (q, k, v), (qc, kc, vc), convs, a.conv, f"{name}.window"))
    o = per_head("delta")
    a_log = Weight(f"{name}.a", (heads,), (f"{name}.a_log",), "exp", "f32", 0, heads)
    dt = Weight(f"{name}.dt_bias", (wide,), (f"{name}.dt_bias",), "vector", "f32", 0, heads)
    ops.append(DeltaRule(f"{name}.delta", qc, kc, vc, z, beta, o, a_log, dt, heads, a.head_dim, a.decay_floor, a.qk_eps,
                         f"{name}.matrix"))
    gated = per_head("gated")
    w = Weight(f"{name}.o_norm", (a.head_dim,), (f"{name}.o_norm",), "vector", "f32")
    ops.append(GatedNorm(f"{name}.gated_norm", o, g, gated, w, a.head_dim, a.norm.eps))
    last, y = out(name, gated, hidden)
    return ops + last, y


def gated_mlp(name: str, x: Value, width: int, act, hidden: int, prefix: str = "", dtype: str = "bf16") -> Made:
    gate, up = (Value(f"{name}.{prefix}{c}", width, units=width) for c in ("gate", "up"))
    h = Value(f"{name}.{prefix}act", width, units=width)
    y = Value(f"{name}.{prefix}out", hidden, dtype)
    return [Linear(f"{name}.{prefix}gate_up", x, (gate, up), tuple(columns(v.name, x.width, width) for v in (gate, up))),
            GatedActivation(f"{name}.{prefix}act", gate, up, h, act),
            Linear(f"{name}.{prefix}down", h, (y,), (rows(f"{name}.{prefix}down", width, hidden),), along="rows")], y


def mlp(name: str, f: Mlp, h: Value, spec: Spec) -> Made:
    """Gated MLP."""
    return gated_mlp(name, h, f.width, f.activation, h.width)


def moe(name: str, f: Moe, h: Value, spec: Spec) -> Made:
    """Routed experts, each distinct one fetched once; optional latent width and shared expert."""
    hidden, wide = h.width, f.latent or h.width
    logits = Value(f"{name}.router_logits", f.experts, "f32", units=f.experts)
    ops: list[Op] = [Linear(f"{name}.router", h, (logits,), (columns(f"{name}.router", hidden, f.experts),))]
    x = h
    if f.latent:
        x = Value(f"{name}.latent_in", wide, units=wide)
        ops.append(Linear(f"{name}.latent_down", h, (x,), (columns(f"{name}.latent_down", hidden, wide),)))
    bias = Weight(f"{name}.router_bias", (f.experts,), (f"{name}.router_bias",), "vector", "f32") if f.router.bias else None
    route = Value(f"{name}.route", f.experts, "f32")
    ops.append(Route(f"{name}.route", logits, route, bias, f.experts, f.top_k, f.router.score, f.router.renorm, f.router.scale))
    gate, up = (Weight(f"{name}.expert_{c}", (f.experts, wide, f.width), (f"{name}.expert_{c}",), "linear") for c in ("gate", "up"))
    down = Weight(f"{name}.expert_down", (f.experts, f.width, wide), (f"{name}.expert_down",), "linear")
    shared = None
    if f.shared_width:
        body, shared = gated_mlp(name, h, f.shared_width, f.activation, hidden, "shared_", "f32")
        ops += body
    y = Value(f"{name}.routed", wide, "bf16" if f.latent or not f.shared_width else "f32")
    ops.append(RoutedExperts(f"{name}.experts", x, route, y, gate, up, down, f.experts, f.top_k, f.width, f.activation))
    if f.latent_norm:
        n = Value(f"{name}.routed_norm", wide)
        w = Weight(f"{name}.latent_norm", (wide,), (f"{name}.latent_norm",), "vector", "f32")
        ops.append(RmsNorm(f"{name}.latent_norm", y, n, w, f.latent_norm.eps, f.latent_norm.offset))
        y = n
    if f.latent:
        up_y = Value(f"{name}.routed_out", hidden, "f32" if shared else "bf16", units=hidden)
        ops.append(Linear(f"{name}.latent_up", y, (up_y,), (columns(f"{name}.latent_up", wide, hidden),)))
        y = up_y
    if shared:
        total = Value(f"{name}.out", hidden)
        ops.append(Add(f"{name}.sum", y, shared, total))
        y = total
    return ops, y


MIXERS = {Gqa: gqa, Mla: mla, Kda: kda}
FFNS = {Mlp: mlp, Moe: moe}
