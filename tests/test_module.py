"""The generated module as its user meets it: files, tables, errors, and steps of a small model in interpret mode."""
import importlib
import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from mkgen.emit import module
from mkgen.graph.build import build_graph
from mkgen.pack.image import embedding_image, expert_image, tape_image
from mkgen.plan.dump import plan_dict, plan_text
from mkgen.plan.figures import Bytes, distinct_experts, families, figures
from mkgen.plan.layout import layout_facts, layout_hash
from mkgen.plan.planner import make_plan
from mkgen.plan.runs import Times, as_python, as_schedule, fold
from mkgen.prove.random_params import RandomParams
from mkgen.spec.load import load_spec
from mkgen.targets import load_target

SMALL = """
model:
  name: small
  hidden: 256
  vocab: 301
  layers: 2
  mixer: attention*2
  ffn: dense moe
  mixers:
    attention: {kind: gqa, heads: 4, kv_heads: 2, head_dim: 128, rope: {}}
  ffns:
    dense: {kind: mlp, width: 256}
    moe: {kind: moe, experts: 4, top_k: 2, width: 128}
  checkpoint:
    embed: embed
    head: head
    norm: norm
    mixer.norm: l.{layer}.n1
    ffn.norm: l.{layer}.n2
    attention.q: l.{layer}.q
    attention.k: l.{layer}.k
    attention.v: l.{layer}.v
    attention.o: l.{layer}.o
    dense.gate: l.{layer}.g
    dense.up: l.{layer}.u
    dense.down: l.{layer}.d
    moe.router: l.{layer}.r
    moe.expert_gate: l.{layer}.{expert}.g
    moe.expert_up: l.{layer}.{expert}.u
    moe.expert_down: l.{layer}.{expert}.d
build:
  chip: tpu7x
  mesh: {core: 2}
  expert_parallel: 2
  replicate: [moe.router]
  block_kib: 128
  rows: [1, 2]
  context: 32
  kv_tile: 16
  ring_depth: 3
  expert_slots: 2
"""


def planned(path, *sets):
    spec = load_spec(path, sets=sets)
    return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.yaml"
    path.write_text(SMALL)
    return path, planned(path)


def imported(plan, directory, name, monkeypatch):
    """The module, written under `directory` and imported from there."""
    files = module.write_module(plan, directory / name)
    assert [f.name for f in files] == ["__init__.py", "host.py", "kernel.py", "plan.json"]
    monkeypatch.syspath_prepend(str(directory))
    importlib.invalidate_caches()
    made = importlib.import_module(name)
    monkeypatch.setattr(made, "host", importlib.import_module(name + ".host"), raising=False)
    return made


def packed(plan, params, directory):
    """A folder as `mkgen pack` writes it."""
    directory.mkdir()
    for rank in range(plan.mesh.ranks):
        arrays = {"tape": tape_image(plan, rank, params), "embedding": embedding_image(plan, rank, params)}
        arrays |= {image.name: expert_image(plan, image, rank, params) for image in plan.experts}
        for name, array in arrays.items():
            np.save(directory / f"{name}.{rank}.npy", array)
    manifest = {"layout_hash": layout_hash(plan), "model": plan.spec.model.name, "ranks": list(range(plan.mesh.ranks))}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return manifest


# -- runs, layout, figures, dump ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("items, schedule, python", [
    ([], "", "[]"),
    ([7], "7", "[7]"),
    (list("aaabaaabb"), "(a*3 b)*2 b", '2 * (3 * ["a"] + ["b"]) + ["b"]'),
    ([1, 0, 0, 1, 0, 0, 1], "(1 0 0)*2 1", "2 * [1, 0, 0] + [1]"),
    ([None, None, None, "x", "y"], "-*3 x y", '3 * [None] + ["x", "y"]'),
])
def test_runs_are_found_and_written(items, schedule, python):
    assert as_schedule(fold(items)) == schedule
    assert as_python(fold(items)) == python
    assert eval(python) == items


