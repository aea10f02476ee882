"""Feed-forward kinds, composed of ops."""
from __future__ import annotations

from mkgen.graph.ir import Op, Value, Weight
from mkgen.graph.kinds.common import Made, columns, rows
from mkgen.graph.ops.bias import biased
from mkgen.graph.ops.elementwise import Add, GatedActivation, PlainActivation, TokenGate
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.moe import LANES, MixExperts, Route, RoutedExperts
from mkgen.graph.ops.norm import norm
from mkgen.spec.model import Activation, Mlp, Moe, Norm, Spec


def feed_forward(name: str, x: Value, width: int, gated: bool, act: Activation, prefix: str = "", dtype: str = "bf16",
                 bias: bool = False) -> Made:
    """down(phi(gate, up)), or down(phi(up)); each product perhaps with a bias."""
    made = "f32" if bias else "bf16"
    ins = tuple(Value(f"{name}.{prefix}{c}", width, made, width, width) for c in (("gate", "up") if gated else ("up",)))
    h = Value(f"{name}.{prefix}act", width, units=width, groups=width)
    y = Value(f"{name}.{prefix}out", x.width, "f32" if bias else dtype)
    ws = tuple(columns(v.name, x.width, width, groups=width) for v in ins)
    ops: list[Op] = [Linear(f"{name}.{prefix}{'gate_up' if gated else 'up'}", x, ins, ws)]
    if bias:
        added = [biased(v, f"{v.name}_bias") for v in ins]
        ops, ins = ops + added, tuple(op.y for op in added)
    ops.append((GatedActivation if gated else PlainActivation)(h.name, *ins, h, act))
    ops.append(Linear(f"{name}.{prefix}down", h, (y,), (rows(f"{name}.{prefix}down", h, x.width),), along="rows"))
    if bias:
        ops.append(biased(y, f"{name}.{prefix}down_bias", dtype=dtype))
        y = ops[-1].y
    return ops, y


def mlp(name: str, f: Mlp, h: Value, spec: Spec) -> Made:
    """MLP."""
    return feed_forward(name, h, f.width, f.gated, f.activation, bias=f.bias)


def moe(name: str, f: Moe, h: Value, spec: Spec) -> Made:
    """Routed experts, each distinct one fetched once; optional latent width and shared expert."""
    hidden, wide = h.width, f.latent or h.width
    logits = Value(f"{name}.router_logits", f.experts, "f32", units=f.experts)
    ops: list[Op] = [Linear(f"{name}.router", h, (logits,), (columns(f"{name}.router", hidden, f.experts),))]
    x = h
    if f.latent:
        x = Value(f"{name}.latent_in", wide, units=wide)
        ops.append(Linear(f"{name}.latent_down", h, (x,), (columns(f"{name}.latent_down", hidden, wide),)))
        x = normed(ops, name, "latent_input_norm", f.latent_input_norm, x)
    linear_bias, bias = (vector(name, role, f.experts) if on else None
                         for role, on in (("router_linear_bias", f.router.linear_bias), ("router_bias", f.router.bias)))
    route = Value(f"{name}.route", f.experts, "f32")
    ops.append(Route(f"{name}.route", logits, route, linear_bias, bias, f.experts, f.top_k, f.router))
    shared = None
    if f.shared_width:
        body, shared = feed_forward(name, h, f.shared_width, f.gated, f.activation, "shared_", "f32")
        ops += body
        if f.shared_gate:
            gated = Value(f"{name}.shared_gated", hidden, "f32")
            w = Weight(f"{name}.shared_scale", (hidden,), (f"{name}.shared_scale",), "vector")
            ops.append(TokenGate(f"{name}.shared_scale", shared, h, gated, w))
            shared = gated
    y = routed(ops, name, f, x, route, "bf16" if f.latent or not f.shared_width else "f32", spec.build.tensor_parallel)
    if f.latent:
        y = normed(ops, name, "latent_norm", f.latent_norm, y)
        up_y = Value(f"{name}.routed_out", hidden, "f32" if shared else "bf16", units=hidden)
        ops.append(Linear(f"{name}.latent_up", y, (up_y,), (columns(f"{name}.latent_up", wide, hidden),)))
        y = up_y
    if shared:
        total = Value(f"{name}.out", hidden, "bf16" if f.latent else "f32")   # one sum over ranks for both
        ops.append(Add(f"{name}.sum", y, shared, total, f.shared_multiplier))
        y = total
    return ops, y


def routed(ops: list[Op], name: str, f: Moe, x: Value, route: Value, dtype: str, tensor_parallel: int) -> Value:
    """The sum of the chosen experts. A norm of an expert's output needs all of it: where ranks share an expert, the outputs are
    reduced one by one before they are normed and mixed."""
    shapes = {"gate": (x.width, f.width), "up": (x.width, f.width), "down": (f.width, x.width)}
    family = lambda role, shape, rule, dtype: Weight(f"{name}.{role}", (f.experts, *shape), (f"{name}.{role}",), rule, dtype)
    there = {c: f.gated or c != "gate" for c in shapes}
    matrices = [family(f"expert_{c}", s, "linear", "bf16") if there[c] else None for c, s in shapes.items()]
    biases = [family(f"expert_{c}_bias", s[1:], "vector", "f32") if there[c] and f.bias else None for c, s in shapes.items()]
    y = Value(f"{name}.routed", x.width, dtype)
    norm = f.expert_norm
    w = vector(name, "expert_norm", x.width) if norm is not None and norm.weight != "none" else None
    sizes, scaled = (f.experts, f.top_k, f.width, f.activation), f.router.scale_input
    if norm is None or tensor_parallel == 1:
        ops.append(RoutedExperts(f"{name}.experts", x, route, y, *matrices, *biases, *sizes, scaled, norm, w))
        return y
    parts = Value(f"{name}.parts", f.top_k * -(-x.width // LANES) * LANES, "f32")
    ops.append(RoutedExperts(f"{name}.experts", x, route, parts, *matrices, *biases, *sizes, scaled, apart=True))
    ops.append(MixExperts(f"{name}.mix", parts, route, y, w, f.top_k, norm, scaled))
    return y


def vector(name: str, role: str, width: int) -> Weight:
    return Weight(f"{name}.{role}", (width,), (f"{name}.{role}",), "vector", "f32")


def normed(ops: list[Op], name: str, role: str, n: Norm | None, x: Value) -> Value:
    """x behind a norm, if there is one."""
    if n is None:
        return x
    y = Value(f"{x.name}_norm", x.width)
    ops.append(norm(f"{name}.{role}", x, y, n, dtype="f32"))
    return y
