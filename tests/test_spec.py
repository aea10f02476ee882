"""The spec stage: good specs load, bad ones are refused at the right line, all mistakes together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mkgen.errors import MkgenError, Problem, SpecErrors
from mkgen.spec import params
from mkgen.spec.load import load_spec
from mkgen.spec.model import Gqa, Linear, Mla, Mlp, Moe, Rope, Run
from mkgen.spec.roles import tensors

ROOT = Path(__file__).resolve().parent.parent
SPECS = sorted((ROOT / "model_specs").glob("*.yaml"))
QWEN = ROOT / "model_specs" / "qwen3_30b_a3b.yaml"
KIMI = ROOT / "model_specs" / "kimi_k3.yaml"


def line_of(text: str, part: str) -> int:
    """The line of the only place where `part` stands."""
    assert text.count(part) == 1, f"{part!r} stands there {text.count(part)} times"
    return text[: text.index(part)].count("\n") + 1


def problems(path: Path, **kwargs) -> tuple[Problem, ...]:
    with pytest.raises(SpecErrors) as caught:
        load_spec(path, **kwargs)
    return caught.value.problems


def edited(tmp_path: Path, base: Path, *edits: tuple[str, str]) -> Path:
    """A copy of a spec with each first text, which must stand there once, replaced by the second."""
    text = base.read_text()
    for old, new in edits:
        line_of(text, old)
        text = text.replace(old, new)
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_every_committed_spec_loads_and_counts(path):
    spec = load_spec(path)
    assert len(spec.model.schedule) == spec.model.layers
    assert set(spec.model.checkpoint) == set(tensors(spec.model))
    if spec.model.parameters:
        assert params.count(spec.model) == pytest.approx(spec.model.parameters, rel=1e-3)


def test_what_a_spec_becomes():
    spec = load_spec(KIMI)
    model, build = spec.model, spec.build
    kinds = [type(k) for k in (*model.mixers.values(), *model.ffns.values())]
    assert kinds == [Linear, Mla, Mlp, Moe]
    assert model.schedule[0] == Run("kda", "dense") and model.schedule[3] == Run("mla", "moe")
    assert [sum(run.mixer == m for run in model.schedule) for m in ("kda", "mla")] == [69, 24]
    assert model.mixers["kda"].decay.floor == -5.0 and model.ffns["moe"].router.bias is True
    assert (build.ranks, build.rows, build.mesh) == (32, (1, 8), {"host": 4, "chip": 4, "core": 2})
    assert build.kv_slots == 16, "a default"
    assert params.count(load_spec(QWEN).model) == 30_532_122_624, "the published total, exactly"


def test_defaults_of_the_axes():
    model = load_spec(QWEN).model
    assert model.residual.kind == "add" and model.tied_head is False
    assert isinstance(model.mixers["attention"], Gqa) and model.mixers["attention"].rope.width is None


def test_where_remembers_lines():
    spec, text = load_spec(QWEN), QWEN.read_text()
    assert spec.where.at("model", "mixers", "attention", "kv_heads") == (
        str(QWEN),
        line_of(text, "kv_heads: 4"),
    )
    assert spec.where.at("build", "kv_slots") == (str(QWEN), line_of(text, "build:")), (
        "not written: its section"
    )
    assert not spec.where.has("build", "kv_slots")


# One slip each: (base, text, its replacement, words of the message). The error stands at the last line of the
# new text, unless a fifth entry names a text at whose line it stands.
BAD_SPECS = [
    (QWEN, "  hidden: 2048", "  hiden: 2048", "unknown key model.hiden"),
    (QWEN, "  ring_depth: 18", "  ring_dept: 12", "unknown key build.ring_dept"),
    (QWEN, "      kv_heads: 4", "      kv_heads: four", "kv_heads is four, not a whole number"),
    (QWEN, "  layers: 48", "  layers: 48.0", "layers is 48.0, not a whole number"),
    (QWEN, "  layers: 48", '  layers: "48"', 'layers is "48", not a whole number'),
    (QWEN, "  norm: {eps: 1.0e-6}", "  norm: {eps: tiny}", "norm.eps is tiny, not a number"),
    (QWEN, "  norm: {eps: 1.0e-6}", "  norm: 1.0e-6", "norm is 1.0e-6, not a mapping"),
    (QWEN, "  norm: {eps: 1.0e-6}", "  norm: {eps: -1.0e-6}", "norm.eps is -1e-06"),
    (QWEN, "renorm: true", "renorm: yes", "renorm is yes, not true or false"),
    (QWEN, "  name: qwen3_30b_a3b", "  name: qwen3-30b", "model.name is 'qwen3-30b'"),
    (QWEN, "  vocab: 151936\n", "", "missing key model.vocab", "model:"),
    (QWEN, "      head_dim: 128\n", "", "missing key model.mixers.attention.head_dim", "    attention:"),
    (QWEN, "      kind: gqa", "      kind: gqq", "unknown kind 'gqq'"),
    (QWEN, "      kind: gqa\n", "", "model.mixers.attention has no kind", "    attention:"),
    (QWEN, "      kind: moe", "      kind: linear", "unknown kind 'linear' in model.ffns.moe"),
    (QWEN, "{kind: silu}", "{kind: selu}", "unknown kind 'selu' in model.ffns.moe.activation"),
    (QWEN, "{kind: silu}", "{kind: silu, beta: 4.0}", "beta has no effect"),
    (QWEN, "score: softmax", "score: softmin", "unknown score 'softmin' in model.ffns.moe.router"),
    (QWEN, "  mixer: attention*48", "  mixer: attention*47", "covers 47 layers, the model has 48"),
    (QWEN, "  mixer: attention*48", "  mixer: attention*49", "covers 49 layers"),
    (QWEN, "  mixer: attention*48", "  mixer: atention*48", "names 'atention'"),
    (QWEN, "  mixer: attention*48", "  mixer: (attention*48", "'(' is never closed at column 1"),
    (QWEN, "  ffn: moe*48", "  ffn: moe*2 moe*x", "a number must follow '*' at column 11"),
    (
        QWEN,
        "  mixers:\n",
        "  mixers:\n    spare: {kind: gqa, heads: 8, kv_heads: 8, head_dim: 8}\n",
        "model.mixers.spare is never used",
        "    spare:",
    ),
    (QWEN, "      heads: 32", "      heads: 0", "heads is 0"),
    (QWEN, "      heads: 32", "      heads: 32\n      clip: -1.0", "clip is -1.0"),
    (QWEN, "      kv_heads: 4", "      kv_heads: 5", "32 heads cannot share 5 kv_heads"),
    (QWEN, "rope: {base: 1000000.0}", "rope: {base: 1000000.0, width: 130}", "cannot rotate 130"),
    (QWEN, "      top_k: 8", "      top_k: 129", "top_k 129 is more than the 128"),
    (QWEN, "      width: 768", "      width: 1536", "the shapes add up to", "  parameters:"),
    (
        QWEN,
        "      width: 768",
        "      width: 768\n      latent_norm: {eps: 1.0e-6}",
        "latent_norm without latent",
    ),
    (QWEN, "    head: lm_head.weight\n", "", "missing checkpoint roles: head", "  checkpoint:"),
    (QWEN, "    head: lm_head.weight", "    headd: lm_head.weight", "unknown checkpoint role headd"),
    (
        QWEN,
        "  vocab: 151936",
        "  vocab: 151936\n  tied_head: true",
        "unknown checkpoint role head",
        "    head: lm",
    ),
    (
        QWEN,
        "    attention.o: ",
        "    attention.g: x.{layer}\n    attention.o: ",
        "role attention.g",
        "attention.g:",
    ),
    (
        QWEN,
        "model.layers.{layer}.mlp.gate.weight",
        "model.layers.mlp.gate.weight",
        "the pattern of moe.router",
    ),
    (
        QWEN,
        "experts.{expert}.up_proj",
        "experts.{expert}.gate_proj",
        "have the same tensor",
        "    moe.expert_up:",
    ),
    (QWEN, "  chip: tpu7x", "  chip: tpu7y", "unknown chip 'tpu7y'"),
    (QWEN, "mesh: {chip: 4, core: 2}", "mesh: {chip: 8, core: 1}", "chip: 8 is more than a tpu7x has"),
    (QWEN, "mesh: {chip: 4, core: 2}", "mesh: {core: 2, chip: 4}", "mesh factors in the order core, chip"),
    (QWEN, "mesh: {chip: 4, core: 2}", "mesh: {chips: 4, core: 2}", "unknown mesh factor 'chips'"),
    (QWEN, "  expert_parallel: 4", "  expert_parallel: 8", "8 x tensor_parallel 2 is 16, the mesh has 8"),
    (QWEN, "{experts: bf16}", "{experts: fp7}", "unknown format 'fp7'"),
    (QWEN, "{experts: bf16}", "{embed: int8}", "its rows are looked up, not multiplied"),
    (QWEN, "{experts: bf16}", "{attention.q_norm: int8}", "int8 for attention.q_norm, which is [128]"),
    (QWEN, "{experts: bf16}", "{rest: int9}", "unknown format 'int9' of rest"),
    (QWEN, "[moe.router]", "[moe.rooter]", "unknown weight family 'moe.rooter'"),
    (QWEN, "[moe.router]", "[moe.expert_up]", "moe.expert_up cannot be chosen by itself"),
    (QWEN, "[moe.router]", "[head]", "head cannot be kept whole on every rank"),
    (QWEN, "[moe.router]", "[attention.q]", "attention.q cannot be kept whole on every rank"),
    (QWEN, "  context: 4096", "  context: 4096\n  activations: f16", "unknown activations 'f16' in build"),
    (KIMI, "conv: {taps: 4}", "conv: {taps: 1}", "taps is 1"),
    (QWEN, "  rows: [1, 8]", "  rows: []", "build.rows is empty"),
    (QWEN, "  rows: [1, 8]", "  rows: [1, 9]", "build.rows has 9"),
    (QWEN, "  rows: [1, 8]", "  rows: [0]", "build.rows.0 is 0"),
    (QWEN, "  rows: [1, 8]", "  rows: [8, 8]", "build.rows has 8 more than once"),
    (QWEN, "  rows: [1, 8]", "  rows: 8", "build.rows is 8, not a list"),
    (QWEN, "  rows: [1, 8]", "  rows: [1, 8]\n  tokens: 2", "build.tokens is 2"),
    (QWEN, "  context: 4096", "  context: 4100", "context 4100 is not a multiple of kv_tile 256"),
    (QWEN, "  kv_tile: 256", "  kv_tile: 100", "kv_tile 100 is not a multiple of 16"),
    (QWEN, "  ring_depth: 18", "  ring_depth: 1", "ring_depth is 1"),
    (QWEN, "  ring_depth: 18", "  ring_depth: 99", "the ring alone"),
    (QWEN, "  expert_slots: 4", "  expert_slots: 1", "expert_slots is 1"),
    (QWEN, "  expert_slots: 4", "  expert_slots: 4\n  expert_batch: 5", "expert_batch 5 is more than expert_slots 4"),
    (QWEN, "  expert_slots: 4", "  expert_batch: 5", "each from a slot of its own"),
    (QWEN, "  expert_slots: 4", "  expert_batch: 0", "expert_batch is 0"),
    (QWEN, "  expert_slots: 4", "  first_experts: 0", "first_experts is 0"),
    (QWEN, "  expert_slots: 4", "  kv_slots: 1", "kv_slots is 1"),
    (QWEN, "  expert_slots: 4", "  unroll: 9", "unroll is 9"),
    (QWEN, "  layers: 48", "  layers: 48\n  layers: 48", "key 'layers' is written twice"),
    (QWEN, "build:\n", "bild: {}\nbuild:\n", "unknown key bild", "bild:"),
    (QWEN, "  ffn: moe*48", "  ffn: [moe*48", "is not valid YAML", "  mixers:"),
    (KIMI, "block: 12, ", "", "block_softmax needs a block", "  residual: {"),
    (KIMI, "block_softmax, block: 12", "block_softmix, block: 12", "unknown kind 'block_softmix' in model.residual"),
    (KIMI, "floor: -5.0}", "floor: 5.0}", "floor is 5"),
    (KIMI, "      rope_dim: 64", "      rope: {}", "a rope, and no rope_dim", "      rope:"),
    (KIMI, "mixer: (kda*3 mla)*23 mla", "mixer: -*3 mla (kda*3 mla)*22 mla", "layer 0 opens a block"),
    (KIMI, "{host: 4, chip: 4, core: 2}", "{host: 2, chip: 4}", "uses only part of each"),
    (
        KIMI,
        "{host: 4, chip: 4, core: 2}",
        "{host: 8, chip: 4, core: 2}",
        "the largest known topology has 4 host",
    ),
]


@pytest.mark.parametrize("case", BAD_SPECS, ids=lambda case: case[3])
def test_one_slip_is_one_problem_at_its_line(tmp_path, case):
    base, old, new, words, *at = case
    path = edited(tmp_path, base, (old, new))
    text = path.read_text()
    if at and at[0] in ("model:", "build:"):
        line = text.splitlines().index(at[0]) + 1
    else:
        line = line_of(text, at[0]) if at else line_of(text, new) + new.rstrip("\n").count("\n")
    found = problems(path)
    assert len(found) == 1, "\n".join(map(str, found))
    problem = found[0]
    assert words in problem.what + " " + problem.why, str(problem)
    assert (problem.file, problem.line) == (str(path), line), str(problem)
    assert problem.why and problem.fix


def test_all_mistakes_together_in_order_of_the_file(tmp_path):
    path = edited(
        tmp_path,
        QWEN,
        ("  hidden: 2048", "  hiden: 2048"),
        ("      kv_heads: 4", "      kv_heads: x"),
        ("      top_k: 8", "      top_k: 200"),
        ("  context: 4096", "  context: 4097"),
        ("score: softmax", "score: soft"),
        ("  chip: tpu7x", "  chip: tpu9"),
    )
    found = problems(path)
    assert [p.line for p in found] == sorted(p.line for p in found)
    wanted = (
        "unknown key model.hiden",
        "kv_heads is x",
        "top_k 200",
        "unknown score",
        "unknown chip",
        "context 4097",
    )
    assert len(found) == len(wanted), "\n".join(map(str, found))
    for problem, words in zip(found, wanted):
        assert words in problem.what
    assert "did you mean 'hidden'" in found[0].fix


def test_how_problems_are_printed():
    error = SpecErrors([Problem("a.yaml", 3, "w", "y", "f"), Problem("--set x", 0, "w", "y", "f")])
    assert str(error) == "a.yaml:3: w\n  why: y\n  fix: f\n--set x: w\n  why: y\n  fix: f"
    assert isinstance(error, MkgenError) and error.exit_code == 2


def test_float_without_a_dot(tmp_path):
    path = edited(tmp_path, QWEN, ("  norm: {eps: 1.0e-6}", "  norm: {eps: 1e-6, offset: 1}"))
    assert (load_spec(path).model.norm.eps, load_spec(path).model.norm.offset) == (1e-6, 1.0)


def test_fewer_kv_heads_than_ranks_are_copied(tmp_path):
    for kv_heads in (1, 2, 8, 16):
        path = edited(
            tmp_path,
            QWEN,
            ("      kv_heads: 4", f"      kv_heads: {kv_heads}"),
            ("  parameters: 30532122624 ", "  #"),
        )
        assert load_spec(path).model.mixers["attention"].kv_heads == kv_heads


def test_tied_head(tmp_path):
    path = edited(
        tmp_path,
        QWEN,
        ("    head: lm_head.weight\n", ""),
        ("  parameters: 30532122624 ", "  #"),
        ("  layers: 48", "  layers: 48\n  tied_head: true"),
    )
    model = load_spec(path).model
    assert model.tied_head and params.count(model) == 30_532_122_624 - 151_936 * 2048


def test_sets_and_overlays(tmp_path):
    overlay = tmp_path / "small.yaml"
    overlay.write_text(
        "build:\n  mesh: {core: 2}\n  expert_parallel: 2\n  tensor_parallel: 1\n  context: 512\n"
    )
    build = load_spec(
        QWEN, [overlay], ["build.context=8192", "build.rows=[1]", "build.formats.experts=mxfp4"]
    ).build
    assert (build.mesh, build.ranks) == ({"core": 2}, 2), "an overlay replaces a key as a whole"
    assert (build.context, build.rows, build.formats) == (8192, (1,), {"experts": "mxfp4"})
    assert load_spec(QWEN, sets=["build.mesh.chip=2", "build.expert_parallel=2"]).build.ranks == 4
    found = problems(QWEN, overlays=[overlay], sets=["build.kv_tile=48"])
    assert [(p.file, p.line) for p in found] == [(str(overlay), 5)], "blamed on whoever wrote the value"


def test_build_in_a_file_of_its_own(tmp_path):
    model, _, build = QWEN.read_text().partition("build:\n")
    (tmp_path / "model.yaml").write_text(model)
    (tmp_path / "build.yaml").write_text("build:\n" + build)
    assert load_spec(tmp_path / "model.yaml", [tmp_path / "build.yaml"]).build == load_spec(QWEN).build
    assert ["no `build:`" in p.what for p in problems(tmp_path / "model.yaml")] == [True]


@pytest.mark.parametrize(
    "text, words",
    [
        ("build.contxt=1", "unknown key build.contxt"),
        ("context=1", "not of the form"),
        ("build.context", "not of the form"),
        ("model.layers=2", "sets a key of 'model'"),
        ("build.rows.0=1", "not a mapping"),
        ("build.context=", "is empty"),
        ("build.rows=[1", "not valid YAML"),
        ("build.context=x", "not a whole number"),
        ("build.context=7", "not a multiple"),
    ],
)
def test_bad_sets(text, words):
    found = problems(QWEN, sets=[text])
    assert [p.file for p in found] == [f"--set {text}"] and found[0].line == 0
    assert words in found[0].what


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "is empty"),
        ("- a\n", "not a mapping"),
        ("a: &x [*x]\n", "alias of itself"),
        ("{" * 1000, "nested too deeply"),
        ("? [1]\n: 2\n", "a key is a list"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("a:\t- 1\n\t b", "not valid YAML"),
    ],
    ids=lambda value: value[:12],
)
def test_files_that_are_no_specs(tmp_path, text, words):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    assert any(words in p.what for p in problems(path))
    assert "cannot be read" in problems(tmp_path / "missing.yaml")[0].what


JUNK = ("[]", "{}", "~", "-1", "0", "x", '"', "1.5", "{a: [b]}", "true", "{layer}")


@pytest.mark.parametrize("base", SPECS, ids=lambda p: p.stem)
def test_no_junk_is_more_than_a_problem(base, tmp_path):
    """Every second line loses its value to some junk, or goes missing: a spec or SpecErrors, nothing else."""
    lines = base.read_text().splitlines()
    keys = [
        i
        for i, line in enumerate(lines)
        if ":" in line and not line.startswith("#") and "checkpoint" not in line
    ]
    keys = [i for i in keys if "{layer}" not in lines[i]][::2] + [i for i in keys if "{layer}" in lines[i]][
        :1
    ]
    for turn, i in enumerate(keys):
        junk = JUNK[turn % len(JUNK)]
        for new in ([lines[i].split(":")[0] + ": " + junk], []):
            path = tmp_path / "spec.yaml"
            path.write_text("\n".join([*lines[:i], *new, *lines[i + 1 :]]))
            try:
                load_spec(path)
            except SpecErrors as error:
                assert all(p.file == str(path) and p.line for p in error.problems)


def test_spec_stage_never_imports_jax():
    code = "import sys, mkgen.spec.load, mkgen.spec.params; exit(len({'jax', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


EXTENDED = """
    full: {extends: attention, rope: null, kv_heads: 8}
    near: {extends: full, rope: {base: 5.0}}
"""


def test_a_kind_extends_another(tmp_path):
    path = edited(tmp_path, QWEN, ("  mixers:\n", "  mixers:" + EXTENDED), ("mixer: attention*48", "mixer: (attention full near)*16"),
                  ("  parameters: 30532122624 ", "  #"))
    model = load_spec(path).model
    attention, full, near = (model.mixers[n] for n in ("attention", "full", "near"))
    assert full == replace(attention, rope=None, kv_heads=8) and near == replace(full, rope=Rope(5.0))
    assert model.checkpoint["near.q_norm"] == model.checkpoint["attention.q_norm"]


@pytest.mark.parametrize("what, words", [("nobody", "full extends nobody"), ("full", "full extends full"), ("near", "extends")])
def test_what_cannot_be_extended(tmp_path, what, words):
    path = edited(tmp_path, QWEN, ("  mixers:\n", "  mixers:" + EXTENDED.replace("extends: attention", f"extends: {what}")),
                  ("mixer: attention*48", "mixer: (attention full near)*16"))
    assert any(words in p.what for p in problems(path))
