"""The rival of the benchmark: its numbers against the reference, and the counters of what XLA made of it."""

import sys
from dataclasses import replace
from functools import cache
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
from mkgen.targets import load_target  # noqa: E402
from mkgen.targets.exchange import phase_seconds  # noqa: E402
from rival import exchange  # noqa: E402
from rival.arrays import dtype_of, to_fp8  # noqa: E402
from rival.chance import busiest, mean_distinct  # noqa: E402
from rival.hlo import Module  # noqa: E402
from rival.layers import NoRival  # noqa: E402
from rival.cases import Case  # noqa: E402
from rival.fit import extrapolate  # noqa: E402
from rival.measure import Bench  # noqa: E402
from rival.page import section, summary  # noqa: E402
from rival.model import FORMS, Rival  # noqa: E402
from rival.timing import Clock, step as timed_step  # noqa: E402

CONTEXT, ROWS, STEPS = 16, 2, 3
TOLERANCE = 1e-4  # of the logits' standard deviation; both sides are float32
SMALL = {
    "kimi_k3": dict(
        model=dict(hidden=128, vocab=64, mixer="(kda*3 mla)*2 mla", ffn="dense moe*8"),
        block=4,
        kda=dict(heads=4, key_dim=16, value_dim=32),
        decay_rank=24,
        mla=dict(heads=4, q_rank=40, kv_rank=32, nope_dim=16, rope_dim=8, v_dim=16),
        dense=dict(width=96),
        moe=dict(experts=16, top_k=4, width=64, shared_width=32, latent=64),
    ),
    "qwen3_30b_a3b": dict(
        model=dict(hidden=64, vocab=64, mixer="attention*3", ffn="moe*3"),
        attention=dict(heads=8, kv_heads=2, head_dim=16),
        moe=dict(experts=16, top_k=4, width=32),
    ),
    "qwen3_8_27b": dict(
        model=dict(hidden=64, vocab=64, mixer="(gdn*3 attention)*2", ffn="dense*8"),
        gdn=dict(heads=8, key_heads=4, key_dim=16, value_dim=16),
        attention=dict(heads=8, kv_heads=2, head_dim=32),
        rope_width=8,
        dense=dict(width=96),
    ),
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
    model = replace(
        model,
        layers=len(runs),
        schedule=runs,
        residual=residual,
        mixers={n: kinds[n] for n in model.mixers},
        ffns={n: kinds[n] for n in model.ffns},
    )
    build = replace(
        spec.build, mesh={"chip": 2, "core": 2}, expert_parallel=2, tensor_parallel=2, rows=(ROWS,), context=CONTEXT
    )
    return replace(spec, model=model, build=build)


def logical(graph, params, layer: int):
    """Logical weights of a layer by their names, as the rival's arrays are made of them."""
    named = {w.name: w for sub in graph.sublayers() for op in sub.ops for w in op.weights()}

    def get(name: str, expert: int | None = None):
        return params.weight(named[name], layer) if expert is None else params.expert(named[name], layer, expert)

    return get


@pytest.fixture(scope="module")
def reference():
    """name -> (spec, graph, weights, tokens of each step, logits of each step): the reference runs once for both forms."""

    @cache
    def of(name: str):
        spec = small(name)
        graph = build_graph(spec)
        params = RandomParams(graph, 5, spec)
        decoder, tokens, steps = Decoder(graph, params, ROWS, CONTEXT, exact=True), np.array([1, 5, 40][:ROWS], np.int32), []
        for t in range(STEPS):
            steps.append((tokens, decoder.step(tokens, np.full(ROWS, t, np.int32))))
            tokens = steps[-1][1].argmax(-1).astype(np.int32)
        return spec, graph, params, steps

    return of


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SMALL)
def test_logits_of_the_rival_are_those_of_the_reference(reference, name, form):
    spec, graph, params, steps = reference(name)
    rival = Rival(spec, ROWS, CONTEXT, form=form, exact=True)
    mesh = rival.mesh(jax.devices())
    step, shapes = rival.make_step(mesh), rival.abstract(mesh)
    made = rival.weights(lambda leaf, layer: np.asarray(leaf.make(logical(graph, params, layer)), dtype_of(leaf.dtype, True)))
    assert jax.tree.map(np.shape, made) == jax.tree.map(lambda x: x.shape, shapes[0])
    weights = jax.tree.map(lambda a, s: jax.device_put(a, s.sharding), made, shapes[0])
    states = jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), shapes[1])
    for t, (tokens, wanted) in enumerate(steps):
        got, logits, states = step(weights, states, tokens, np.full(ROWS, t, np.int32))
        np.testing.assert_allclose(np.asarray(logits), wanted, atol=TOLERANCE * wanted.std(), rtol=0)
        assert np.array_equal(np.asarray(got), wanted.argmax(-1))


