"""spec -> graph: one sub-layer a kind, composed from the axes of the spec."""
from __future__ import annotations

from mkgen.graph.ir import LayerGraph, Op, SubLayer, Value, Weight
from mkgen.graph.kinds import FFNS, MIXERS
from mkgen.graph.ops.elementwise import ResidualAdd
from mkgen.graph.ops.ends import Embed, Enter, Greedy
from mkgen.graph.ops.linear import Linear
from mkgen.graph.ops.mixture import BlockAdd, BlockMixture
from mkgen.graph.ops.norm import norm
from mkgen.graph.ops.rope import tables
from mkgen.spec.model import Model, Spec


def build_graph(spec: Spec) -> LayerGraph:
    """The layer graph of a valid spec."""
    model = spec.model
    stream = Stream(model)
    used = {run.mixer for run in model.schedule}, {run.ffn for run in model.schedule}
    mixers = {n: stream.sublayer(n, "mixer", MIXERS, k, spec) for n, k in model.mixers.items() if n in used[0]}
    ffns = {n: stream.sublayer(n, "ffn", FFNS, k, spec) for n, k in model.ffns.items() if n in used[1]}
    return LayerGraph(begin=stream.begin(mixers), mixers=mixers, ffns=ffns, end=stream.end(),
                      layers=tuple((run.mixer, run.ffn) for run in model.schedule), facts=stream.facts())


class Stream:
    """The residual stream: what a sub-layer reads, and how its result goes back."""

    def __init__(self, model: Model):
        self.model = model
        self.x = Value("running", model.hidden, "bf16", carried=True)
        self.mixes = model.residual.kind == "block_softmax"
        planes = -(-model.layers // model.residual.block) if self.mixes else 0
        self.snapshots = Value("snapshots", model.hidden, "bf16", carried=True, planes=planes) if self.mixes else None

    def mixture(self, where: str, y: Value, fact: str | None) -> BlockMixture:
        w = Weight(f"residual.{where}", (self.model.hidden,), (f"residual.{where}_norm", f"residual.{where}_proj"), "product", "f32")
        return BlockMixture(f"{where}_mixture", self.x, self.snapshots, y, w, self.model.residual.eps, fact)

    def read(self, name: str, where: str, role: str, fact: str | None) -> tuple[list[Op], Value]:
        """The normed input of a sub-layer."""
        ops, x = [], self.x
        if self.mixes:
            x = Value(f"{name}.mix", self.model.hidden)
            ops.append(self.mixture(where, x, fact))
        h = Value(f"{name}.h", self.model.hidden)
        ops.append(norm(f"{name}.norm", x, h, self.model.norm, role))
        return ops, h

    def sublayer(self, name: str, role: str, kinds: dict, kind, spec: Spec) -> SubLayer:
        ops, h = self.read(name, role, f"{role}.norm", f"{role}_snapshots" if self.mixes else None)
        make = kinds[type(kind)]
        body, out = make(name, kind, h, spec)
        ops += body
        if self.mixes:
            opens = ("opens_block", "block") if role == "mixer" else (None, None)
            ops.append(BlockAdd(f"{name}.add", self.x, self.snapshots, out, *opens))
        else:
            ops.append(ResidualAdd(f"{name}.add", self.x, out))
        return SubLayer(name, role, tuple(ops), doc=(make.__doc__ or "").strip().split("\n")[0])

    def begin(self, mixers: dict[str, SubLayer]) -> SubLayer:
        table = Weight("embed", (self.model.vocab, self.model.hidden), ("embed",), "rows", split=0, units=self.model.vocab)
        x = Value("embedded", self.model.hidden, "f32")
        turned = {name: op.rotation for name, sub in mixers.items() for op in sub.ops if getattr(op, "rotation", None)}
        doc = "Embedding rows of the tokens" + ("; how far each kind's heads are turned." if turned else ".")
        return SubLayer("begin", "begin", (*tables(turned), Embed("embed", x, table), Enter("enter", x, self.x)), doc=doc)

    def end(self) -> SubLayer:
        model = self.model
        ops, h = self.read("end", "out", "norm", None)
        role = "embed" if model.tied_head else "head"
        w = Weight("head", (model.hidden, model.vocab), (role,), "linear", split=1, units=model.vocab)
        logits = Value("logits", model.vocab, "f32", units=model.vocab)
        ops.append(Linear("head", h, (logits,), (w,)))
        ops.append(Greedy("greedy", logits, Value("token", 1, "i32")))
        return SubLayer("end", "end", tuple(ops), doc="Final norm, logits of this rank's vocabulary, greedy token.")

    def facts(self) -> dict[str, tuple[int, ...]]:
        """Per-layer data of the residual scheme: how many snapshots are live, where a block opens, and which."""
        if not self.mixes:
            return {}
        size, layers = self.model.residual.block, range(self.model.layers)
        return {"mixer_snapshots": tuple(0 if n == 0 else (n - 1) // size + 1 for n in layers),
                "ffn_snapshots": tuple(n // size + 1 for n in layers),
                "opens_block": tuple(int(n % size == 0) for n in layers), "block": tuple(n // size for n in layers)}
