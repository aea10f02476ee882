"""The routed mixture of experts: which experts a row takes, and what they add up to."""
from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from mkgen.errors import MkgenError
from mkgen.graph.ir import Cost, Op, Value, Weight
from mkgen.graph.ops.elementwise import activate
from mkgen.spec.model import Activation, Norm, Router

LANES = 128


@dataclass(frozen=True)
class Route(Op):
    """The router's formula (spec.ffns.Router), all in float32; the largest keys are chosen, ties go to the lowest id.

    `route` [R, experts] is the weight of each expert, zero where it was not chosen; inactive rows choose none."""
    logits: Value
    route: Value
    linear_bias: Weight | None
    bias: Weight | None
    experts: int
    top_k: int
    router: Router
    kind = "route"
    rounds = "none"

    def inputs(self):
        return (self.logits,)

    def outputs(self):
        return (self.route,)

    def weights(self):
        return tuple(w for w in (self.linear_bias, self.bias) if w is not None)

    def cost(self):
        return Cost(flops=3 * self.top_k * self.experts)

    def meaning(self, env):
        r, logits = self.router, env[self.logits]
        if self.linear_bias is not None:
            logits = logits + env.w(self.linear_bias)
        logits = logits * r.logit_scale
        score = {"sigmoid": jax.nn.sigmoid, "softmax": jax.nn.softmax, "logits": lambda z: z}[r.score](logits)
        key = score if self.bias is None else score + env.w(self.bias)
        gap = jnp.full(env.rows, jnp.inf)
        if r.groups > 1:
            runs = jnp.sort(key.reshape(env.rows, r.groups, -1), axis=-1)
            best = runs[..., -1] if r.group_score == "max" else runs[..., -2:].sum(-1)
            open_groups, gap = largest(best, r.group_top_k)
            key = jnp.where(jnp.repeat(open_groups, self.experts // r.groups, axis=1), key, -jnp.inf)
        chosen, near = largest(key, self.top_k)
        chosen &= env.active[:, None]
        weight = jnp.where(chosen, score, 0.0)
        if r.after == "softmax":
            weight = jnp.where(env.active[:, None], jax.nn.softmax(jnp.where(chosen, score, -jnp.inf), axis=-1), 0.0)
        elif r.after == "sigmoid":
            weight = jnp.where(chosen, jax.nn.sigmoid(score), 0.0)
        if r.renorm:
            total = jnp.sum(weight, -1, keepdims=True) + r.renorm_eps
            weight = weight / jnp.where(env.active[:, None], total, 1.0)
        env.put(self.route, weight * r.scale)
        gap = jnp.minimum(gap, near)
        if bool(jnp.isfinite(gap).all()):
            env.note(self.name, chosen, gap)

    def lower(self, b):
        route, image = b.write(self.route), b.memory.experts[b.sub.name]
        b.together(*((w,) for w in self.weights()))
        linear_bias, bias = (None if w is None else b.vector(w) for w in (self.linear_bias, self.bias))
        formula = dict(logits=b.read(self.logits, "f32"), linear_bias=linear_bias, bias=bias, experts=self.experts, top_k=self.top_k,
                       router=self.router)
        local = f"LOCAL_EXPERTS{image.suffix.upper()}"
        if b.build.first_in_route:       # the head of the list, started before the rest of it is known
            b.step(self, "experts", "first", reads=("position_column",), writes=("expert_ids",), **formula)
            b.start(f"expert_copy{image.suffix}", "m", "index", "0", when=f"m.expert_ids[0] < {local}")
        b.step(self, "experts", "route", reads=("position_column",), writes=(route.ref[2:], "expert_words", "expert_count"),
               route=route.ref, local=local, known=b.build.first_in_route, **formula)
        b.close()


def largest(key, count: int):
    """([rows, n] bool: the `count` largest of each row, ties to the lowest index; [rows]: by how much they beat the rest)."""
    order = jnp.argsort(-key, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    if count == key.shape[-1]:
        return rank < count, jnp.full(len(key), jnp.inf)
    last, next_ = (jnp.take_along_axis(key, order[:, i:i + 1], 1)[:, 0] for i in (count - 1, count))
    return rank < count, last - next_


@dataclass(frozen=True)
class RoutedExperts(Op):
    """y = sum_e route_e f_e(x) over the chosen experts, f_e(x) = r(phi(r(x G_e), r(x U_e))) D_e, or r(phi(r(x U_e))) D_e where they
    are not gated; each product (+ its bias). Each rank adds up its own experts: a partial sum, not rounded.

    scale_input: f_e(r(route_e x)) is added as it is. norm: an expert's whole output is normed first, r(f_e) -> norm.
    apart: nothing is weighed or added: y holds f_e of a row's chosen experts side by side, by id, each padded to whole lanes
    (`MixExperts` goes on from there)."""
    x: Value
    route: Value
    y: Value
    gate: Weight | None                  # [experts, K, F]
    up: Weight
    down: Weight                         # [experts, F, D]
    gate_bias: Weight | None             # [experts, F]
    up_bias: Weight | None
    down_bias: Weight | None
    experts: int
    top_k: int
    width: int
    act: Activation
    scale_input: bool = False
    norm: Norm | None = None
    norm_weight: Weight | None = None    # [D]
    apart: bool = False
    kind = "routed_experts"
    rounds = "gate, up and phi; the output where it is normed; y to its dtype after the sum over ranks"

    def inputs(self):
        return (self.x, self.route)

    def outputs(self):
        return (self.y,)

    def matrices(self) -> tuple[Weight, ...]:
        """Of an expert, as its image has them."""
        return tuple(w for w in (self.gate, self.up, self.down) if w is not None)

    def biases(self) -> tuple[Weight, ...]:
        return tuple(w for w in (self.gate_bias, self.up_bias, self.down_bias) if w is not None)

    def weights(self):
        return (*self.matrices(), *self.biases(), *(() if self.norm_weight is None else (self.norm_weight,)))

    def gives(self, spread):
        return {self.y.name: "partial"}

    def cost(self):
        return Cost(flops=2 * self.top_k * sum(w.shape[1] * w.shape[2] for w in self.matrices()))

    def meaning(self, env):
        x, route, out = env[self.x], env[self.route], self.down.shape[-1]
        slot = -(-out // LANES) * LANES
        place = jnp.cumsum(route != 0, axis=1) - 1
        y = jnp.zeros((env.rows, self.y.width), jnp.float32)
        for e in env.chosen(route):
            weight = route[:, e:e + 1]
            f = self.expert(env, env.r(x * weight) if self.scale_input else x, e)
            if self.norm is not None:
                f = normed(env, f, self.norm, self.norm_weight)
            if self.apart:
                for j in range(self.top_k):
                    mine = (weight != 0) & (place[:, e:e + 1] == j)
                    y = y.at[:, j * slot:j * slot + out].add(jnp.where(mine, f, 0.0))
            else:
                y += jnp.where(weight != 0, f, 0.0) if self.scale_input else weight * f
        env.put(self.y, y)

    def expert(self, env, x, e):
        def product(x, w, bias):
            y = jnp.dot(x, env.expert(w, e), precision="highest")
            return y if bias is None else y + env.expert(bias, e)

        up = env.r(product(x, self.up, self.up_bias))
        h = activate(self.act, up) if self.gate is None else activate(self.act, env.r(product(x, self.gate, self.gate_bias)), up)
        return product(env.r(h), self.down, self.down_bias)

    def lower(self, b):
        image, batch = b.expert_image(self), b.build.expert_batch
        ahead, first, rows, copy = b.build.experts_ahead, b.build.experts_at_once, b.max_rows * self.top_k, f"expert_copy{image.suffix}"
        most, count, local = b.most(lambda i: i.rows), "m.expert_count[0]", f"LOCAL_EXPERTS{image.suffix.upper()}"
        at, expert = f"index * {local} + m.expert_ids[i]", "i"
        if image.pieces > 1:
            pieces = f"PIECES{image.suffix.upper()}"
            count, expert = f"{count} * {pieces}", f"lax.div(i, {pieces})"
            at = f"(index * {local} + m.expert_ids[{expert}]) * {pieces} + lax.rem(i, {pieces})"
            if self.norm is not None and not self.apart:
                raise MkgenError(f"{self.name}: an expert of {image.expert_bytes / 2**20:.1f} MiB is fetched in {image.pieces} pieces, and its output is "
                                 f"normed\n  why: the norm needs all of it at once\n  fix: raise build.expert_kib, or choose a tensor_parallel above 1")
        if batch > 1 and (obstacle := self.alone(image)):
            raise MkgenError(f"{self.name}: build.expert_batch is {batch}, and {obstacle}\n  why: the experts of a batch share one left operand, and each "
                             "lies whole in a slot\n  fix: write build.expert_batch: 1")
        if batch > 1:
            b.memory.notes.append((b.sub.name, f"{batch} experts are multiplied in one basic block"))
        b.buffer("expert_slot", (b.build.expert_slots, most, LANES), "u32", "experts, one a slot")
        b.semaphores("expert_sem", (b.build.expert_slots,), "one an expert slot")
        listed = max(min(i.local_experts, b.max_rows * b.top_k(i)) for i in b.memory.experts.values())
        b.buffer("expert_ids", (listed,), "i32", "local ids of the layer's distinct experts", space="smem")
        words = -(-image.local_experts // 32)
        if words > 32:
            raise MkgenError(f"{self.name}: {image.local_experts} experts on a rank\n  why: those that are chosen are listed by the bits of up to 32 "
                             "words, and a word says which of them are not zero\n  fix: a larger build.expert_parallel")
        lone, listing = b.lone(), ("expert_words", "expert_ids", *["taker"] * b.lone())
        words = max(-(-i.local_experts // (8 if lone else 32)) for i in b.memory.experts.values())
        b.buffer("expert_words", (1 + words,), "i32", "bits of those that are not yet in the list", space="smem")
        b.buffer("expert_count", (1,), "i32", "how many", space="smem")
        if lone:
            b.buffer("taker", (listed,), "i32", "the row that alone chose it; -7: several", space="smem")
        lines, each = (8 if image.up.group else 8 * image.fold), (batch,) * (batch > 1)
        scratch = {"products": b.expert_buffer("expert_up", (*each, lines, image.up.panels * LANES), "f32",
                                               f"{'gate | up' if image.gated else 'up'} of one expert{', of each of a batch' * (batch > 1)}")}
        for name, section, fold, of in (("expert_x", image.up, image.fold, ()), ("expert_h", image.down, 1, each)):
            scratch[name[-1]] = b.expert_operand(name, section, fold, of)
        operand = (scratch["x"], *([f"{scratch['x']}_sums"] if image.up.kind.zero else []))
        if self.norm is not None and not self.apart:
            scratch["whole"] = b.expert_buffer("expert_out", (8, image.down.panels * LANES), "f32", "output of one expert")
        target = "m.expert_slot.at[slot]" if image.rows == most else f"m.expert_slot.at[slot, pl.ds(0, {image.rows})]"
        b.transfer(copy, ("m", "index", "i"), f"m.{image.name}.at[{at}]", target,
                   "m.expert_sem.at[slot]", image.rows * 512, "Number i of the layer's list of experts, into its slot." if image.pieces == 1 else
                   "Piece i of the experts of the layer's list, into its slot.",
                   setup=("slot = lax.rem(i, EXPERT_SLOTS)",), reads=(image.name,), writes=("expert_slot",))
        chosen = b.maker(self.route)
        with b.after(chosen):
            with b.loop("first_experts", "i", f"jnp.minimum({count}, FIRST_EXPERTS)", bound=first):
                b.step(self, "experts", "take", reads=("expert_words",), writes=listing, image=image)
                b.start(copy, "m", "index", "i", when="i > 0" if b.build.first_in_route else None)
        with b.before_finish(chosen):
            b.step(self, "experts", "take_rest", reads=("expert_words",), writes=listing, image=image)
            if ahead > first:
                with b.loop("more", "i", f"jnp.minimum({count}, EXPERTS_AHEAD) - FIRST_EXPERTS", bound=ahead - first):
                    b.start(copy, "m", "index", "FIRST_EXPERTS + i")
        x = b.read(self.x, "bf16")
        y = b.write(self.y, width=None if self.apart else image.down.panels * LANES, dtype="f32")
        shared = () if self.scale_input else operand             # by all experts; where inputs are scaled, each makes its own
        b.step(self, "experts", "begin", writes=(y.ref[2:], *shared), y=y.ref, x=x if shared else None,
               operand=f"m.{scratch['x']}" if shared else None, image=image)
        weight = None if self.norm_weight is None else "norm_weight"
        if weight:                       # read once, and also by a rank that has no expert to run
            b.step(self, "experts", "norm_weight", w=b.vector(self.norm_weight))
        expert_step = dict(x=x if self.scale_input else None, route=b.ref(self.route), y=y.ref, image=image, scratch=scratch, weight=weight,
                           norm=self.norm, apart=self.top_k if self.apart else 0, **b.activation(self.act, image.gated))
        touched = dict(reads=("expert_slot", "expert_ids", *shared), writes=(y.ref[2:], *({*scratch.values(), *operand} - {*shared})))
        most = image.pieces * min(image.local_experts, rows)
        if batch > 1:
            with b.loop("expert_batch", "batch", f"lax.div({count} + EXPERT_BATCH - 1, EXPERT_BATCH)", bound=-(-most // batch)):
                with b.loop("", "j", "EXPERT_BATCH", unroll=True):
                    b.wait(copy, "m", "index", "batch * EXPERT_BATCH + j", when=f"batch * EXPERT_BATCH + j < {count}")
                b.step(self, "experts", "batch", **touched, **expert_step)
                if ahead < most:
                    with b.loop("", "j", "EXPERT_BATCH", unroll=True):
                        i = "batch * EXPERT_BATCH + j + EXPERTS_AHEAD"
                        b.start(copy, "m", "index", i, when=f"{i} < {count}")
            return
        with b.loop("routed_expert", "i", count, bound=most):
            b.wait(copy, "m", "index", "i")
            b.start(copy, "m", "index", "i + EXPERTS_AHEAD", when=f"i + EXPERTS_AHEAD < {count}")
            row = f"m.taker[{expert}]"
            ways = {"all": f"m.rows <= 2 or {row} < 0", "one": f"m.rows > 2 and {row} >= 0"} if lone else {"": None}
            for way, when in ways.items():
                b.step(self, "experts", "expert", **touched, lone=way, when=when, **expert_step)

    def alone(self, image) -> str:
        """Why its experts have to be multiplied one by one; empty if they need not."""
        return ("inputs of experts are scaled" if self.scale_input else "outputs of experts are normed" if self.norm is not None
                else "experts have biases" if self.biases()
                else f"an expert is fetched in {image.pieces} pieces" if image.pieces > 1 else "")


def normed(env, x, norm: Norm, w: Weight | None):
    """RMS norm of r(x); a weight before it makes r(r(x) (offset + w))."""
    x = env.r(x)
    if norm.weight == "before":
        x = env.r(x * (norm.offset + env.w(w)))
    x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + norm.eps)
    return x * (norm.offset + env.w(w)) if norm.weight == "after" else x


@dataclass(frozen=True)
class MixExperts(Op):
    """y = sum_j route_j norm(r(parts_j)): the outputs of a row's chosen experts, whole, normed one by one, weighed and added.

    parts [R, top_k slots]: as RoutedExperts leaves them `apart`. scaled: the weights are in the experts' inputs already."""
    parts: Value
    route: Value
    y: Value
    w: Weight | None                     # [y.width]
    top_k: int
    norm: Norm
    scaled: bool = False
    kind = "mix_experts"
    rounds = "each output, and once more behind a weight in front of the norm; y"

    def inputs(self):
        return (self.parts, self.route)

    def outputs(self):
        return (self.y,)

    def weights(self):
        return () if self.w is None else (self.w,)

    def cost(self):
        return Cost(flops=6 * self.top_k * self.y.width)

    def by_rows(self, ranks):
        """A run of a row's parts has whole parts."""
        return self.top_k % ranks == 0 and self.y.width % ranks == 0

    def gives(self, spread):
        return {self.y.name: "rows" if spread[self.parts.name] == "rows" else "whole"}

    def meaning(self, env):
        route, slot = env[self.route], self.parts.width // self.top_k
        place = jnp.cumsum(route != 0, axis=1) - 1
        y = jnp.zeros((env.rows, self.y.width), jnp.float32)
        for j in range(self.top_k):
            part = env[self.parts][:, j * slot:j * slot + self.y.width]
            weight = jnp.sum(jnp.where((place == j) & (route != 0), 1.0 if self.scaled else route, 0.0), -1, keepdims=True)
            y += weight * normed(env, part, self.norm, self.w)
        env.put(self.y, y)

    def lower(self, b):
        weight = None if self.w is None else b.vector(self.w)
        parts = b.ref(self.parts)
        by_rows = b.place(self.parts).spread == "rows"
        b.step(self, "experts", "mix_rows" if by_rows else "mix", writes=(parts[2:],), parts=parts, route=b.ref(self.route), y=b.write(self.y), top_k=self.top_k,
               slot=self.parts.width // self.top_k, width=self.y.width, norm=self.norm, weight=weight, scaled=self.scaled)
