"""Linear recurrences, composed of ops. Groups of all families are key heads: value heads stay with the one that serves them."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.kinds.common import Made, columns, out
from mkgen.graph.ops.conv import ShortConv
from mkgen.graph.ops.gated_norm import GatedNorm
from mkgen.graph.ops.linear import Linear as Product
from mkgen.graph.ops.recurrence import Recurrence
from mkgen.spec.model import Linear, Spec


def linear(name: str, a: Linear, h: Value, spec: Spec) -> Made:
    """Linear recurrence: a decaying sum of outer products a head, then norm and gate."""
    groups, hidden = a.key_heads or a.heads, h.width
    values, channels = a.heads * a.value_dim, a.key_dim if a.decay.per == "channel" else 1

    def value(role: str, of_head: int, heads: int = a.heads) -> Value:
        return Value(f"{name}.{role}", heads * of_head, units=heads, groups=groups)

    def vector(role: str, like: Value, assemble: str = "vector", label: str | None = None) -> Weight:
        return Weight(f"{name}.{label or role}", (like.width,), (f"{name}.{role}",), assemble, "f32", 0, like.units, groups)

    q, k, v = value("q", a.key_dim, groups), value("k", a.key_dim, groups), value("v", a.value_dim)
    z = value("z" if a.decay.rank else "f", channels) if a.decay.kind != "constant" else None
    g = value("gate" if a.gate.rank else "g", a.value_dim) if a.gate else None
    b = value("b", 1) if a.write == "sigmoid" else None
    ops, second = low_ranks(name, h, {"f": (a.decay.rank, z), "g": (a.gate.rank if a.gate else 0, g)})

    full = [x for x, rank in ((g, a.gate and a.gate.rank), (z, a.decay.rank)) if x is not None and not rank]
    narrow = [x for x in (b, *full) if x is not None and x is not g and x.width == a.heads]
    wide = [q, k, v, *(x for x in full if x not in narrow)]
    for xs, behind in (narrow, second), (wide, []):        # the second halves wait for the first ones: meanwhile what is narrow is made
        if not xs:
            ops += behind
            continue
        label = "".join(x.name.removeprefix(f"{name}.") for x in xs)
        ws = tuple(columns(x.name, hidden, x.width, x.units, groups=groups) for x in xs)
        ops += [Product(f"{name}.{label}", h, tuple(xs), ws), *behind]

    if a.conv:
        ys = tuple(value(f"{x.name[-1]}_conv", x.width // x.units, x.units) for x in (q, k, v))
        ws = tuple(Weight(y.name, (a.conv.taps, y.width), (y.name,), "taps", "f32", 1, y.units, groups) for y in ys)
        biases = tuple(vector(f"{c}_conv_bias", y) for c, y in zip("qkv", ys)) if a.conv.bias else ()
        ops.append(ShortConv(f"{name}.conv", (q, k, v), ys, ws, a.conv.taps, f"{name}.window", biases))
        q, k, v = ys

    o, per_head = value("recurrence", a.value_dim), value("", 1)
    if z is None:
        rule = f"lightning_decay({a.heads},{spec.model.layers})"
        decay, dt_bias = Weight(f"{name}.decay", (a.heads,), (), rule, "f32", 0, a.heads, groups), None
    else:
        decay, dt_bias = vector("a_log", per_head, "exp", "a"), vector("dt_bias", z)
    skip = vector("d", per_head) if a.skip else None
    ops.append(Recurrence(o.name, q, k, v, z, b, o, decay, dt_bias, skip, a, f"{name}.matrix"))
    if a.norm or a.gate:
        y, w, size = value("gated", a.value_dim), None, a.value_dim
        if a.norm and a.norm.scope == "head":
            w = Weight(f"{name}.o_norm", (a.value_dim,), (f"{name}.o_norm",), "vector", "f32")
        elif a.norm:
            w, size = vector("o_norm", o), values // a.norm.groups
        bias = vector("g_bias", o) if a.gate and a.gate.bias else None
        ops.append(GatedNorm(f"{name}.gated_norm", o, g, y, w, bias, size, a.norm, a.gate))
        o = y
    last, y = out(name, o, hidden)
    return ops + last, y


def low_ranks(name: str, h: Value, ends: dict[str, tuple[int, Value | None]]) -> tuple[list[Op], list[Op]]:
    """Projections through a bottleneck, role -> (rank, result): the first halves in one product; each second half."""
    used = {role: end for role, end in ends.items() if end[0]}
    if not used:
        return [], []
    inner = [Value(f"{name}.{role}_a", rank, units=rank) for role, (rank, _) in used.items()]
    first: list[Op] = [Product(f"{name}.{''.join(used)}_a", h, tuple(inner), tuple(columns(x.name, h.width, x.width) for x in inner))]
    second: list[Op] = [Product(f"{name}.{role}_b", x, (y,), (columns(f"{name}.{role}_b", rank, y.width, y.units, groups=y.groups),))
                        for x, (role, (rank, y)) in zip(inner, used.items())]
    return first, second
