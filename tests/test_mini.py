"""The proof's own parts: the mini spec, its weights and states, and that the proof finds what is wrong."""
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mkgen.graph.build import build_graph
from mkgen.graph.formats import format_of
from mkgen.plan.planner import make_plan
from mkgen.prove.coverage import _batches, code
from mkgen.prove.mini import like, mini_spec
from mkgen.prove.random_params import RandomParams
from mkgen.prove.rung import Rung
from mkgen.prove.state_image import layouts, to_kernel, to_logical
from mkgen.prove.verify import environment, verdict, verify_spec
from mkgen.spec import schedule
from mkgen.spec.load import load_spec
from mkgen.spec.model import Gqa, Moe, Run
from mkgen.targets import load_target

SPECS = Path(__file__).parent.parent / "model_specs"
NAMES = sorted(p.stem for p in SPECS.glob("*.yaml"))


def mini(name, *sets):
    return mini_spec(load_spec(SPECS / f"{name}.yaml", sets=sets))


def planned(spec):
    graph = build_graph(spec)
    return make_plan(spec, graph, load_target(spec.build.chip))


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    full = load_spec(SPECS / f"{request.param}.yaml")
    spec = mini_spec(full)
    return full, spec, planned(spec)


def test_every_kind_and_two_turns(case):
    full, spec, plan = case
    assert set(spec.model.mixers) == set(full.model.mixers) and set(spec.model.ffns) == set(full.model.ffns)
    assert {r.mixer for r in spec.model.schedule} == {r.mixer for r in full.model.schedule}
    assert {r.ffn for r in spec.model.schedule} == {r.ffn for r in full.model.schedule}
    assert 2 <= spec.model.layers <= 12
    opens = plan.graph.facts.get("opens_block")
    assert opens is None or sum(opens) >= 2


def test_mesh_and_parallel_stay_in_kind(case):
    full, spec, _ = case
    assert all((spec.build.mesh[n] > 1) == (size > 1) for n, size in full.build.mesh.items())
    assert spec.build.ranks <= 8
    if any(isinstance(kind, Moe) for kind in full.model.ffns.values()):
        for key in ("expert_parallel", "tensor_parallel"):
            assert (getattr(spec.build, key) > 1) == (getattr(full.build, key) > 1)
        assert spec.build.expert_parallel * spec.build.tensor_parallel == spec.build.ranks
    for name, kind in full.model.mixers.items():
        if isinstance(kind, Gqa):
            small = spec.model.mixers[name]
            assert (small.kv_heads < spec.build.ranks) == (kind.kv_heads < full.build.ranks)


def test_ring_tiles_and_slots_are_crossed(case):
    _, spec, plan = case
    assert plan.ring_depth >= 3 and len(plan.regions["end"].chunks) > plan.ring_depth
    assert spec.build.context == 4 * spec.build.kv_tile
    assert any(m.blocks > 1 for m in plan.matrices.values())
    assert any(m.n_padded > m.n for m in plan.matrices.values())
    assert spec.build.ranks == 1 or spec.model.vocab % spec.build.ranks
    assert spec.build.rows == (1, 4)


@pytest.mark.parametrize("sets", [
    ["build.mesh={chip: 4}", "build.expert_parallel=2", "build.tensor_parallel=2"],
    ["build.mesh={core: 1}", "build.expert_parallel=1", "build.tensor_parallel=1", "build.rows=[1]"],
    ["build.mesh={core: 2}", "build.expert_parallel=2", "build.tensor_parallel=1"],
])
def test_other_meshes(sets):
    spec = mini("qwen3_30b_a3b", *sets)
    assert spec.build.ranks <= 4
    planned(spec)


def test_like_keeps_what_is_over_128():
    assert (like(7168, 256), like(2880, 256), like(64, 256)) == (256, 320, 64)


def test_columns_are_brought_to_one_length():
    full = load_spec(SPECS / "qwen3_30b_a3b.yaml")
    other = replace(full.model.ffns["moe"], experts=8, top_k=2)
    ffn = "moe (dense moe*2)*15 dense moe"
    runs = tuple(Run("attention", name) for name in schedule.expand(schedule.parse(ffn)))
    model = replace(full.model, ffn=ffn, ffns={"moe": other, "dense": other}, schedule=runs)
    spec = mini_spec(replace(full, model=replace(model, checkpoint=_roles(model))))
    assert spec.model.layers == 9 and spec.model.mixer == "attention*9"


def _roles(model):
    more = {k.replace("moe.", "dense."): v + ".dense" for k, v in model.checkpoint.items() if k.startswith("moe.")}
    return {**model.checkpoint, **more}


# -- weights ----------------------------------------------------------------------------------------------------------

