"""The rival of the benchmark: its numbers against the reference, and the counters of what XLA made of it."""
import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from mkgen.graph.build import build_graph  # noqa: E402
from mkgen.prove.random_params import RandomParams  # noqa: E402
from mkgen.reference.evaluate import Decoder  # noqa: E402
from mkgen.spec import schedule  # noqa: E402
from mkgen.spec.load import load_spec  # noqa: E402
from mkgen.spec.model import Run  # noqa: E402
from rival.arrays import dtype_of  # noqa: E402
from rival.layers import NoRival  # noqa: E402
from rival.model import Rival  # noqa: E402

CONTEXT, ROWS, STEPS = 16, 3, 3
SMALL = {
    "kimi_k3": dict(
        model=dict(hidden=128, vocab=64, mixer="(kda*3 mla)*2 mla", ffn="dense moe*8"), block=4,
        kda=dict(heads=4, key_dim=16, value_dim=32), decay_rank=24,
        mla=dict(heads=4, q_rank=40, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16),
        dense=dict(width=96), moe=dict(experts=16, top_k=4, width=64, shared_width=32, latent=64)),
    "qwen3_30b_a3b": dict(
        model=dict(hidden=64, vocab=64, mixer="attention*3", ffn="moe*3"),
        attention=dict(heads=8, kv_heads=2, head_dim=16), moe=dict(experts=16, top_k=4, width=32)),
    "qwen3_8_27b": dict(
        model=dict(hidden=64, vocab=64, mixer="(gdn*3 attention)*2", ffn="dense*8"),
        gdn=dict(heads=8, key_heads=4, key_dim=16, value_dim=16),
        attention=dict(heads=8, kv_heads=2, head_dim=32), rope_width=8, dense=dict(width=96)),
}


def small(name: str):
    """The spec with small widths, on four ranks: two groups of experts, two parts of each."""
    spec, sizes = load_spec(ROOT / "model_specs" / f"{name}.yaml"), SMALL[name]
    model = replace(spec.model, **sizes["model"], parameters=None)
    kinds = {n: replace(k, **sizes[n]) for n, k in {**model.mixers, **model.ffns}.items()}
    if "decay_rank" in sizes:
        kinds["kda"] = replace(kinds["kda"], decay=replace(kinds["kda"].decay, rank=sizes["decay_rank"]))
    if "rope_width" in sizes:
        kinds["attention"] = replace(kinds["attention"], rope=replace(kinds["attention"].rope, width=sizes["rope_width"]))
    columns = [schedule.expand(schedule.parse(c)) for c in (model.mixer, model.ffn)]
    runs = tuple(Run(*run) for run in zip(*columns, strict=True))
    residual = replace(model.residual, block=sizes.get("block", 0))
    model = replace(model, layers=len(runs), schedule=runs, residual=residual, mixers={n: kinds[n] for n in model.mixers},
                    ffns={n: kinds[n] for n in model.ffns})
    build = replace(spec.build, mesh={"chip": 2, "core": 2}, expert_parallel=2, tensor_parallel=2, rows=(ROWS,), context=CONTEXT)
    return replace(spec, model=model, build=build)


def logical(graph, params, layer: int):
    """Logical weights of a layer by their names, as the rival's arrays are made of them."""
    named = {w.name: w for sub in graph.sublayers() for op in sub.ops for w in op.weights()}

    def get(name: str, expert: int | None = None):
        return params.weight(named[name], layer) if expert is None else params.expert(named[name], layer, expert)

    return get


@pytest.mark.parametrize("form", ["unrolled", "loop"])
@pytest.mark.parametrize("name", SMALL)
def test_logits_of_the_rival_are_those_of_the_reference(name, form):
    spec = small(name)
    graph = build_graph(spec)
    params = RandomParams(graph, 5, spec)
    decoder = Decoder(graph, params, ROWS, CONTEXT, exact=True)
    rival = Rival(spec, ROWS, CONTEXT, form=form, exact=True)
    mesh = rival.mesh(jax.devices())
    step, shapes = rival.make_step(mesh), rival.abstract(mesh)
    made = rival.weights(lambda leaf, layer: np.asarray(leaf.make(logical(graph, params, layer)), dtype_of(leaf.dtype, True)))
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda x: x.shape, shapes[0])
    weights = jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), made, shapes[0])
    states = jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), shapes[1])
    tokens = np.array([1, 5, 40], np.int32)
    for t in range(STEPS):
        positions = np.full(ROWS, t, np.int32)
        wanted = decoder.step(tokens, positions)
        got, logits, states = step(weights, states, tokens, positions)
        np.testing.assert_allclose(np.asarray(logits), wanted, atol=2e-3 * wanted.std(), rtol=0)
        tokens = wanted.argmax(-1).astype(np.int32)
        assert np.array_equal(np.asarray(got), tokens)


def test_a_spec_with_more_than_the_rival_knows_is_refused():
    spec = small("qwen3_30b_a3b")
    attention = replace(spec.model.mixers["attention"], softcap=5.0)
    with pytest.raises(NoRival, match="softcap"):
        Rival(replace(spec, model=replace(spec.model, mixers={"attention": attention})), 1, CONTEXT).parts