def test_runs_expand_to_what_they_came_from():
    def expand(folded):
        return [y for x in folded for y in (expand(x.body) * x.count if isinstance(x, Times) else [x])]

    rng = np.random.default_rng(0)
    for n in range(60):
        items = rng.integers(0, 3, n).tolist()
        assert expand(fold(items)) == items == eval(as_python(fold(items)))


def test_schedule_does_not_change_the_layout(small):
    path, plan = small
    same = ("build.ring_depth=4", "build.context=64", "build.rows=[1]", "build.expert_slots=3", "build.kv_slots=4",
            "build.reduce={rest: flat}", "build.reduce={rest: scatter}", "build.reduce={rest: staged}", "build.gather=staged", "build.scatter=flat", "build.add=runs", "build.add=whole")
    for change in same:
        assert layout_hash(planned(path, change)) == layout_hash(plan), change


def test_chunk_boundaries_do_not_change_the_layout(small):
    """Every entry in a chunk of its own: another schedule of the same bytes."""
    plan = small[1]

    def cut(region):
        return replace(region, chunks=tuple(replace(c, entries=(e,)) for c in region.chunks for e in c.entries))

    other = replace(plan, regions={n: cut(r) for n, r in plan.regions.items()})
    assert other.chunks > plan.chunks and layout_hash(other) == layout_hash(plan)


def test_layout_sees_what_moves_bytes(small):
    path, plan = small
    moved = (("build.mesh={chip: 2, core: 2}", "build.tensor_parallel=2"), ("build.expert_parallel=1", "build.tensor_parallel=2"),
             ("build.replicate=[]",), ("build.block_kib=64",), ("build.formats={experts: mxfp4}",))
    for change in moved:
        assert layout_hash(planned(path, *change)) != layout_hash(plan), change
    assert layout_facts(plan)["order"]["attention"][0] == ["mixer.norm"]


@pytest.mark.parametrize("fixture", ["qwen_plan", "kimi_plan"])
def test_flagships_waste_less_than_two_percent(fixture, request):
    plan = request.getfixturevalue(fixture)
    f = figures(plan, 1)
    assert 0 <= f["padding_fraction"] < 0.02
    total = sum(families(plan).values(), Bytes())
    assert total.copied == plan.tape_rows * 512                   # every row of the tape is of some family
    assert f["streamed_bytes_per_step"] < figures(plan, 8)["streamed_bytes_per_step"] < f["bytes_per_core"]
    assert f["floor_seconds"] == pytest.approx(f["streamed_bytes_per_step"] / plan.target.hbm_bytes_per_s, abs=1e-9)


def test_figures_count_replication_and_experts(small):
    plan = small[1]
    by = families(plan)
    router = by["moe.router"]
    assert router.true == 256 * 4 * 2 and router.replicated == router.true / 2
    assert by["attention.qkv"].replicated == 0 and by["attention.qkv"].true == 2 * 256 * (4 + 2 * 2) * 128 * 2 / 2
    assert distinct_experts(plan, plan.experts[0], 1) == pytest.approx(1) and distinct_experts(plan, plan.experts[0], 2) == pytest.approx(1.5)
    with pytest.raises(ValueError, match="variants 1, 2"):
        figures(plan, 3)