def test_weights_are_the_same_again_and_exact(case):
    _, spec, plan = case
    one, other = (RandomParams(plan.graph, 0, spec) for _ in range(2))
    def bf16(w):
        return (np.asarray(w, np.float32).view(np.uint32) & 0xFFFF == 0).all()

    def coded(w):                                       # scales of eight bits and more give values that bf16 has not
        return format_of(spec.build, w) in ("int8", "fp8_block", "nvfp4")

    for weight in plan.weights.values():
        if len(weight.shape) == 3:
            a = one.expert(weight, 1, 2)
            assert a.shape == weight.shape[1:] and (coded(weight) or bf16(a)) and np.array_equal(a, other.expert(weight, 1, 2))
            assert 0.3 < a.std() * np.sqrt(weight.shape[1]) < 3
        else:
            a = one.weight(weight, 1)
            assert a.shape == weight.shape and (weight.dtype == "f32" or coded(weight) or bf16(a))
            assert np.array_equal(a, other.weight(weight, 1))
    moe = [n for n, k in spec.model.ffns.items() if isinstance(k, Moe)]
    if moe:
        w = plan.weights[f"{moe[0]}.router"]
        assert not np.array_equal(one.weight(w, 0), one.weight(w, 1))


# -- states -----------------------------------------------------------------------------------------------------------

def test_states_there_and_back(case):
    _, spec, plan = case
    rng, rows, written = np.random.default_rng(0), 4, [15, 0, 64, 7]
    for layout in layouts(plan, rows):
        state = next(s for s in layout.op.states() if s.name == layout.name)
        shape = (layout.shape[0], rows, *((spec.build.context,) if state.positional else ()), *state.shape)
        logical = np.round(rng.standard_normal(shape) * 16).astype(np.float32) / 16
        arrays = [to_kernel(layout, logical, written, rank) for rank in range(spec.build.ranks)]
        assert {a.shape for a in arrays} == {layout.shape}
        back, same = to_logical(layout, arrays, shape)
        assert same and back.shape == shape
        for row, count in enumerate(written):
            if state.positional:
                assert np.array_equal(back[:, row, :count], logical[:, row, :count])
                assert np.isnan(back[:, row, count:]).all()
            else:
                assert np.isnan(back[:, row]).all() if count == 0 else np.array_equal(back[:, row], logical[:, row])


# -- the interpreter --------------------------------------------------------------------------------------------------

KERNEL = """
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from mkgen.prove.interpret import Findings, MODES, interpret_params, watch

def good(x, o, s, sem):
    copy = pltpu.make_async_copy(x, s, sem)
    copy.start()
    copy.wait()
    o[...] = s[...]

def no_wait(x, o, s, sem):
    pltpu.make_async_copy(x, s, sem).start()
    o[...] = s[...]

def overwritten(x, o, s, sem):
    s[...] = jnp.zeros_like(s)
    copy = pltpu.make_async_copy(x, s, sem)
    copy.start()
    o[...] = s[...]
    copy.wait()

def run(body, mode):
    found = Findings()
    call = pl.pallas_call(body, out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32), interpret=interpret_params(),
                          in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
                          scratch_shapes=[pltpu.VMEM((8, 128), jnp.float32), pltpu.SemaphoreType.DMA])
    with watch(found, mode):
        out = float(jax.jit(call)(jnp.ones((8, 128)))[0, 0])
    return out, found.races > 0, found.semaphores > 0

late, early = MODES
assert run(good, late) == run(good, early) == (1, False, False)
out, races, semaphores = run(no_wait, late)
assert out != out                                     # NaN: nobody waited, so the copy was never made
assert run(no_wait, early) == (1, True, True)
out, races, semaphores = run(overwritten, late)
assert (out, races) == (0, True)
assert run(overwritten, early) == (1, True, False)
"""