def test_a_spec_with_more_than_the_rival_knows_is_refused():
    spec = small("qwen3_30b_a3b")
    attention = replace(spec.model.mixers["attention"], softcap=5.0)
    with pytest.raises(NoRival, match="softcap"):
        Rival(replace(spec, model=replace(spec.model, mixers={"attention": attention})), 1, CONTEXT).parts


def test_fp8_holds_mxfp4_exactly_and_scales_are_powers_of_two():
    rng = np.random.default_rng(0)
    w = rng.choice([0, 0.5, 1, 1.5, 2, 3, 4, 6, -3], (64, 8)) * np.exp2(rng.integers(-4, 3, (2, 8)).repeat(32, axis=0))
    codes, scale = to_fp8(w.astype(np.float32), 64)
    assert np.array_equal(codes.astype(np.float32) * scale, w) and np.array_equal(np.log2(scale) % 1, np.zeros_like(scale))


# -- counters ------------------------------------------------------------------------------------------------------------

LLO = ', backend_config={"bundle_analysis_data":{"estimated_cycles":"%d","flops":"0"}}'
TEXT = """HloModule jit_step, is_scheduled=true

%inner (p.0: bf16[8,256,128], p.1: s32[]) -> bf16[256,128] {
  %p.0 = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} parameter(0)
  %p.1 = s32[]{:T(128)} parameter(1)
  ROOT %cut = bf16[1,256,128]{2,1,0:T(8,128)(2,1)} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={1,256,128}
}

%body (b: (s32[], bf16[8,256,128])) -> (s32[], bf16[8,256,128]) {
  %b = (s32[]{:T(128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%b), index=0
  %e = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} get-tuple-element(%b), index=1
  %next = s32[]{:T(128)S(6)} add(%i, %i)
  %dot.9 = f32[1,128]{1,0:T(1,128)S(1)} fusion(%e, %i), kind=kOutput, calls=%inner, metadata={op_name="jit(step)/layer_0/experts/while/body/dot"}LLO(400)
  ROOT %t = (s32[]{:T(128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%next, %e)
}

%cond (c: (s32[], bf16[8,256,128])) -> pred[] {
  %c = (s32[]{:T(128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %less = pred[]{:T(512)} compare(%c, %c), direction=LT
}

%plain (q.0: bf16[256,128]) -> f32[1,128] {
  %q.0 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %d = f32[1,128]{1,0:T(1,128)} convert(%q.0)
}

ENTRY %main (w0: bf16[256,128], w1: bf16[256,128], x: bf16[8,256,128]) -> f32[1,128] {
  %w0 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="weights[\\'layers\\'][0][\\'mixer.in\\']"}
  %w1 = bf16[256,128]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="weights[\\'layers\\'][1][\\'mixer.in\\']"}
  %x = bf16[8,256,128]{2,1,0:T(8,128)(2,1)} parameter(2), metadata={op_name="weights[\\'layers\\'][0][\\'ffn.expert_up\\']"}
  %copy-start.1 = (bf16[256,128]{1,0:T(8,128)(2,1)S(1)}, bf16[256,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%w0)
  %copy-done.1 = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start.1)
  %fusion.1 = f32[1,128]{1,0:T(1,128)S(1)} fusion(%copy-done.1), kind=kOutput, calls=%plain, metadata={op_name="jit(step)/layer_0/dot"}LLO(100)
  %psum.1 = bf16[1,128]{1,0:T(2,128)S(1)} all-reduce(%fusion.1), to_apply=%cond, metadata={op_name="jit(step)/layer_0/psum"}LLO(1000)
  %slice-start.1 = ((s8[65536]{0:T(1024)}), s8[32768]{0:T(1024)S(1)}, s32[]{:S(2)}) async-start(%w1), calls=%plain
  %slice-start.2 = ((s8[65536]{0:T(1024)}), s8[32768]{0:T(1024)S(1)}, s32[]{:S(2)}) async-start(%w1), calls=%plain
  %begin = (s32[]{:T(128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) tuple(%psum.1, %x)
  %loop = (s32[]{:T(128)}, bf16[8,256,128]{2,1,0:T(8,128)(2,1)}) while(%begin), condition=%cond, body=%body, metadata={op_name="jit(step)/layer_0/experts/while"}
  %slice-done.1 = s8[32768]{0:T(1024)S(1)} async-done(%slice-start.1)
  %slice-done.2 = s8[32768]{0:T(1024)S(1)} async-done(%slice-start.2)
  %whole = bf16[256,128]{1,0:T(8,128)(2,1)S(1)} custom-call(%slice-done.1, %slice-done.2), custom_call_target="ConcatBitcast"
  %sum.2 = f32[1,128]{1,0:T(1,128)S(1)} fusion(%psum.1), kind=kLoop, calls=%plain, metadata={op_name="jit(step)/layer_1/add"}LLO(10)
  ROOT %fusion.2 = f32[1,128]{1,0:T(1,128)S(1)} fusion(%whole), kind=kOutput, calls=%plain, metadata={op_name="jit(step)/layer_1/dot"}LLO(100)
}
"""
WEIGHT = 256 * 128 * 2  # bytes of one