@pytest.mark.parametrize("fixture", ["qwen_plan", "kimi_plan"])
def test_plan_is_plain_complete_and_stable(fixture, request):
    plan = request.getfixturevalue(fixture)
    text = plan_text(plan)
    read = json.loads(text)
    assert read == json.loads(json.dumps(plan_dict(plan))) and text == plan_text(plan)
    for rows in plan.spec.build.rows:
        vmem = read["vmem"][str(rows)]
        assert vmem["bytes"] == sum(plan.vmem(rows).values()) <= vmem["budget"]
        ends = [at + size for _, at, size in vmem["buffers"]]
        assert [at for _, at, _ in vmem["buffers"]] == [0, *ends[:-1]]
    chunks = {n: [c["rows"] for c in r["chunks"]] for n, r in read["tape"]["regions"].items()}
    assert sum(sum(chunks[r.name]) for _, r in plan.sequence()) == read["tape"]["rows"] == plan.tape_rows
    assert list(map(list, zip(*(read["facts"][n] for n in plan.fact_names)))) == plan.fact_table().reshape(-1, len(plan.fact_names)).tolist()
    assert set(read["regions"]) == set(plan.regions) and set(read["buffers"]) == set(plan.buffers)


# -- files --------------------------------------------------------------------------------------------------------------

def test_tables_of_the_face_are_those_of_the_plan(qwen_plan, kimi_plan, small, tmp_path, monkeypatch):
    for plan in (qwen_plan, kimi_plan, small[1]):
        made = imported(plan, tmp_path, "tables_" + plan.spec.model.name, monkeypatch)
        np.testing.assert_array_equal(made.host.CHUNKS, plan.chunk_table())
        np.testing.assert_array_equal(made.host.FACTS, plan.fact_table())
        assert made.host.CHUNKS.dtype == made.host.FACTS.dtype == np.int32
        assert made.SPEC["layers"] == len(plan.graph.layers) and made.PLAN["layout_hash"] == layout_hash(plan)
        assert sum(a.size * 4 for a in made.weight_shapes().values()) == plan.mesh.ranks * (plan.bytes_per_core(1) - plan.state_bytes(1))
        assert all(len(line) <= 100 for line in (tmp_path / made.__name__ / "host.py").read_text().split("\n"))


def test_only_our_files_are_replaced(small, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "module_files", lambda plan: {"host.py": "new\n", "plan.json": "{}\n"})
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "host.py").write_text("old")
    module.write_module(small[1], out)
    assert {p.name: p.read_text() for p in out.iterdir()} == {"notes.txt": "mine", "host.py": "new\n", "plan.json": "{}\n"}
    assert list(tmp_path.iterdir()) == [out]                      # nothing is left beside it


def test_a_failure_writes_nothing(small, tmp_path, monkeypatch):
    def broken(plan):
        raise RuntimeError("the printed kernel is not Python")

    monkeypatch.setattr(module, "render_kernel", broken)
    with pytest.raises(RuntimeError, match="not Python"):
        module.write_module(small[1], tmp_path / "out")
    assert not list(tmp_path.iterdir())


# -- the face -----------------------------------------------------------------------------------------------------------

def test_steps_of_a_small_model_follow_the_reference(small, tmp_path, monkeypatch):
    """Weights from a packed folder, two rows of which one pauses while the other goes on, and then begins anew."""
    from mkgen.reference.evaluate import Decoder
    plan = small[1]
    made = imported(plan, tmp_path, "small_steps", monkeypatch)
    params = RandomParams(plan.graph, 1, plan.spec)
    packed(plan, params, tmp_path / "packed")
    mesh = made.make_mesh(jax.devices()[:2])
    weights, state = made.load_weights(tmp_path / "packed", mesh), made.init_state(mesh, rows=2)
    step, oracle = made.make_decode_step(mesh, rows=2, interpret=True), Decoder(plan.graph, params, 2, 32, False)
    tokens = np.array([[5], [300]], np.int32)
    for positions in ([0, 0], [1, -1], [0, 1]):
        positions = np.array(positions, np.int32)
        before, forced = state, np.asarray(tokens)[:, 0]
        tokens, logits, state = step(weights, state, tokens, positions)
        assert all(x.is_deleted() for x in before.values())
        assert tokens.shape == (2, 1) and tokens.dtype == np.int32 and tokens.sharding.is_fully_replicated
        whole, active = np.asarray(made.whole_logits(logits)), positions >= 0
        assert whole.shape == (2, 301)
        wanted = np.asarray(oracle.step(forced, positions))
        np.testing.assert_allclose(whole[active], wanted[active], atol=0.02 * np.ptp(wanted[active]))
        np.testing.assert_array_equal(np.asarray(tokens)[active, 0], whole[active].argmax(1))
    name, cache = next(iter(state.items()))
    axis, rest = made.host.STATE_ROW_AXIS[name], np.asarray(cache).take(1, made.host.STATE_ROW_AXIS[name])
    assert np.asarray(cache).take(0, axis).any()
    clean = made.reset_row(state, 0)
    assert cache.is_deleted() and clean[name].sharding == made.init_state(mesh, 2)[name].sharding
    assert not np.asarray(clean[name]).take(0, axis).any()
    np.testing.assert_array_equal(np.asarray(clean[name]).take(1, axis), rest)
    with pytest.raises(ValueError, match="row 2: the state has rows 0 to 1"):
        made.reset_row(clean, 2)


