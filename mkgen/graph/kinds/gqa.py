"""Grouped-query attention, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.kinds.common import Made, columns, out
from mkgen.graph.ops.bias import biased
from mkgen.graph.ops.cache import Seen
from mkgen.graph.ops.clip import clipped
from mkgen.graph.ops.gate import OutputGate, gate_of
from mkgen.graph.ops.gqa_attention import GqaAttention
from mkgen.graph.ops.head_norm import HeadNorm
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.qk import QkNormRope, QkSquares
from mkgen.graph.ops.rope import rotation
from mkgen.spec.model import Gqa, Spec


def gqa(name: str, a: Gqa, h: Value, spec: Spec) -> Made:
    """Grouped-query attention with a positional cache."""
    vd, hidden = a.value_dim or a.head_dim, h.width
    wide = {"q": (a.heads, a.head_dim), "k": (a.kv_heads, a.head_dim), "v": (a.kv_heads, vd)}
    cut = [c for c in wide if a.clip and (c == "v" or not norm_in_front(a))]
    unrounded = (*a.bias, *cut)
    made = {c: Value(f"{name}.{c}", n * d, "f32" if c in unrounded else "bf16", units=n, groups=a.kv_heads)
            for c, (n, d) in wide.items()}
    if a.gate:
        made["g"] = gate_of(f"{name}.g", a.gate, a.heads, vd, a.kv_heads)
    ys = tuple(made.values())
    ops: list[Op] = [Linear(f"{name}.qkv", h, ys, tuple(columns(y.name, hidden, y.width, y.units, groups=y.groups) for y in ys))]
    for c in [c for c in wide if c in a.bias]:
        ops.append(biased(made[c], f"{name}.{c}_bias", dtype="f32" if c in cut else "bf16"))
        made[c] = ops[-1].y
    for c in cut:
        ops.append(clipped(made[c], f"{name}.{c}_clipped", a.clip))
        made[c] = ops[-1].y
    more, q, k = queries_and_keys(name, a, made["q"], made["k"])
    per_head = lambda part: Value(f"{name}.{part}", a.heads * vd, units=a.heads, groups=a.kv_heads)
    sinks = Weight(f"{name}.sinks", (a.heads,), (f"{name}.sinks",), "vector", "f32", 0, a.heads, a.kv_heads) if a.sinks else None
    o = per_head("attended")
    ops += [*more, GqaAttention(f"{name}.attention", q, k, made["v"], o, sinks, a.heads, a.kv_heads, a.head_dim, vd, a.scale, a.softcap,
                                a.value_scale, Seen(a.window, a.chunk), spec.build.context, f"{name}.cache")]
    if a.output_norm:
        w = None if a.output_norm.weight == "none" else Weight(f"{name}.o_norm", (vd,), (f"{name}.o_norm",), "vector")
        ops.append(HeadNorm(f"{name}.o_norm", o, per_head("normed"), a.output_norm, w, vd))
        o = ops[-1].y
    if a.gate:
        ops.append(OutputGate(f"{name}.gate", o, made["g"], per_head("gated"), a.gate, vd))
        o = ops[-1].y
    last, y = out(name, o, hidden, "f32" if "o" in a.bias else "bf16")
    if "o" in a.bias:
        last.append(biased(y, f"{name}.o_bias"))
        y = last[-1].y
    return ops + last, y


def queries_and_keys(name: str, a: Gqa, q: Value, k: Value) -> tuple[list[Op], Value, Value]:
    """Norm, rotation and temperature, as far as there are any."""
    turn, norm = rotation(name, a.rope, a.head_dim), a.qk_norm
    if not (turn or norm or a.query_temperature):
        return [], q, k
    ops: list[Op] = []
    weights: list[Weight | None] = [None, None]
    squares = None
    full = norm is not None and norm.scope == "full"
    if full:
        squares = Value(f"{name}.qk_squares", 2, "f32")
        ops.append(QkSquares(f"{name}.qk_squares", q, k, squares))
    if norm is not None and norm.weight != "none":
        weights = [Weight(f"{name}.{c}_norm", (x.width if full else a.head_dim,), (f"{name}.{c}_norm",), "vector",
                          split=0 if full else None, units=x.units if full else 1, groups=x.groups if full else 0) for c, x in (("q", q), ("k", k))]
    both = lambda stage: [Value(f"{name}.{c}_{stage}", x.width, units=x.units, groups=x.groups) for c, x in (("q", q), ("k", k))]
    if a.clip and norm_in_front(a):
        normed = both("normed")
        ops.append(QkNormRope(f"{name}.qk_norm", q, k, *normed, a.head_dim, norm, *weights, squares, None, None))
        ops += [clipped(x, f"{name}.{c}_clipped", a.clip) for c, x in zip("qk", normed)]
        q, k = (op.y for op in ops[-2:])
        norm, weights, squares = None, [None, None], None
        if not (turn or a.query_temperature):
            return ops, q, k
    ops.append(QkNormRope(f"{name}.qk", q, k, *both("rope"), a.head_dim, norm, *weights, squares, turn, a.query_temperature))
    return ops, ops[-1].q_out, ops[-1].k_out


def norm_in_front(a: Gqa) -> bool:
    """Are q and k normed before they are rotated?"""
    return a.qk_norm is not None and not a.qk_norm.after_rope