def module(experts):
    import re

    text = re.sub(r"LLO\((\d+)\)", lambda m: LLO % int(m[1]), TEXT)
    return Module.parse(text, lambda scope: experts if scope.endswith("experts/while") else None)


def test_launches_are_counted_as_often_as_they_run():
    assert module(3.0).counts()["launches"] == 4 + 3 and module(0.0).counts()["launches"] == 4
    assert module(3.0).counts()["collectives"] == 1
    unsaid = module(None)
    assert unsaid.counts()["launches"] == 5 and unsaid.untold == {"jit(step)/layer_0/experts/while"}


def test_weights_on_their_way_across_a_layers_end():
    found = module(1.0).prefetch(2)
    assert found["into_vmem_bytes"] == 2 * WEIGHT and found["across_layers_bytes"] == WEIGHT
    assert found["in_flight_mean_bytes"] == found["in_flight_most_bytes"] == WEIGHT


def test_a_step_is_its_launches_and_the_waits_for_a_shared_memory():
    fast = timed_step(module(2.0), 1e9)
    assert fast["profile"] == 100 + 1000 + 2 * 400 + 10 + 100 and fast["cycles"] == pytest.approx(fast["profile"], abs=1)
    assert timed_step(module(2.0), 1e9, lambda i: 300.0)["cycles"] == pytest.approx(fast["profile"] - 700, abs=1)
    # nothing hides the first weight; the second has what two experts leave of the memory, and its reader waits for the rest
    slow, rest = timed_step(module(2.0), 200.0), WEIGHT - (2 * 400 * 200 - 2 * WEIGHT)
    assert slow["bytes"] == 4 * WEIGHT and slow["cycles"] == pytest.approx(fast["profile"] + (WEIGHT + rest) / 200)
    tight = timed_step(module(2.0), 100.0)  # an expert now takes the memory for longer than its own cycles
    assert tight["cycles"] == pytest.approx(100 + 1000 + 10 + 100 + 4 * WEIGHT / 100)


def test_a_copy_moves_while_others_compute_but_not_while_they_read():
    clock = Clock(rate=10.0)
    clock.start("a", 500.0)
    clock.run(30.0, 0.0)  # 300 of the 500 bytes
    clock.run(10.0, 100.0)  # reads all that the memory gives
    clock.wait("a")
    assert clock.now == 60.0 and clock.bytes == 600.0
    clock.run(1.0, 200.0)  # more than its cycles allow
    assert clock.now == 80.0


def test_exchanges_cost_what_the_simulators_phases_do():
    target, host = load_target("tpu7x"), {"chip": 4, "core": 2}
    flat = phase_seconds(target, 7, 4096, factors=("core", "chip"))
    staged = phase_seconds(target, 1, 4096, factors=("core",)) + phase_seconds(target, 3, 8192, factors=("chip",))
    assert exchange.all_gather(target, host, 4096) == min(flat, staged)
    assert (
        exchange.all_reduce(target, host, 2**24) < phase_seconds(target, 7, 2**24, factors=("core", "chip")) / 2
    )  # shares pay
    assert exchange.all_reduce(target, {"core": 2}, 1024) == phase_seconds(target, 1, 1024, factors=("core",))
    [psum] = [i for i, _ in module(0.0).runs() if i.collective]
    assert exchange.cycles(target, host, psum) == pytest.approx(exchange.all_reduce(target, host, 256) * target.clock_hz)


