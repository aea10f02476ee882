"""The whole decode step of a spec in plain JAX, unrolled or as a loop over its layers' period."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mkgen.spec.model import Gqa, Linear, Mla, Mlp, Norm, Residual, Spec
from rival.arrays import AXES, Leaf, dtype_of, vector
from rival.layers import Part, Setup, State, gqa, linear, mla, mlp, need, product, rms, total
from rival.moe import moe

MIXERS = {Gqa: gqa, Mla: mla, Linear: linear}
FORMS = ("unrolled", "loop")


@dataclass(frozen=True)
class Nest:
    """Layers before the loop, layers of one turn, turns; the rest comes after it."""

    before: int
    period: int
    turns: int


@dataclass(frozen=True)
class Rival:
    """One program. expert_parallel: how many groups of ranks the experts go over (None: as the spec's build has it)."""

    spec: Spec
    rows: int
    context: int
    form: str = "unrolled"
    expert_parallel: int | None = None
    exact: bool = False
    masked_write: bool = False

    def __post_init__(self):
        m = self.spec.model
        need(self.form in FORMS, f"form {self.form}: one of {FORMS}")
        plain = Residual(m.residual.kind, block=m.residual.block, eps=m.residual.eps)
        need(m.residual == plain and m.residual.kind in ("add", "block_softmax"), f"residual {m.residual}")
        need(replace(m.norm, eps=0.0, offset=0.0) == Norm(eps=0.0), f"norm {m.norm}")
        need(
            (
                m.final_norm,
                m.embed_scale,
                m.embed_norm,
                m.tied_head,
                m.head_bias,
                m.logit_scale,
                m.logit_softcap,
                m.usable_vocab,
            )
            == (None, 1.0, None, False, False, 1.0, 0.0, 0),
            "an end of the model that is not plain",
        )
        need(m.vocab % self.setup.ranks == 0, f"{m.vocab} tokens over {self.setup.ranks} ranks")

    # -- arrays --------------------------------------------------------------------------------------------------------

    @cached_property
    def setup(self) -> Setup:
        ranks = self.spec.build.ranks
        ep = self.expert_parallel or self.spec.build.expert_parallel
        return Setup(
            self.spec.model.hidden,
            ep,
            ranks // ep,
            self.rows,
            self.context,
            self.exact,
            self.masked_write,
            padded=self.form == "loop",
        )

    def mesh(self, devices) -> Mesh:
        s = self.setup
        return Mesh(np.asarray(devices[: s.ranks]).reshape(s.ep, s.tp), AXES)

    @cached_property
    def parts(self) -> dict[tuple[str, str], Part]:
        """By (role, kind): with the arrays of the norm in front and of the residual's mixture."""
        model, parts = self.spec.model, {}
        fp8 = self.spec.build.formats.get("experts", "bf16") != "bf16"
        for name, kind in model.mixers.items():
            parts["mixer", name] = self._framed("mixer", MIXERS[type(kind)](name, kind, self.setup))
        for name, kind in model.ffns.items():
            made = mlp(name, kind, self.setup) if isinstance(kind, Mlp) else moe(name, kind, self.setup, fp8)
            parts["ffn", name] = self._framed("ffn", made)
        return parts

    def _framed(self, role: str, part: Part) -> Part:
        more = {"norm": vector(f"{role}.norm", self.spec.model.hidden)}
        if self.mixes:
            more["mixture"] = vector(f"residual.{role}", self.spec.model.hidden)
        return replace(part, leaves=part.leaves | more)

    @property
    def mixes(self) -> bool:
        return self.spec.model.residual.kind == "block_softmax"

    @cached_property
    def nest(self) -> Nest:
        """The loop that leaves the fewest layers in the program's text."""
        kinds, best = [(run.mixer, run.ffn) for run in self.spec.model.schedule], None
        for before in range(min(len(kinds), 8)):
            for period in range(1, min(len(kinds) - before, 16) + 1):
                turns = 1
                while (
                    kinds[before + turns * period :][:period] == kinds[before : before + period]
                    and len(kinds) >= before + (turns + 1) * period
                ):
                    turns += 1
                left = before + period + len(kinds) - before - period * turns
                if turns > 1 and (best is None or left < best[0]):
                    best = left, Nest(before, period, turns)
        need(best is not None, "a schedule that repeats nothing")
        return best[1]

    def layer_leaves(self, layer: int) -> dict[str, Leaf]:
        run = self.spec.model.schedule[layer]
        return {
            f"{role}.{n}": leaf
            for role, kind in (("mixer", run.mixer), ("ffn", run.ffn))
            for n, leaf in self.parts[role, kind].leaves.items()
        }

    def layer_states(self, layer: int) -> dict[str, State]:
        return self.parts["mixer", self.spec.model.schedule[layer].mixer].states

    def ends(self) -> dict[str, Leaf]:
        m = self.spec.model
        leaves = {
            "embed": Leaf((m.vocab, m.hidden), P(AXES, None), "act", lambda get: get("embed"), "rows"),
            "norm": vector("norm", m.hidden),
            "head": Leaf((m.hidden, m.vocab), P(None, AXES), "act", lambda get: get("head")),
        }
        return leaves | ({"mixture": vector("residual.out", m.hidden)} if self.mixes else {})

    def arranged(self, of_layer) -> dict:
        """Per-layer things as the form wants them: a list, or lists before and after and stacks (lists of turns) of a loop."""
        layers = range(self.spec.model.layers)
        if self.form == "unrolled":
            return {"layers": [of_layer(n) for n in layers]}
        n = self.nest
        last = n.before + n.period * n.turns
        return {
            "before": [of_layer(k) for k in range(n.before)],
            "loop": [[of_layer(n.before + p + t * n.period) for t in range(n.turns)] for p in range(n.period)],
            "after": [of_layer(k) for k in layers[last:]],
        }

    def tree(self, of_layer, stack) -> dict:
        """`arranged`, with each stack's turns put together by `stack`, name by name."""
        made = self.arranged(of_layer)
        if "loop" in made:
            made["loop"] = [{k: stack([turn[k] for turn in turns]) for k in turns[0]} for turns in made["loop"]]
        return made

    def weights(self, one) -> dict:
        """one(leaf, layer) for each array, in the form of the step's first argument."""
        layers = self.tree(lambda n: {k: one(leaf, n) for k, leaf in self.layer_leaves(n).items()}, stacked)
        return {"ends": {k: one(leaf, 0) for k, leaf in self.ends().items()}, **layers}

    def states(self, one) -> dict:
        """one(state) for each, in the form of the step's second argument."""
        return self.tree(lambda n: {k: one(state) for k, state in self.layer_states(n).items()}, stacked)

    def abstract(self, mesh: Mesh):
        """The step's arguments as shapes."""

        def make(x: Leaf | State, *_):
            return jax.ShapeDtypeStruct(x.shape, dtype_of(x.dtype, self.exact), sharding=NamedSharding(mesh, x.spec))

        whole = NamedSharding(mesh, P())
        tokens, positions = (jax.ShapeDtypeStruct((self.rows,), jnp.int32, sharding=whole) for _ in range(2))
        return self.weights(make), self.states(make), tokens, positions

    # -- the step ------------------------------------------------------------------------------------------------------

    def make_step(self, mesh: Mesh):
        """step(weights, states, tokens [B], positions [B]) -> (tokens [B], logits [B, vocab] sharded, states); states are
        donated."""
        spec_of = lambda x, *_: x.spec
        in_specs = self.weights(spec_of), self.states(spec_of), P(), P()
        out_specs = P(), P(None, AXES), in_specs[1]
        step = jax.shard_map(self.step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return jax.jit(step, donate_argnums=(1,))

    def step(self, weights, states, tokens, positions):
        x = self.embed(weights["ends"], tokens)
        stream = (x, self.no_snapshots(x))
        if self.form == "unrolled":
            stream, new = self.run(range(self.spec.model.layers), weights["layers"], states["layers"], stream, positions)
            states = {"layers": new}
        else:
            n = self.nest
            stream, before = self.run(range(n.before), weights["before"], states["before"], stream, positions)
            stream, loop = self.turns(weights["loop"], states["loop"], stream, positions)
            last = range(n.before + n.period * n.turns, self.spec.model.layers)
            stream, after = self.run(last, weights["after"], states["after"], stream, positions)
            states = {"before": before, "loop": loop, "after": after}
        with jax.named_scope("ends"):
            return *self.finish(weights["ends"], stream), states

    def run(self, layers, weights, states, stream, positions):
        """Layer after layer; scopes name them in what XLA prints."""
        out = []
        for layer, w, state in zip(layers, weights, states):
            with jax.named_scope(f"layer_{layer}"):
                stream, state = self.layer(self.spec.model.schedule[layer], layer, w, state, stream, positions)
            out.append(state)
        return stream, out

    def turns(self, weights, states, stream, positions):
        n = self.nest

        def turn(t, carry):
            stream, states = carry
            new = []
            for p in range(n.period):
                w, state = (
                    {k: lax.dynamic_index_in_dim(x, t, keepdims=False) for k, x in tree[p].items()}
                    for tree in (weights, states)
                )
                experts = {k: Picked(x, t) for k, x in weights[p].items() if k.startswith("ffn.expert_")}
                layer = n.before + t * n.period + p
                stream, state = self.layer(self.spec.model.schedule[n.before + p], layer, w | experts, state, stream, positions)
                new.append({k: lax.dynamic_update_index_in_dim(states[p][k], x, t, 0) for k, x in state.items()})
            return stream, new

        with jax.named_scope("layers"):
            return lax.fori_loop(0, n.turns, turn, (stream, states))

    def layer(self, run, layer, w, state, stream, positions):
        """layer: its number; a traced one inside a loop."""
        for role, kind in (("mixer", run.mixer), ("ffn", run.ffn)):
            part = self.parts[role, kind]
            mine = {k.removeprefix(f"{role}."): v for k, v in w.items() if k.startswith(f"{role}.")}
            x = self.read(stream, mine, role, layer)
            norm = self.spec.model.norm
            y, new = part.apply(
                mine,
                state if role == "mixer" else {},
                rms(x, mine["norm"], norm.eps, norm.offset).astype(self.setup.act),
                positions,
            )
            stream = self.add(stream, y, role, layer)
            if role == "mixer":
                state = {k: v.astype(state[k].dtype) for k, v in new.items()}
        return stream, state

    # -- the residual stream -------------------------------------------------------------------------------------------

    @property
    def planes(self) -> int:
        return -(-self.spec.model.layers // self.spec.model.residual.block) if self.mixes else 0

    def no_snapshots(self, x):
        """Unrolled: a list that grows; in a loop: all planes, and how many are live follows from the layer."""
        return [] if self.form == "unrolled" or not self.mixes else jnp.zeros((self.planes, *x.shape), x.dtype)

    def read(self, stream, w, role: str, layer):
        x, snapshots = stream
        if not self.mixes:
            return x
        size = self.spec.model.residual.block
        live = (layer + size - 1) // size if role == "mixer" else layer // size + 1  # before and after this layer's own
        return self.mixture(snapshots, x, w["mixture"], live)

    def mixture(self, snapshots, x, w, live):
        kept = jnp.stack(snapshots) if isinstance(snapshots, list) and snapshots else snapshots
        v = (x[None] if isinstance(kept, list) else jnp.concatenate([kept, x[None]])).astype(jnp.float32)
        score = jnp.sum(v * w, -1) * lax.rsqrt(jnp.mean(v * v, -1) + self.spec.model.residual.eps)  # [planes + 1, B]
        if not isinstance(snapshots, list):
            plane = jnp.arange(v.shape[0])[:, None]
            score = jnp.where((plane < live) | (plane == v.shape[0] - 1), score, -jnp.inf)
        return jnp.sum(jax.nn.softmax(score, axis=0)[..., None] * v, axis=0)

    def add(self, stream, y, role: str, layer):
        x, snapshots = stream
        added = (x.astype(jnp.float32) + y).astype(x.dtype)
        if not self.mixes or role == "ffn":
            return added, snapshots
        size = self.spec.model.residual.block
        if isinstance(snapshots, list):
            return (y.astype(x.dtype), [*snapshots, x]) if layer % size == 0 else (added, snapshots)
        opens = jnp.asarray(layer % size == 0)
        old = lax.dynamic_index_in_dim(snapshots, layer // size, keepdims=False)
        kept = lax.dynamic_update_index_in_dim(snapshots, jnp.where(opens, x, old), layer // size, 0)
        return jnp.where(opens, y.astype(x.dtype), added), kept

    # -- the ends ------------------------------------------------------------------------------------------------------

    def embed(self, w, tokens):
        here = w["embed"].shape[0]
        local = tokens - lax.axis_index(AXES) * here
        row = w["embed"][jnp.clip(local, 0, here - 1)]
        return total(self.setup, jnp.where(((local >= 0) & (local < here))[:, None], row, 0))

    def finish(self, w, stream):
        m = self.spec.model
        x = self.mixture(stream[1], stream[0], w["mixture"], self.planes) if self.mixes else stream[0]
        logits = product(self.setup, rms(x, w["norm"], m.norm.eps, m.norm.offset), w["head"])
        best = jnp.argmax(logits, -1)
        ids = (best + lax.axis_index(AXES) * logits.shape[1]).astype(jnp.float32)  # below 2^24: exact
        both = lax.all_gather(jnp.stack([jnp.max(logits, -1), ids]), AXES)  # [ranks, 2, B]
        winner = jnp.argmax(both[:, 0], axis=0)
        return jnp.take_along_axis(both[:, 1], winner[None], axis=0)[0].astype(jnp.int32), logits


class Picked:
    """A stack of stacks of experts [turns, experts, ...], of which one turn's is meant: an expert is sliced out of both at
    once, because a slice of the turn alone would copy all of its experts."""

    def __init__(self, stack, turn):
        self.stack, self.turn = stack, turn

    def expert(self, e):
        at = (self.turn, e) + (0,) * (self.stack.ndim - 2)
        return lax.dynamic_slice(self.stack, at, (1, 1, *self.stack.shape[2:]))[0, 0]


def stacked(values):
    """Of one turn after another: one array's worth."""
    first = values[0]
    if isinstance(first, P):
        return P(None, *first)
    if isinstance(first, jax.ShapeDtypeStruct):
        sharding = NamedSharding(first.sharding.mesh, P(None, *first.sharding.spec))
        return jax.ShapeDtypeStruct((len(values), *first.shape), first.dtype, sharding=sharding)
    return np.stack(values)