@pytest.mark.parametrize("rows, token, first", [(2, [5, 300], [14, -1]), (2, [7, 9], [15, 0]), (1, [11], [15])])
def test_a_call_of_several_steps_is_as_many_calls(small, tmp_path, monkeypatch, rows, token, first):
    """Tokens, last logits and states, bit for bit: across a cache tile's edge (16), beside an inactive row, from position 0."""
    plan, steps = small[1], 3
    made = imported(plan, tmp_path, f"small_loop_{rows}_{first[-1]}".replace("-", "no"), monkeypatch)
    packed(plan, RandomParams(plan.graph, 1, plan.spec), tmp_path / "packed")
    mesh = made.make_mesh(jax.devices()[:2])
    weights = made.load_weights(tmp_path / "packed", mesh)
    one = made.make_decode_step(mesh, rows, interpret=True)
    several = made.make_decode_step(mesh, rows, steps=steps, interpret=True)
    given, first = np.array(token, np.int32)[:, None], np.array(first, np.int32)
    tokens, state, wanted = given, made.init_state(mesh, rows), []
    for n in range(steps):
        tokens, logits, state = one(weights, state, tokens, np.where(first < 0, first, first + n))
        wanted.append(np.asarray(tokens)[:, 0])
    begun = made.init_state(mesh, rows)
    got, last, held = several(weights, begun, given, first)
    assert got.shape == (rows, steps) and got.dtype == np.int32 and got.sharding.is_fully_replicated
    assert all(x.is_deleted() for x in begun.values())
    np.testing.assert_array_equal(np.asarray(got), np.stack(wanted, 1))
    assert len(set(wanted[n][0] for n in range(steps))) > 1                          # each step had another token
    np.testing.assert_array_equal(np.asarray(last), np.asarray(logits))
    assert last.sharding == logits.sharding
    for name, x in state.items():
        assert held[name].sharding == x.sharding
        np.testing.assert_array_equal(np.asarray(held[name]), np.asarray(x))
        axis = made.host.STATE_ROW_AXIS[name]
        assert [bool(np.asarray(x).take(r, axis).any()) for r in range(rows)] == (first >= 0).tolist()
    tokens, _, _ = several(weights, held, got[:, -1:], np.where(first < 0, first, first + steps))   # a call's last is the next's first
    assert tokens.shape == (rows, steps)


