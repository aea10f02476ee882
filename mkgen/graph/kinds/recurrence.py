"""Linear recurrences, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.kinds.common import Made, columns, out
from mkgen.graph.ops.delta import DeltaRule, GatedNorm, ShortConv
from mkgen.graph.ops.linear import Linear as Product
from mkgen.spec.model import Linear, Spec


def linear(name: str, a: Linear, h: Value, spec: Spec) -> Made:
    """Linear recurrence: short convolution, delta rule with a decay per key channel, norm."""
    hidden, heads, wide = h.width, a.heads, a.heads * a.key_dim
    per_head = lambda c: Value(f"{name}.{c}", wide, units=heads, groups=heads)
    q, k, v, g = (per_head(c) for c in "qkvg")
    beta, fa, z = Value(f"{name}.b", heads, units=heads, groups=heads), Value(f"{name}.f_a", a.decay.rank, units=a.decay.rank), per_head("z")
    ops: list[Op] = [Product(f"{name}.f_a", h, (fa,), (columns(f"{name}.f_a", hidden, a.decay.rank),)),
                     Product(f"{name}.f_b", fa, (z,), (columns(f"{name}.f_b", a.decay.rank, wide, heads, groups=heads),)),
                     Product(f"{name}.b", h, (beta,), (columns(f"{name}.b", hidden, heads, groups=heads),)),
                     Product(f"{name}.qkvg", h, (q, k, v, g), tuple(columns(x.name, hidden, wide, heads, groups=heads) for x in (q, k, v, g)))]
    convs = tuple(Weight(f"{name}.{c}_conv", (a.conv.taps, wide), (f"{name}.{c}_conv",), "taps", "f32", 1, heads, heads) for c in "qkv")
    qc, kc, vc = (per_head(f"{c}_conv") for c in "qkv")
    ops.append(ShortConv(f"{name}.conv", (q, k, v), (qc, kc, vc), convs, a.conv.taps, f"{name}.window"))
    o = per_head("delta")
    a_log = Weight(f"{name}.a", (heads,), (f"{name}.a_log",), "exp", "f32", 0, heads, heads)
    dt = Weight(f"{name}.dt_bias", (wide,), (f"{name}.dt_bias",), "vector", "f32", 0, heads, heads)
    ops.append(DeltaRule(f"{name}.delta", qc, kc, vc, z, beta, o, a_log, dt, heads, a.key_dim, a.decay.floor, a.qk_eps,
                         f"{name}.matrix"))
    gated = per_head("gated")
    w = Weight(f"{name}.o_norm", (a.key_dim,), (f"{name}.o_norm",), "vector", "f32")
    ops.append(GatedNorm(f"{name}.gated_norm", o, g, gated, w, a.key_dim, a.norm.eps))
    last, y = out(name, gated, hidden)
    return ops + last, y