def test_experts_of_the_busiest_group():
    assert mean_distinct(896, 16, 8, 1) == pytest.approx(2.0)
    assert busiest(128, 8, 1, 1) == 8.0 and 2.2 < busiest(128, 8, 8, 1) < 2.8
    assert busiest(128, 8, 8, 8) > mean_distinct(128, 8, 8, 8)


def test_full_depth_from_a_few():
    spec = load_spec(ROOT / "model_specs" / "kimi_k3.yaml")
    kinds = [run.mixer for run in spec.model.schedule]
    cost = lambda n: 50.0 + 3.0 * kinds[1:n].count("kda") + 7.0 * kinds[1:n].count("mla")
    full, worst = extrapolate(spec, [{"layers": n, "cycles": cost(n)} for n in (1, 2, 4, 8)])
    assert full["cycles"] == pytest.approx(cost(93)) and worst["cycles"] < 1e-9
    with pytest.raises(ValueError, match="apart"):
        extrapolate(spec, [{"layers": n, "cycles": cost(n)} for n in (2, 2)])


def test_a_program_of_the_real_compiler(tmp_path):
    """One layer, through the TPU compiler: its loop over experts is known, its launches have figures."""
    bench = Bench(tmp_path, lambda text: None)
    got = bench.profiled(Case("qwen3_30b_a3b", 2048, (1,)), 1, "unrolled", 1, 8)
    assert got["launches_fixed"] > 20 and got["launches_per_expert"] >= 2 and got["untold_loops"] == []
    assert got["collectives"] == 4 and got["cycles"] > got["free_cycles"] > 0 and got["cycles"] > got["mean_cycles"]


def test_the_page_says_what_is_missing_and_what_was_doubtful():
    full = {"cpu_seconds": 30.0, "compile_seconds": 40.0, "launches_fixed": 900.0, "launches_per_expert": 50.0, "collectives": 90.0}
    full |= {"code_bytes": 5e6, "argument_bytes": 7e9, "in_flight_mean_bytes": 1e6, "masked_write": True, "untold_loops": [], "copied_bytes": 0}
    step = {"launches": 1000.0, "busiest_experts": 2.5, "mean_experts": 1.0, "mean_ms": 1.0, "own_ms": 0.9, "free_exchanges_ms": 0.8, "profile_ms": 0.9}
    unrolled = {"full": full | {"cycles": 2e6}, "depths": [full | {"cycles": 1e5, "layers": 2}], "extrapolated": True, "step": step | {"ms": 1.2},
                "worst_residual": {"cpu_seconds": 0.01, "cycles": 0.02, "launches_fixed": 0.0}}
    loop = {"full": full | {"profiler": "failed: no DMA"}, "depths": [], "extrapolated": False, "step": dict.fromkeys(step) | {"ms": None, "launches": 2.0}}
    ours = {"predicted_ms": 0.6, "launches": 1.0, "collectives": 0, "streamed_bytes": 8e8, "argument_bytes": 7e9, "in_flight_mean_bytes": 2e7,
            "cpu_seconds": 2.0, "compile_seconds": 2.0, "code_bytes": 1e6, "verdict": "pass"}
    case = {"spec": "a_model", "rows": 1, "context": 64, "ranks": 8, "layers": 48, "layouts": [], "programs": {"unrolled": unrolled, "loop": loop},
            "mkgen": ours, "bytes": {"streamed_bytes": 8e8}, "floor_ms": 0.25, "date": "today", "quick": True}
    text = section(case)
    assert "| step, estimated ms | 1.20 | — | 0.60 | 2.00 |" in text and "| launches a step | 1,000 | 2 | 1 | 1,000 |" in text
    assert "profiled with caches written by a select" in text and "profiler aborts on it (no DMA)" in text and "48, extrapolated" in text
    assert "is empty" not in summary([case]) and "is empty" in summary([case | {"mkgen": ours | {"predicted_ms": None}}])
