"""Feed-forward kinds, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.kinds.common import Made, columns, rows
from mkgen.graph.ops.elementwise import Add, GatedActivation
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.moe import Route, RoutedExperts
from mkgen.graph.ops.norm import norm
from mkgen.spec.model import Mlp, Moe, Spec


def gated_mlp(name: str, x: Value, width: int, act, hidden: int, prefix: str = "", dtype: str = "bf16") -> Made:
    gate, up = (Value(f"{name}.{prefix}{c}", width, units=width, groups=width) for c in ("gate", "up"))
    h = Value(f"{name}.{prefix}act", width, units=width, groups=width)
    y = Value(f"{name}.{prefix}out", hidden, dtype)
    return [Linear(f"{name}.{prefix}gate_up", x, (gate, up), tuple(columns(v.name, x.width, width, groups=width) for v in (gate, up))),
            GatedActivation(f"{name}.{prefix}act", gate, up, h, act),
            Linear(f"{name}.{prefix}down", h, (y,), (rows(f"{name}.{prefix}down", h, hidden),), along="rows")], y


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
        ops.append(norm(f"{name}.latent_norm", y, n, f.latent_norm, dtype="f32"))
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