def test_interpreter_finds_races_and_semaphores():
    done = subprocess.run([sys.executable, "-c", KERNEL], env=environment(1), capture_output=True, text=True,
                          timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# -- the whole --------------------------------------------------------------------------------------------------------

def test_verify_passes():
    rungs = verify_spec(load_spec(SPECS / "qwen3_30b_a3b.yaml"))
    assert verdict(rungs) == "pass", [r for r in rungs if r.verdict == "fail"]
    assert {r.name for r in rungs if r.verdict == "skipped"} <= {"reach: residual blocks", "reach: windows"}


BROKEN = """
import pickle, sys
import mkgen.prove.drive as drive
from mkgen.prove.worker_verify import prove
render = drive.render_kernel
def broken(plan):
    text = render(plan)
    changed = text.replace("token >> 16)", "token >> 15)")        # a new token's features, one bit off
    assert changed != text
    return changed
drive.render_kernel = broken
rungs = prove(pickle.load(sys.stdin.buffer))
print(sorted({r.name.split(": ")[-1] for r in rungs if r.verdict == "fail"}))
"""


def test_verify_finds_a_broken_kernel():
    import pickle
    spec = mini("qwen3_30b_a3b", "build.rows=[2]")
    done = subprocess.run([sys.executable, "-c", BROKEN], input=pickle.dumps(spec), env=environment(spec.build.ranks),
                          capture_output=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert b"attention.cache" in done.stdout.split(b"\n")[-2]


def test_verdict():
    rung = Rung("a", "b", None, None, "pass")
    assert verdict([]) == "fail" and verdict([rung]) == "pass"
    assert verdict([rung, replace(rung, verdict="fail")]) == "fail"
    assert os.environ.get("NPROC") is None or environment(40)["NPROC"] == "80"


def test_mini_runs_all_code_of_the_full_plan(case):
    full, _, plan = case
    rung = code(planned(full), plan)
    assert rung.verdict == "pass", rung.reason


def test_the_mini_stores_matrices_as_the_full_model_does(case):
    """Also those that its own widths would leave out of the `rest`."""
    full, _, plan = case
    assert {n: m.format for n, m in planned(full).matrices.items()} == {n: m.format for n, m in plan.matrices.items()}


@pytest.mark.parametrize("name", sorted(p.stem for p in (SPECS / "tuned").glob("*.yaml")))
def test_an_overlay_has_a_mini_too(name):
    """With its refills behind the experts, and experts as they lie at full size."""
    spec, rows = re.fullmatch(r"(.+?)(?:_(\d+)_rows)?", name).groups("1")
    full = load_spec(SPECS / f"{spec}.yaml", overlays=[SPECS / "tuned" / f"{name}.yaml"])
    assert full.build.rows == (int(rows),), "a file for more than one row says so"
    small, whole = planned(mini_spec(full)), planned(full)
    assert small.spec.build.late_refills == min(full.build.late_refills, 2)
    assert [image.fold for image in small.experts] == [image.fold for image in whole.experts]


# -- experts that are narrower than a panel, in batches ---------------------------------------------------------------

OVER_ALL = ("build.expert_parallel=1", "build.tensor_parallel=32", "build.expert_batch=4", "build.expert_slots=16", "build.first_experts=8")


@pytest.mark.parametrize("more", [
    (), ("build.rows=[1]",), ("build.expert_parallel=4", "build.tensor_parallel=8", "build.expert_slots=6"), ("build.expert_slots=4",),
    ("build.expert_batch=2",), ("build.expert_batch=1",)], ids=" ".join)
def test_experts_in_batches_have_a_mini(more):
    """Parts of K side by side, more dots than one of each; batches that are full and one that is not; slots that are used again."""
    full = load_spec(SPECS / "kimi_k3.yaml", sets=(*OVER_ALL, *more))
    small, whole = planned(mini_spec(full)), planned(full)
    assert code(whole, small).verdict == "pass", code(whole, small).reason
    (there,), (here,) = whole.experts, small.experts
    assert (here.joint, here.fold) == (there.joint, there.fold)
    if there.joint:
        assert here.width == there.width % 128 and here.up.k == 2 * 256, "two dots of each part"
    build, chosen = small.spec.build, small.spec.model.ffns["moe"].top_k
    assert (build.expert_batch > 1) == (full.build.expert_batch > 1) and build.expert_slots >= build.expert_batch
    if build.expert_batch > 1:
        assert (build.expert_slots > build.expert_batch) == (full.build.expert_slots > full.build.expert_batch)
        assert (build.experts_ahead > build.experts_at_once) == (full.build.experts_ahead > full.build.experts_at_once)
        if build.expert_parallel == 1:                  # every rank has each expert of a row
            assert chosen > build.expert_slots and chosen % build.expert_batch


def test_coverage_names_what_a_mini_has_not_of_experts():
    full = load_spec(SPECS / "kimi_k3.yaml", sets=OVER_ALL)
    one_by_one = mini_spec(replace(full, build=replace(full.build, expert_batch=1)))
    whole, panels = planned(full), mini_spec(load_spec(SPECS / "kimi_k3.yaml"))
    assert "experts.batch" in code(whole, planned(one_by_one)).reason
    assert "parts of K, gate with up, side by side" in code(whole, planned(panels)).reason


def test_batches_that_were_met_are_counted():
    build = replace(load_spec(SPECS / "kimi_k3.yaml", sets=OVER_ALL).build, expert_batch=2, expert_slots=3)
    def lists(*lengths):
        return [np.arange(8)[None] < n for n in lengths]
    assert _batches(replace(build, expert_batch=1), lists(5)) == []
    for met, good in (((5,), True), ((4, 3), True), ((4, 2), False), ((3, 3), False), ((1, 1), False)):
        (rung,) = _batches(build, lists(*met))
        assert (rung.verdict == "pass") == good, (met, rung)
    (rung,) = _batches(replace(build, expert_parallel=2), [np.ones((1, 8), bool)])
    assert "of 2 lists of experts 2 fill a batch of 2, 0 leave" in rung.compared
