"""Grouped-query attention, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.kinds.common import Made, columns, out
from mkgen.graph.ops.attention import GqaAttention, QkNormRope
from mkgen.graph.ops.elementwise import SigmoidGate
from mkgen.graph.ops.linear import Linear
from mkgen.spec.model import Gqa, Spec


def gqa(name: str, a: Gqa, h: Value, spec: Spec) -> Made:
    """Grouped-query attention with a positional cache."""
    hd, hidden = a.head_dim, h.width
    q, k, v = (Value(f"{name}.{c}", n * hd, units=n, groups=a.kv_heads) for c, n in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)))
    ys = [q, k, v]
    ops: list[Op] = []
    if a.gate:
        ys.append(Value(f"{name}.g", a.heads * hd, units=a.heads, groups=a.kv_heads))
    ws = tuple(columns(y.name, hidden, y.width, y.units, groups=y.groups) for y in ys)
    ops.append(Linear(f"{name}.qkv", h, tuple(ys), ws))
    if a.qk_norm or a.rope:
        qr, kr = (Value(f"{v.name}_rope", v.width, units=v.units, groups=v.groups) for v in (q, k))
        norms = [Weight(f"{name}.{c}_norm", (hd,), (f"{name}.{c}_norm",), "vector") if a.qk_norm else None for c in "qk"]
        ops.append(QkNormRope(f"{name}.qk", q, k, qr, kr, *norms, eps=a.qk_norm.eps if a.qk_norm else 0.0, head_dim=hd,
                              base=a.rope.base if a.rope else None, width=(a.rope.width or hd) if a.rope else 0))
        q, k = qr, kr
    o = Value(f"{name}.attended", a.heads * hd, units=a.heads, groups=a.kv_heads)
    ops.append(GqaAttention(f"{name}.attention", q, k, v, o, a.heads, a.kv_heads, hd, spec.build.context, f"{name}.cache"))
    if a.gate:
        gated = Value(f"{name}.gated", o.width, units=a.heads, groups=a.kv_heads)
        ops.append(SigmoidGate(f"{name}.gate", o, ys[3], gated))
        o = gated
    last, y = out(name, o, hidden)
    return ops + last, y
