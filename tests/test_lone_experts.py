"""Experts that one row chose: multiplied for that row alone, which gets what it gets among others, and no other row sees it."""
from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from small_specs import prove_kernel, spec

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.pack.image import expert_image
from mkgen.plan.layout import layout_hash
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Step, walk
from mkgen.prove.coverage import pieces
from mkgen.prove.drive import load_kernel
from mkgen.prove.mini import mini_spec
from mkgen.prove.random_params import RandomParams
from mkgen.spec.model import Gqa, Moe
from mkgen.targets import load_target

ROWS, EXPERTS, HIDDEN = 5, 4, 384


def made(fmt: str, activations: str, rows=(ROWS,), width=160, **build):
    return spec(1, {"a": Gqa(heads=2, kv_heads=1, head_dim=32)}, {"moe": Moe(experts=EXPERTS, top_k=2, width=width)}, "a", "moe", hidden=HIDDEN,
                activations=activations, rows=rows, formats={"experts": fmt}, **build)


def planned(s):
    return make_plan(s, build_graph(s), load_target("tpu7x"))


def ways(plan) -> list[str]:
    return [n.args["lone"] for r in plan.regions.values() for n in walk(r.body) if isinstance(n, Step) and n.macro == "expert"]


def run(plan, kernel, image, x, route, expert: int, row: int | None) -> np.ndarray:
    """y [8, hidden] of one expert, for all rows or for `row`; memory is NaN until it is written."""
    names = ("expert_x", "expert_h", "expert_up", "route", "y")
    shapes = [pltpu.VMEM(plan.buffers[n].dims(ROWS), {"f32": jnp.float32, "bf16": jnp.bfloat16}[plan.buffers[n].dtype]) for n in names[:-2]]
    sums = [n for n in plan.buffers if n.endswith("_sums") and n.startswith("expert_")]
    shapes += [pltpu.VMEM((8, EXPERTS), jnp.float32)] + [pltpu.VMEM(plan.buffers[n].dims(ROWS), jnp.float32) for n in sums]

    def body(x_ref, route_ref, slot, ids, taker, y, *scratch):
        m = SimpleNamespace(rows=ROWS, expert_slot=slot, expert_ids=ids, taker=taker, **dict(zip((*names[:-1], *sums), scratch)))
        m.route[...] = route_ref[...]
        y[...] = jnp.zeros_like(y)
        f = kernel.EXPERT_UP.format
        left = (m.expert_x, m.expert_x_sums) if sums else m.expert_x
        kernel.spread(m, left, x_ref[...], f)
        kernel.run_expert(m, 0, m.route, y, row is not None)

    smem = pl.BlockSpec(memory_space=pltpu.SMEM)
    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, HIDDEN), jnp.float32), in_specs=[pl.BlockSpec()] * 3 + [smem] * 2,
                          scratch_shapes=shapes, interpret=pltpu.InterpretParams(uninitialized_memory="nan"))
    with jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))):
        inner = lambda *args: call(*args)
        step = jax.shard_map(inner, in_specs=(jax.P(),) * 5, out_specs=jax.P(), check_vma=False)
        slots = jnp.stack([image[expert]] * 2)
        return np.asarray(step(x, route, slots, jnp.array([expert], jnp.int32), jnp.array([-7 if row is None else row], jnp.int32)))


@pytest.mark.parametrize("fmt, activations, width", [("mxfp4", "f32", 160), ("mxfp4", "bf16", 160), ("nvfp4", "bf16", 160), ("int4_g32_zero", "bf16", 160),
                                                     ("mxfp4", "f32", 128), ("mxfp4", "bf16", 128)])        # of 128: four lines of a sum, not eight
