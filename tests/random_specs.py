"""Random small specs over all axes that change a plan: kinds, meshes, formats, rows, rings, slots. A seed gives the same spec."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache

from small_specs import spec

from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.spec.model import (
    Activation,
    Conv,
    Decay,
    Gate,
    Gqa,
    Linear,
    LinearGate,
    LinearNorm,
    Mla,
    Mlp,
    Moe,
    Norm,
    QkNorm,
    Residual,
    Rope,
    Router,
    Spec,
)
from mkgen.targets import load_target

MESHES = (
    {"core": 1},
    {"core": 2},
    {"chip": 2, "core": 2},
    {"chip": 2, "core": 2},
    {"chip": 4, "core": 2},
    {"chip": 3, "core": 2},
)
FORMATS = (
    {},
    {},
    {"rest": "int8"},
    {"experts": "mxfp4"},
    {"experts": "int8"},
    {"experts": "nvfp4"},
    {"rest": "fp8"},
    {"experts": "int4_g32"},
)
COLUMNS = (("a*2", "f*2"), ("a b a", "f*3"), ("a*3", "f g f"), ("(a b)*2", "(f g)*2"), ("a - b", "f g -"))


def mixer(r: random.Random):
    kind = r.choice(("gqa", "gqa", "mla", "linear", "linear"))
    if kind == "gqa":
        heads = r.choice((2, 4, 6, 8))
        sight = r.choice(({}, {}, {"window": r.choice((7, 16, 40))}, {"chunk": 16}))
        return Gqa(
            heads,
            r.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
            r.choice((16, 32, 64, 80)),
            rope=r.choice((None, Rope(1e4))),
            qk_norm=r.choice((None, QkNorm(), QkNorm("full"))),
            sinks=r.random() < 0.2,
            gate=r.choice((None, None, Gate())),
            bias=r.choice(((), (), ("q", "k", "v"), ("q", "k", "v", "o"))),
            **sight,
        )
    if kind == "mla":
        return Mla(
            heads=r.choice((4, 8, 16, 16)),
            kv_rank=r.choice((24, 64, 128, 256, 256)),
            nope_dim=r.choice((16, 32, 64, 64)),
            v_dim=r.choice((16, 32, 64, 64)),
            rope_dim=r.choice((0, 16)),
            q_rank=r.choice((0, 40)),
            gate=r.choice((None, Gate())),
        )
    if r.random() < 0.25:
        return Linear(
            4,
            32,
            32,
            delta=False,
            decay=Decay("constant"),
            write="one",
            qk_l2=False,
            scale=1.0,
            act=True,
            norm=LinearNorm("groups"),
            gate=LinearGate("sigmoid"),
        )
    heads = r.choice((2, 4, 8))
    return Linear(
        heads,
        r.choice((16, 24, 32)),
        r.choice((16, 32, 48)),
        key_heads=r.choice((None, heads // 2)),
        decay=r.choice((Decay(), Decay("floor", "head"), Decay("softplus", "head", 12))),
        conv=r.choice((None, Conv(3), Conv(4, bias=True))),
        norm=r.choice((None, LinearNorm())),
        gate=r.choice((None, LinearGate("sigmoid"))),
        skip=r.random() < 0.2,
    )


def ffn(r: random.Random):
    if r.random() < 0.4:
        return Mlp(r.choice((64, 96, 160, 320)), gated=r.random() < 0.8, bias=r.random() < 0.2)
    experts = r.choice((8, 8, 16))
    router = r.choice(
        (
            Router(),
            Router("sigmoid", bias=True, scale=1.5),
            Router(groups=4, group_top_k=2),
            Router("logits", linear_bias=True, after="softmax", renorm=False),
        )
    )
    return Moe(
        experts,
        r.choice((1, 2, 3)),
        r.choice((32, 48, 64)),
        gated=r.random() < 0.8,
        router=router,
        activation=Activation(),
        shared_width=r.choice((0, 0, 48, 96)),
        latent=r.choice((0, 0, 0, 96)),
        bias=r.random() < 0.15,
    )


def stream(r: random.Random) -> Residual:
    return r.choice(
        (
            Residual(),
            Residual(),
            Residual(norms=("pre", "post"), post_norm=Norm()),
            Residual("parallel"),
            Residual("gated", temperature=0.3, dtype="f32"),
            Residual("block_softmax", block=1),
        )
    )


def draw(seed: int) -> Spec:
    """May be no spec that can be: raises what `spec` and the planner raise."""
    r = random.Random(seed)
    mesh = r.choice(MESHES)
    ranks = 1
    for n in mesh.values():
        ranks *= n
    columns, tensor = r.choice(COLUMNS), r.choice([n for n in (1, 1, 2, ranks) if ranks % n == 0])
    residual = stream(r)
    if residual.kind == "parallel":
        columns = ("a*2", "f*2")
    mixers = {"a": mixer(r)} | ({"b": mixer(r)} if "b" in columns[0] else {})
    ffns = {"f": ffn(r)} | ({"g": ffn(r)} if "g" in columns[1] else {})
    routed = any(isinstance(f, Moe) for f in ffns.values())
    made = spec(
        ranks,
        mixers,
        ffns,
        *columns,
        hidden=r.choice((64, 128, 192, 256, 320)),
        residual=residual,
        ends={"vocab": r.choice((1300, 2048, 3000)), "tied_head": r.random() < 0.3},
        mesh=mesh,
        expert_parallel=ranks // tensor,
        tensor_parallel=tensor,
        formats=r.choice([f for f in FORMATS if routed or "experts" not in f]),
        rows=r.choice(((1,), (3,), (2,), (1, 4))),
        ring_depth=r.choice((2, 3, 4)),
        expert_slots=r.choice((2, 3, 4)),
        kv_slots=r.choice((2, 4, 6)),
        kv_tile=16,
        context=r.choice((64, 128)),
        block_kib=r.choice((48, 64, 64, 96)),
        activations=r.choice(("bf16", "f32")),
        gather=r.choice(("auto", "flat", "staged")),
        reduce=r.choice(({}, {"rest": "staged"}, {"rest": "flat"}, {"rest": "scatter"})) if ranks > 1 else {},
    )
    return made if not routed else replace(made, build=replace(made.build, **batches(r, made, ffns)))


def batches(r: random.Random, made: Spec, ffns: dict) -> dict:
    """How experts are fetched and multiplied: several at a time where no kind has biases; any number of slots from a batch on."""
    out = {"first_experts": r.choice((1, 2, 2, 3, 5))}
    if not any(f.bias for f in ffns.values() if isinstance(f, Moe)):
        out["expert_batch"] = batch = r.choice((1, 1, 2, 2, 4))
        out["expert_slots"] = made.build.expert_slots if batch == 1 else batch + r.choice((0, 0, 1, 2, 3))
    return out


@lru_cache(maxsize=None)
def plan(seed: int) -> Plan | None:
    """The plan of a random spec; None where the seed gives none (a combination that is refused)."""
    try:
        made = draw(seed)
        return make_plan(made, build_graph(made), load_target(made.build.chip))
    except (MkgenError, AssertionError):
        return None


def plans(seeds: range) -> list[tuple[int, Plan]]:
    """(seed, plan) of those that are possible."""
    return [(seed, made) for seed in seeds if (made := plan(seed)) is not None]
