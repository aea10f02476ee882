"""The first tiles of a cache are started in front of their own sub-layer, beside an exchange, whatever comes before it."""
from __future__ import annotations

from dataclasses import replace

import pytest
from small_specs import prove_kernel, spec

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.ahead import MIXED, followers
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, Loop, Start, Wait, walk
from mkgen.prove.trace_code import check_code
from mkgen.spec.model import Gqa, Mla, Mlp, Spec
from mkgen.targets import load_target

KINDS = {"a": Gqa(4, 4, 32), "b": Gqa(4, 4, 32, window=16)}
COLUMNS = {                              # mixers, ffns -> where the tiles of each kind are started, with what is asked there
    ("a*3", "m*3"): {"begin": ["a"], "m": ["a if layer + 1 < LAYERS"]},
    ("a b a b", "m*4"): {"begin": ["a"], "m": ["a if comes_next(m, layer, 0)", "b if comes_next(m, layer, 1)"]},
    ("a*3", "m n m"): {"begin": ["a"], "m": ["a if layer + 1 < LAYERS"], "n": ["a"]},
    ("a*3", "-*3"): {"begin": ["a"], "a": ["a if layer + 1 < LAYERS"]},
    ("a - b", "- m -"): {"begin": ["a"], "a": [], "m": ["b"], "b": []},
    ("a b b", "m - m"): {"begin": ["a"], "m": [], "b": ["b"]},                # b is now the last of its layer, now not
}


def planned(made: Spec) -> Plan:
    return make_plan(made, build_graph(made), load_target("tpu7x"))


def small(mixer: str, ffn: str, ranks: int = 2, mixers: dict | None = None) -> Spec:
    ffns = {name: Mlp(96 + 32 * i) for i, name in enumerate("mn") if name in ffn}
    return spec(ranks, {k: v for k, v in (mixers or KINDS).items() if k in mixer}, ffns, mixer, ffn, 128)


def first_tiles(plan: Plan, name: str) -> list[Loop]:
    return [n for n in plan.regions[name].body.nodes if isinstance(n, Loop) and n.name.startswith("first_")]


def told(loop: Loop) -> str:
    kind = loop.body[0].transfer.removesuffix("cache_tile_copy").strip("_") or "a"      # one alone has no name
    due = loop.trips.removeprefix("jnp.where(").partition(", jnp.minimum")[0]
    return f"{kind} if {due}" if loop.trips.startswith("jnp.where") else kind


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_who_comes_before_starts_them(columns, ranks):
    plan, wanted = planned(small(*columns, ranks)), COLUMNS[columns]
    assert {name: [told(x) for x in first_tiles(plan, name)] for name in wanted} == wanted
    assert not list(check_plan(plan)) and not check_code(plan).findings


@pytest.mark.parametrize("columns", COLUMNS)
def test_they_travel_beside_the_last_exchange(columns):
    plan = planned(small(*columns))
    for name in COLUMNS[columns]:
        nodes = list(plan.regions[name].body.nodes)
        for loop in (x for x in first_tiles(plan, name) if "MIXER_INDEX" in x.body[0].args[1]):
            behind = [n for n in nodes[nodes.index(loop):] if isinstance(n, Collective)]
            assert [n.part for n in behind if n.round == 0] == ["finish"]
            assert not any(isinstance(n, Wait) and "tile" in n.transfer for x in nodes[nodes.index(loop):] for n in walk(x))


def test_an_exchange_in_front_of_the_tiles_is_time_enough():
    """Latent attention gathers its latents first: its tiles are started at its beginning."""
    mla = Mla(heads=4, q_rank=64, kv_rank=64, nope_dim=32, rope_dim=0, v_dim=32)
    plan = planned(small("a*2", "m*2", 2, {"a": mla}))
    assert len(first_tiles(plan, "a")) == 1 and not first_tiles(plan, "m") and not first_tiles(plan, "begin")


def test_a_mixer_that_is_not_always_the_last():
    found = followers(build_graph(small("a b b", "m - m")))
    assert found[MIXED] == {"b"} and found["begin"] == {"a"}


@pytest.mark.parametrize("damage", ["another layer", "behind the last", "twice", "not at all", "another kind"])
def test_damage_is_found(damage):
    """In front of a layer of the other kind; the last layer starts nothing."""
    plan = planned(small("a b a b", "m*4"))
    region = plan.regions["m"]
    loop = first_tiles(plan, "m")[0]
    same = Start(loop.body[0].transfer, ("m", "m.facts[layer * FACTS + MIXER_INDEX]", "i"))
    other = {"another layer": [replace(loop, body=(same,))],
             "behind the last": [replace(loop, trips="jnp.minimum(m.kv_count[0], KV_SLOTS)")],
             "twice": [loop, loop], "not at all": [],
             "another kind": [replace(loop, trips=loop.trips.replace("layer, 0", "layer, 1"))]}[damage]
    nodes = [x for n in region.body.nodes for x in (other if n is loop else [n])]
    damaged = replace(region, body=replace(region.body, nodes=tuple(nodes)))
    assert list(check_plan(replace(plan, regions={**plan.regions, "m": damaged})))


@pytest.mark.slow
def test_the_kernel_gives_the_references_numbers():
    prove_kernel(small("a b b a", "m n m m"))