def test_mistakes_of_the_caller(small, tmp_path, monkeypatch):
    made = imported(small[1], tmp_path, "small_mistakes", monkeypatch)
    with pytest.raises(ValueError, match=r"needs 2 devices .*, got \[Cpu"):
        made.make_mesh(jax.devices()[:3])
    mesh = made.make_mesh()
    assert mesh.devices.tolist() == jax.devices()[:2]
    with pytest.raises(ValueError, match=r"rows=3: .* rows in \(1, 2\)"):
        made.make_decode_step(mesh, rows=3)
    with pytest.raises(ValueError, match="rows=3"):
        made.init_state(mesh, 3)
    for steps in (0, -1, 33, 1.5, None):
        with pytest.raises(ValueError, match=rf"steps={steps}: a call decodes 1 to 32 tokens"):
            made.make_decode_step(mesh, rows=2, steps=steps)
    with pytest.raises(TypeError, match="positional"):             # what stood third was once `interpret`
        made.make_decode_step(mesh, 2, True)
    step, (weights, state, _, _) = made.make_decode_step(mesh, rows=2, interpret=True), made.abstract_args(mesh, 2)
    tokens, positions = np.zeros((2, 1), np.int32), np.zeros(2, np.int32)
    for bad, message in (
        ((weights, state, tokens, np.array([0, 32], np.int32)), r"row 1 has position 32; it must be -1 to 31"),
        ((weights, state, tokens, np.array([-2, 0], np.int32)), "row 0 has position -2"),
        ((weights, state, tokens + 10**6, positions), r"row 0 has token 1000000; it must be 0 to \d+"),
        ((weights, state, tokens[:, 0], positions), r"tokens: int32\[2\], not int32\[2, 1\]"),
        ((weights, state, tokens, positions.astype(np.int64)), r"positions: int64\[2\], not int32\[2\]"),
        ((weights, state, tokens, [0, 0]), r"positions: list, not int32\[2\]"),
        ((weights, made.abstract_args(mesh, 1)[1], tokens, positions), r"state \w+: .*, not"),
        (({}, state, tokens, positions), r"weights has the arrays \[\], not"),
    ):
        with pytest.raises(ValueError, match=message):
            step(*bad)
    several = made.make_decode_step(mesh, rows=2, steps=4, interpret=True)
    with pytest.raises(ValueError, match="row 1 has position 29; it must be -1 to 28 for 4 steps to fit the context"):
        several(weights, state, tokens, np.array([28, 29], np.int32))


def test_weights_of_another_layout_are_refused(small, tmp_path, monkeypatch):
    plan = small[1]
    made, folder = imported(plan, tmp_path, "small_weights", monkeypatch), tmp_path / "packed"
    manifest, mesh = packed(plan, RandomParams(plan.graph, 0, plan.spec), folder), made.make_mesh()
    loaded = made.load_weights(folder, mesh)
    assert {n: (x.shape, x.dtype) for n, x in loaded.items()} == {n: (s.shape, s.dtype) for n, s in made.weight_shapes().items()}
    np.testing.assert_array_equal(loaded["tape"].addressable_shards[1].data, np.load(folder / "tape.1.npy"))
    for change, message in (({"layout_hash": "0" * 16}, "layout 0000000000000000; this reads small"), ({"ranks": [0]}, "rank 1 is missing")):
        (folder / "manifest.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(ValueError, match=message):
            made.load_weights(folder, mesh)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    np.save(folder / "embedding.1.npy", np.zeros((3, 128), np.uint32))
    with pytest.raises(ValueError, match=r"embedding\.1\.npy: uint32\[3, 128\], not uint32\["):
        made.load_weights(folder, mesh)


def test_the_step_lowers_for_a_chip_that_is_not_there(small, tmp_path, monkeypatch):
    made = imported(small[1], tmp_path, "small_lowered", monkeypatch)
    from jax.experimental import topologies
    devices = topologies.get_topology_desc(platform="tpu", topology_name=load_target("tpu7x").topology(2)[0]).devices
    lowered, loop = (made.make_decode_step(made.make_mesh(devices), rows=1, steps=n).lower().as_text() for n in (1, 4))
    assert [(text.count("@tpu_custom_call"), text.count("stablehlo.while")) for text in (lowered, loop)] == [(1, 0), (1, 1)]
    assert "mkgen" not in sys.modules["small_lowered.host"].__dict__
