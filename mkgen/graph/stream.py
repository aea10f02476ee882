"""The residual stream and the ends of the model: what a sub-layer reads, and how its result goes back."""
from __future__ import annotations

from dataclasses import fields, replace

from mkgen.graph.ir import Op, SubLayer, Value, Weight
from mkgen.graph.kinds.told import told
from mkgen.graph.ops.ends import Embed, Enter, FinishLogits, Greedy
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.mixture import BlockMixture, WeighPast
from mkgen.graph.ops.norm import norm
from mkgen.graph.ops.residual import AddBranch, GatedAdd, KeepBranch, ResidualAdd, Round
from mkgen.graph.ops.rope import tables
from mkgen.spec.model import Model, Norm, Spec
from mkgen.spec.roles import post_norm


class Stream:
    def __init__(self, model: Model):
        self.model, self.residual = model, model.residual
        hidden, kind, dtype = model.hidden, model.residual.kind, model.residual.dtype
        self.x = Value("running", hidden, dtype, carried=True)
        self.mixes, self.parallel = kind == "block_softmax", kind == "parallel"
        planes = -(-model.layers // model.residual.block) if self.mixes else 0
        self.snapshots = Value("snapshots", hidden, dtype, carried=True, planes=planes) if self.mixes else None
        self.past = Value("past", hidden, "f32", carried=True)
        self.sums = Value("past_sums", 3 * 128, "f32", carried=True)
        self.normed = Value("normed", hidden, carried=True)                    # parallel: the input of both branches,
        self.branch = Value("branch", hidden, "f32", carried=True, partial=True)     # and what the mixer made of it

    def value(self, name: str, dtype: str = "bf16") -> Value:
        return Value(name, self.model.hidden, dtype)

    def vector(self, role: str, dtype: str = "bf16") -> Weight:
        return Weight(role, (self.model.hidden,), (role,), "vector", dtype)

    def weigh(self, name: str, *facts: str) -> list[WeighPast]:
        """What every sub-layer does for the mixture of the next one."""
        return [WeighPast(f"{name}.past", self.x, self.snapshots, self.past, self.sums, self.residual.eps, *facts)] if self.mixes else []

    def read(self, name: str, where: str, role: str, n: Norm | None) -> tuple[list[Op], Value]:
        """The input of a sub-layer: the stream (or its mixture), normed by n if there is one, as bf16."""
        if self.mixes:
            w = Weight(f"residual.{where}", (self.model.hidden,), (f"residual.{where}_norm", f"residual.{where}_proj"), "product", "f32")
            mixture = BlockMixture(f"{where}_mixture", self.x, self.past, self.sums, self.value(f"{name}.mix"), w, self.residual.eps)
            if n is not None and (n.kind, n.weight, n.bias) == ("rms", "after", False):
                h = self.value(f"{name}.h")
                return [replace(mixture, y=h, norm=n, gain=self.vector(role))], h
            ops, x = [mixture], mixture.y
        else:
            ops, x = [], self.x
        if n is None and x.dtype == "bf16":
            return ops, x
        h = self.normed if self.parallel and where == "mixer" else self.value(f"{name}.h")
        return [*ops, Round(f"{name}.round", x, h) if n is None else norm(f"{name}.norm", x, h, n, role)], h

    def sublayer(self, name: str, role: str, kinds: dict, kind, spec: Spec) -> SubLayer:
        first = None if "pre" not in self.residual.norms else self.model.norm
        if self.parallel and role == "ffn":
            ops, h = [], self.normed
        else:
            ops, h = self.read(name, role, f"{role}.norm", first)
        body, out = kinds[type(kind)](name, kind, h, spec)
        return SubLayer(name, role, (*ops, *self.write(name, role, body, h, out)), doc=told(kind))

    def write(self, name: str, role: str, body: list[Op], h: Value, out: Value) -> list[Op]:
        """The ops of a sub-layer, and those that bring its result back to the stream."""
        r = self.residual
        if "post" in r.norms:
            post = self.value(f"{name}.post")
            body, out = [*body, norm(f"{name}.post_norm", out, post, post_norm(self.model, role), f"{role}.post_norm")], post
        add = f"{name}.add"
        if r.kind == "block_softmax":
            body = [*body, *self.weigh(name, "snapshots", *(("opens_block",) if role == "mixer" else ()))]
        if r.kind == "alpha_beta":
            return [*body, ResidualAdd(add, self.x, out, h, r.alpha.get(name, 1.0), r.beta.get(name, 1.0))]
        if r.kind == "gated":
            return [*body, GatedAdd(add, self.x, out, self.vector(f"{role}.gate", "f32"), r.temperature)]
        if r.kind == "parallel":
            body, out = unrounded(body, out)
            if role == "mixer":
                return [*body, KeepBranch(f"{name}.keep", out, self.branch)]
            both = self.value(f"{name}.both", "f32")
            body, out = [*body, AddBranch(f"{name}.both", self.branch, out, both)], both
        return [*body, ResidualAdd(add, self.x, out, self.x, 1.0, r.multiplier)]

    def begin(self, mixers: dict[str, SubLayer]) -> SubLayer:
        model = self.model
        turned = {name: op.rotation for name, sub in mixers.items() for op in sub.ops if getattr(op, "rotation", None)}
        doc = "Embedding rows of the tokens" + ("; how far each kind's heads are turned." if turned else ".")
        table = Weight("embed", (model.vocab, model.hidden), ("embed",), "rows", split=0, units=model.vocab)
        x = self.value("embedded", "f32")
        ops: list[Op] = [*tables(turned), Embed("embed", x, table)]
        if model.embed_norm is None:
            ops.append(Enter("enter", x, self.x, model.embed_scale))
        else:
            if model.embed_scale != 1.0:
                scaled = self.value("embed_scaled", "f32")
                ops.append(Enter("embed_scale", x, scaled, model.embed_scale))
                x = scaled
            ops.append(norm("embed_norm", x, self.x, model.embed_norm))
        ops += self.weigh("begin")
        return SubLayer("begin", "begin", tuple(ops), doc=doc)

    def end(self) -> SubLayer:
        model = self.model
        ops, h = self.read("end", "out", "norm", model.final_norm or model.norm)
        role, vocab = "embed" if model.tied_head else "head", model.vocab
        w = Weight("head", (model.hidden, vocab), (role,), "linear", split=1, units=vocab)
        logits = Value("logits", vocab, "f32", units=vocab)
        ops.append(Linear("head", h, (logits,), (w,)))
        if model.head_bias or model.logit_scale != 1.0 or model.logit_softcap:
            bias = Weight("head_bias", (vocab,), ("head_bias",), "vector", "f32", 0, vocab) if model.head_bias else None
            ops.append(FinishLogits("finish_logits", logits, bias, model.logit_scale, model.logit_softcap))
        ops.append(Greedy("greedy", logits, Value("token", 1, "i32"), model.usable_vocab or vocab))
        return SubLayer("end", "end", tuple(ops), doc="Final norm, logits of this rank's vocabulary, greedy token.")

    def facts(self) -> dict[str, tuple[int, ...]]:
        """Per-layer data of the residual scheme: how many snapshots there are behind the mixer, and where a block opens."""
        if not self.mixes:
            return {}
        size, layers = self.residual.block, range(self.model.layers)
        return {"snapshots": tuple(n // size + 1 for n in layers), "opens_block": tuple(int(n % size == 0) for n in layers)}


def unrounded(body: list[Op], out: Value) -> tuple[list[Op], Value]:
    """The same ops with their result kept in float32, so that it can stay a partial sum."""
    wide = replace(out, dtype="f32")

    def swap(x):
        return wide if x == out else tuple(map(swap, x)) if isinstance(x, tuple) else x

    def rewritten(op: Op) -> Op:
        changed = {f.name: swap(getattr(op, f.name)) for f in fields(op)}
        return replace(op, **{n: x for n, x in changed.items() if x != getattr(op, n)})

    return [rewritten(op) if out in op.outputs() else op for op in body], wide
