"""The routed mixture of experts: which experts a row takes, and what they add up to."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.graph.ops.elementwise import activate
from mkgen.spec.model import Activation


@dataclass(frozen=True)
class Route(Op):
    """score(logits) -> top_k of score + bias (ties to the lowest id) -> weights = score -> renorm -> scale. All float32.

    `weights` [R, experts] is zero where an expert was not chosen; inactive rows choose none."""
    logits: Value
    route: Value
    bias: Weight | None
    experts: int
    top_k: int
    score: str
    renorm: bool
    scale: float
    kind = "route"
    rounds = "none"

    def inputs(self):
        return (self.logits,)

    def outputs(self):
        return (self.route,)

    def weights(self):
        return () if self.bias is None else (self.bias,)

    def cost(self):
        return Cost(flops=3 * self.top_k * self.experts)

    def meaning(self, env):
        logits = env[self.logits]
        score = jax.nn.sigmoid(logits) if self.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
        pick = score if self.bias is None else score + env.w(self.bias)
        order = jnp.argsort(-pick, axis=-1, stable=True)
        rank = jnp.argsort(order, axis=-1)
        chosen = (rank < self.top_k) & env.active[:, None]
        weight = jnp.where(chosen, score, 0.0)
        if self.renorm:
            weight = weight / jnp.where(env.active[:, None], jnp.sum(weight, -1, keepdims=True), 1.0)
        env.put(self.route, weight * self.scale)
        gap = jnp.take_along_axis(pick, order[:, self.top_k - 1:self.top_k], 1)
        if self.top_k < self.experts:
            env.note(self.name, chosen, (gap - jnp.take_along_axis(pick, order[:, self.top_k:self.top_k + 1], 1))[:, 0])

    def lower(self, b):
        route = b.write(self.route)
        b.step(self, "experts", "route", reads=("position_column",), writes=(route.ref[2:], "wanted", "expert_count"), logits=b.read(self.logits, "f32"), bias=None if self.bias is None else b.vector(self.bias),
               route=route.ref, experts=self.experts, top_k=self.top_k, score=self.score, renorm=self.renorm, scale=self.scale)
        b.close()


@dataclass(frozen=True)
class RoutedExperts(Op):
    """y = sum_e route_e * (r(phi(r(x G_e), r(x U_e))) D_e) over the chosen experts; each rank adds up its own: a partial sum, not rounded."""
    x: Value
    route: Value
    y: Value
    gate: Weight                         # [experts, K, F]
    up: Weight
    down: Weight                         # [experts, F, D]
    experts: int
    top_k: int
    width: int
    act: Activation
    kind = "routed_experts"
    rounds = "gate, up and phi; y to its dtype after the sum over ranks"

    def inputs(self):
        return (self.x, self.route)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return (self.gate, self.up, self.down)

    def gives(self, spread):
        return {self.y.name: "partial"}

    def cost(self):
        return Cost(flops=2 * self.top_k * sum(w.shape[1] * w.shape[2] for w in self.weights()))

    def meaning(self, env):
        x, route = env[self.x], env[self.route]
        y = jnp.zeros((env.rows, self.y.width), jnp.float32)
        for e in env.chosen(route):
            g, u = (env.r(jnp.dot(x, env.expert(w, e), precision="highest")) for w in (self.gate, self.up))
            h = env.r(activate(self.act, g, u))
            y += route[:, e:e + 1] * jnp.dot(h, env.expert(self.down, e), precision="highest")
        env.put(self.y, y)

    def lower(self, b):
        image = b.expert_image(self)
        slots, rows = b.build.expert_slots, b.max_rows * self.top_k
        b.buffer("expert_slot", (slots, image.rows, 128), "u32", "experts, one a slot")
        b.semaphores("expert_sem", (slots,), "one an expert slot")
        b.buffer("expert_ids", (min(image.local_experts, rows),), "i32", "local ids of the layer's distinct experts", space="smem")
        b.buffer("expert_count", (1,), "i32", "how many", space="smem")
        b.buffer("wanted", (1, self.experts), "f32", "local ids of experts not yet in the list")
        b.buffer("expert_gate_up", (8, 2 * image.width_padded), "f32", "gate | up of one expert")
        for name, k in (("expert_x", image.up.k), ("expert_h", image.down.k)):
            terms = 2 if b.build.activations == "f32" else 1
            shape = (-(-k // 256), 64 * terms, 256) if image.format == "mxfp4" else (8, k)
            b.buffer(name, shape, "bf16" if terms == 1 or len(shape) == 3 else "f32", "left operand" + (", block-diagonal" if len(shape) == 3 else ""))
        b.transfer("expert_copy", ("m", "index", "i"), "m.experts.at[index * LOCAL_EXPERTS + m.expert_ids[i]]", "m.expert_slot.at[slot]",
                   "m.expert_sem.at[slot]", image.rows * 512, "Number i of the layer's list of experts, into its slot.",
                   setup=("slot = lax.rem(i, EXPERT_SLOTS)",), reads=("experts",), writes=("expert_slot",))
        count = "m.expert_count[0]"
        with b.after(b.maker(self.route)):
            with b.loop("first_experts", "i", f"jnp.minimum({count}, EXPERT_SLOTS)", bound=slots):
                b.step(self, "experts", "take", reads=("wanted",), writes=("wanted", "expert_ids"))
                b.start("expert_copy", "m", "index", "i")
        y = b.write(self.y, width=image.down.panels * 128, dtype="f32")
        b.step(self, "experts", "begin", writes=(y.ref[2:], "expert_x"), x=b.read(self.x, "bf16"), pad=image.up.k - image.k, y=y.ref, mxfp4=image.format == "mxfp4")
        b.step(self, "experts", "take_rest", reads=("wanted",), writes=("wanted", "expert_ids"), slots="EXPERT_SLOTS")
        with b.loop("routed_expert", "i", count, bound=min(image.local_experts, rows)):
            b.wait("expert_copy", "m", "index", "i")
            b.step(self, "experts", "expert", reads=("expert_slot", "expert_ids", "expert_x"), writes=(y.ref[2:], "expert_gate_up", "expert_h"), route=b.ref(self.route), y=y.ref, image=image, activation=b.activation(self.act))
            b.start("expert_copy", "m", "index", "i + EXPERT_SLOTS", when=f"i + EXPERT_SLOTS < {count}")