def test_a_row_alone_has_what_it_has_among_others(fmt, activations, width):
    """To the last bits, in which the CPU's dots of few and many rows differ. And it adds nothing to other rows, not even where its own
    numbers are infinite: 0 * inf would be NaN."""
    s = made(fmt, activations, width=width)
    plan = planned(s)
    kernel, image = load_kernel(plan), jnp.asarray(expert_image(plan, plan.experts[0], 0, RandomParams(plan.graph, 1, s)))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((8, HIDDEN)), jnp.float32).astype({"f32": jnp.float32, "bf16": jnp.bfloat16}[activations])
    route = jnp.asarray(rng.uniform(0.5, 1, (8, EXPERTS)), jnp.float32)
    among = run(plan, kernel, image, x, route, 2, None)
    assert np.isfinite(among[:ROWS]).all() and len({r.tobytes() for r in among[:ROWS]}) == ROWS
    for row in range(ROWS):
        mine = route * (jnp.arange(8) == row)[:, None]
        alone = run(plan, kernel, image, x, mine, 2, row)
        np.testing.assert_allclose(alone[row], among[row], rtol=0, atol={"f32": 1e-6, "bf16": 4e-3}[activations] * np.abs(among).max())
        assert not np.delete(alone, row, 0).any()
    endless = run(plan, kernel, image, x.at[3].set(jnp.inf), route * (jnp.arange(8) == 3)[:, None], 2, 3)
    assert not np.isfinite(endless[3]).all() and not np.delete(endless, 3, 0).any()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_sums_have_one_order(rows):
    """Bit for bit, wherever a row stands and however many there are; beside one of NaN, too."""
    kernel = load_kernel(planned(made("mxfp4", "bf16")))
    xs = np.random.default_rng(rows).standard_normal((rows, 8, 640)).astype(np.float32)
    pairs = xs[:, ::2] + xs[:, 1::2]
    want = (pairs[:, 0] + pairs[:, 1]) + (pairs[:, 2] + pairs[:, 3])
    np.testing.assert_array_equal(np.asarray(kernel.sublane_sums(list(jnp.asarray(xs))))[:rows], want)
    for lines in (1, 3, 5):                              # told that the rest are zero
        few = list(jnp.where(jnp.arange(8)[:, None] < lines, xs, 0))
        np.testing.assert_array_equal(np.asarray(kernel.sublane_sums(few, lines))[:rows], np.asarray(kernel.sublane_sums(few))[:rows])
    xs[-1] = np.nan
    np.testing.assert_array_equal(np.asarray(kernel.sublane_sums(list(jnp.asarray(xs))))[:rows - 1], want[:-1])


@pytest.mark.parametrize("first, local, count", [(0, 40, 0), (56, 40, 9), (300, 256, 8 * 16), (504, 96, 700)])
def test_the_list_says_which_row_chose_an_expert_alone(monkeypatch, first, local, count):
    """Against a count; the last row's mark, too, which fills its four bits."""
    kernel = load_kernel(planned(made("mxfp4", "bf16")))
    monkeypatch.setattr(kernel, "first_expert", lambda local: first)
    chosen = np.zeros((8, 600), bool)
    chosen.flat[np.random.default_rng(count).choice(chosen.size, count, replace=False)] = True
    chosen[:, 310:319] = np.eye(8, 9, dtype=bool) & (count > 0)
    m = SimpleNamespace(expert_words=[0] * 40, expert_count=[0], expert_ids=[None] * 600, taker=[None] * 600)
    kernel.want_experts(m, jnp.asarray(chosen), local)
    want = [e for e in range(600) if chosen[:, e].any() and 0 <= e - first < local]
    for i in range(int(m.expert_count[0])):
        kernel.take_expert(m, i)
    assert [int(i) + first for i in m.expert_ids if i is not None] == want and not any(map(int, m.expert_words))
    assert [int(row) for row in m.taker if row is not None] == [int(chosen[:, e].argmax()) if chosen[:, e].sum() == 1 else -7 for e in want]


@pytest.mark.parametrize("fmt, activations, rows, lone", [
    ("mxfp4", "f32", (1, 8), True), ("nvfp4", "bf16", (8,), True), ("int4_g32_zero", "bf16", (3,), True),
    ("mxfp4", "f32", (1, 2), False),                     # two rows take no longer than one
    ("nvfp4", "f32", (8,), False), ("nvfp4", "f32", (3,), True),                     # codes times scales are made bf16 for more
    ("int4_g128", "bf16", (8,), False), ("bf16", "bf16", (8,), False),               # one product for all rows
])
def test_where_it_pays(fmt, activations, rows, lone):
    plan = planned(made(fmt, activations, rows))
    assert ways(plan) == (["all", "one"] if lone else [""]) and ("experts of one row" in pieces(plan)) is lone
    assert not check_plan(plan)


def test_the_mini_has_both_ways():
    plan = planned(mini_spec(made("mxfp4", "f32", (1, 8))))
    assert ways(plan) == ["all", "one"] and max(plan.spec.build.rows) > 2


@pytest.mark.slow
@pytest.mark.parametrize("fmt, activations", [("mxfp4", "f32"), ("nvfp4", "bf16"), ("int4_g32_zero", "bf16")])
def test_kernel_equals_reference(fmt, activations):
    prove_kernel(made(fmt, activations, (4,)))


@pytest.mark.parametrize("fmt", ["mxfp4", "nvfp4"])
def test_a_build_can_leave_it_out(fmt):
    """For rows that choose alike: no expert has a row of its own then. Packed weights stay what they are."""
    with_it, without = (planned(made(fmt, "bf16", lone_experts=lone)) for lone in (True, False))
    assert "one" in ways(with_it) and "one" not in ways(without) and "taker" not in without.buffers
    assert layout_hash(with_it) == layout_hash(without) and not list(check_plan(without))
