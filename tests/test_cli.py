"""The command line: exit codes, what is printed, what is overridden, and that no traceback reaches a user.

The stages behind the commands have tests of their own; where one is slow, a stand-in takes its place here.
"""
from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from mkgen import cli_base
from mkgen.check.findings import Finding
from mkgen.cli import main
from mkgen.errors import MkgenError
from mkgen.prove.compile import CompileResult
from mkgen.prove.vmem_report import BufferBytes

ROOT = Path(__file__).resolve().parent.parent
QWEN, KIMI = (str(ROOT / "model_specs" / f"{name}.yaml") for name in ("qwen3_30b_a3b", "kimi_k3"))
FIGURES = ["padding_fraction", "replicated_bytes", "streamed_bytes_per_step", "planned_vmem_bytes", "bytes_per_core"]


def run(*args: str):
    return CliRunner().invoke(main, args, prog_name="mkgen")


def run_json(*args: str, code: int = 0):
    result = run(*args, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture
def stage(monkeypatch):
    """stage('mkgen.check', check_plan=f): a module with only these functions stands in for the real one."""

    def put(name: str, **functions):
        module = ModuleType(name)
        if name == "mkgen.check":
            functions = {"examined": lambda plan: {"rules": {}, "scenarios": 0, "layers": 0}} | functions
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    return put


@pytest.fixture
def clean(stage):
    """A checker that finds nothing."""
    stage("mkgen.check", check_plan=lambda plan: [])


# -- start and errors ------------------------------------------------------------------------------


def test_help_is_fast_and_imports_no_stage():
    heavy = ("jax", "numpy", "networkx", "rich.table", "jinja2")
    code = f"import sys, mkgen.cli; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
    for command in ((), ("build",), ("plan",), ("check",), ("compile",), ("verify",), ("pack",), ("report",), ("trace",)):
        result = run(*command, "--help")
        assert result.exit_code == 0 and "Usage: mkgen" in result.output


@pytest.mark.parametrize(
    "args, says",
    [
        (["plan", "no_such.yaml"], "no_such.yaml"),
        (["plan", str(ROOT)], str(ROOT)),
        (["plan"], "Missing argument 'SPEC'"),
        (["plam", QWEN], "No such command 'plam'"),
        (["plan", QWEN, "--rows", "1,x"], "--rows"),
        (["plan", QWEN, "--rows", ""], "--rows"),
        (["plan", QWEN, "--rows", "0"], "--rows"),
        (["plan", QWEN, "--context", "4000"], "build.context"),
        (["plan", QWEN, "--context", "many"], "--context"),
        (["plan", QWEN, "--chip", "tpu7"], "tpu7x"),
        (["plan", QWEN, "--set", "context=1"], "--set context=1"),
        (["plan", QWEN, "--set", "build.contxt=1"], "contxt"),
        (["plan", QWEN, "--overlay", "no_such.yaml"], "no_such.yaml"),
        (["plan", QWEN, "--set", "build.ring_depth=60"], "VMEM"),
        (["pack", QWEN], "--from"),
        (["pack", QWEN, "--from", "no_such_dir", "--out", "x"], "no_such_dir"),
    ],
)
def test_wrong_input_is_exit_2_without_a_traceback(args, says):
    result = run(*args)
    assert result.exit_code == 2, result.output
    assert says in result.stderr and "Traceback" not in result.output and not result.stdout


def test_several_mistakes_are_reported_together():
    mistakes = ("build.kv_tile=3", "build.chip=nothing", "build.expert_parallel=3")
    result = run("plan", QWEN, *(word for text in mistakes for word in ("--set", text)))
    assert result.exit_code == 2
    assert all(key in result.stderr for key in ("kv_tile", "nothing", "expert_parallel"))


def raising(error: BaseException):
    def check_plan(plan):
        raise error

    return check_plan


def test_an_unforeseen_exception_is_one_line(stage, monkeypatch):
    stage("mkgen.check", check_plan=raising(KeyError("first\nsecond")))
    monkeypatch.delenv("MKGEN_DEBUG", raising=False)
    result = run("check", QWEN)
    assert result.exit_code == cli_base.BUG == 3
    assert len(result.output.splitlines()) == 1 and "KeyError" in result.stderr
    for debug in (("--debug", "check", QWEN), ("check", QWEN, "--debug")):
        result = run(*debug)
        assert result.exit_code == 3 and "Traceback" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("mkgen: internal")
    monkeypatch.setenv("MKGEN_DEBUG", "1")
    assert "Traceback" in run("check", QWEN).stderr


@pytest.mark.parametrize(
    "error, code",
    [
        (MkgenError("not so"), 2),
        (PermissionError(13, "Permission denied", "here"), 2),
        (KeyboardInterrupt(), 130),
        (OSError("no file to blame"), 3),
    ],
)
def test_exit_codes_of_exceptions(stage, error, code):
    stage("mkgen.check", check_plan=raising(error))
    result = run("check", QWEN)
    assert result.exit_code == code and len(result.stderr.splitlines()) == 1


# -- plan, check and build -------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [QWEN, KIMI], ids=["one_host", "four_hosts"])
def test_plan_for_a_program(clean, spec):
    made = run_json("plan", spec)
    assert list(made) == [*FIGURES, "verdict", "variants"]
    assert list(made["variants"]) == ["1", "8"]
    assert {key: made[key] for key in (*FIGURES, "verdict")} == made["variants"]["1"]
    assert made["verdict"] == "pass" and 0 <= made["padding_fraction"] < 0.02


def test_plan_for_a_person(clean, kimi_plan):
    result = run("plan", KIMI)
    assert result.exit_code == 0, result.output
    shown = result.stdout
    for title in ("Figures", "VMEM map", "HBM held", "Tape", "Copied from HBM", "Loop nest", "Collectives"):
        assert title in shown
    assert all(f"\n{name} " in shown for name in kimi_plan.vmem(1))
    assert all(f"\n{name} " in shown for name in kimi_plan.matrices)
    for rows in (1, 8):
        assert f"{sum(kimi_plan.vmem(rows).values()):,}" in shown and f"{kimi_plan.bytes_per_core(rows):,}" in shown
    assert "for layer in range(93)" in shown and "mixer (kda*3 mla)*23 mla; ffn dense moe*92" in shown
    assert shown.rstrip().endswith("verdict: pass")


def test_a_plan_says_how_narrow_experts_lie_and_go(clean):
    """What shares their panels, and how many make a basic block; nothing of it where panels are whole and experts go one by one."""
    def shown(*sets):
        result = run("plan", KIMI, "--rows", "1", *(word for text in sets for word in ("--set", f"build.{text}")))
        assert result.exit_code == 0, result.output
        return " ".join(result.stdout.split())

    over_all = shown("expert_parallel=1", "tensor_parallel=32", "expert_batch=4", "expert_slots=16", "first_experts=8")
    assert "gate and up and 2 parts of K side by side in 3 panels" in over_all
    assert "4 experts are multiplied in one basic block" in over_all and "expert_batch" in over_all
    assert "gate and up side by side in 3 panels" in shown("expert_parallel=2", "tensor_parallel=16", "formats={experts: nvfp4}")
    assert not any(words in shown() for words in ("side by side in", "multiplied in one basic block", "expert_batch"))


def test_the_collectives_shown_are_those_of_the_plan(kimi_plan):
    from mkgen.plan.regions import Collective, walk
    from mkgen.show.nest import collectives

    found = collectives(kimi_plan)
    for name, region in kimi_plan.regions.items():
        starts = sum(isinstance(n, Collective) and n.part == "start" for n in walk(region.body))
        assert starts == sum(count for (where, *_), (count, _) in found.items() if where == name)
    assert {layers for (where, *_), (_, layers) in found.items() if where == "moe"} == {92}


def test_one_core_has_no_collectives(clean):
    one = ("mesh={core: 1}", "expert_parallel=1", "tensor_parallel=1", "expert_slots=2", "ring_depth=8")
    result = run("plan", QWEN, *(word for text in one for word in ("--set", f"build.{text}")))
    assert result.exit_code == 0, result.output
    assert "1 core (core 1)" in result.stdout and "Collectives" not in result.stdout


def test_flags_override_overlays_and_sets(clean, tmp_path):
    over = tmp_path / "over.yaml"
    over.write_text("build:\n  rows: [2]\n  context: 1024\n")
    assert list(run_json("plan", QWEN, "--overlay", str(over))["variants"]) == ["2"]
    flags = ("--set", "build.rows=[3]", "--rows", "4, 8", "--context", "2048")
    made = run_json("plan", QWEN, "--overlay", str(over), *flags)
    assert list(made["variants"]) == ["4", "8"]
    longer = run_json("plan", QWEN, "--rows", "4,8", "--context", "4096")
    assert longer["bytes_per_core"] > made["bytes_per_core"]


def test_a_finding_is_a_bad_verdict(stage, tmp_path):
    told = "[memory] VMEM: a and [b] overlap (no byte is shared)"
    stage("mkgen.check", check_plan=lambda plan: [Finding("memory", "VMEM", "a and [b] overlap", "no byte is shared")])
    for command in ("check", "plan"):
        result = run(command, QWEN)
        assert result.exit_code == 1 and f"finding: {told}" in result.stdout and "fail" in result.stdout
    made = run_json("check", QWEN, code=1)
    assert made["verdict"] == made["plan"]["verdict"] == "fail" and made["findings"] == [told] and "code" not in made
    assert run_json("plan", QWEN, code=1)["verdict"] == "fail"
    out = tmp_path / "out"
    result = run("build", QWEN, "-o", str(out))
    assert result.exit_code == 1 and "nothing was written" in result.stdout and not out.exists()
    assert run_json("build", QWEN, "-o", str(out), code=1)["verdict"] == "fail"


def write_two(plan, out):
    out.mkdir(parents=True, exist_ok=True)
    (out / "kernel.py").write_text("a = 1\nb = 2\n")
    (out / "plan.json").write_text("{}\n")
    return [out / "kernel.py", out / "plan.json"]


def test_build_says_what_it_wrote(clean, stage, tmp_path, monkeypatch, qwen_plan):
    from mkgen.plan.layout import layout_hash

    stage("mkgen.emit.module", write_module=write_two)
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "generated" / "qwen3_30b_a3b"
    target.mkdir(parents=True)
    (target / "old.txt").write_text("not ours")
    result = run("build", QWEN)
    assert result.exit_code == 0, result.output
    assert "kernel.py" in result.stdout and "old.txt" not in result.stdout and layout_hash(qwen_plan) in result.stdout
    made = run_json("build", QWEN, "--out", "elsewhere")
    assert made["files"] == {"elsewhere/kernel.py": 2, "elsewhere/plan.json": 1}
    assert (made["lines"], made["verdict"], made["layout_hash"]) == (2, "pass", layout_hash(qwen_plan))


def test_build_into_a_file_is_wrong_input(clean, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("build", QWEN, "-o", str(tmp_path / "file"))
    assert result.exit_code == 2 and "Traceback" not in result.output


# -- compile, verify and pack ----------------------------------------------------------------------


def compiled(rows: int, verdict: str):
    return CompileResult(
        rows, verdict, () if verdict == "pass" else ("VMEM of [x] differs",), compile_seconds=1.5, lower_seconds=0.5, cpu_seconds=1.4,
        vmem_bytes=1000, planned_vmem_bytes=900, spill_bytes=0, bytes_per_core=7, planned_bytes_per_core=7,
        temporary_bytes=0, code_bytes=12345, buffers=(BufferBytes("ring", 900, 1000),))


def test_compile(stage):
    stage("mkgen.prove.compile", compile_spec=lambda plan, steps: [
        compiled(rows, "pass" if rows == 1 else "fail") for rows in plan.spec.build.rows])
    made = run_json("compile", QWEN, "--rows", "1")
    sizes = {"vmem_bytes": 1000, "planned_vmem_bytes": 900, "bytes_per_core": 7}
    top = {"compile_seconds": 1.5, **sizes, "verdict": "pass"}
    assert {key: made[key] for key in top} == top and made["variants"]["1"]["code_bytes"] == 12345
    assert run_json("compile", QWEN, code=1)["verdict"] == "fail"
    result = run("compile", QWEN)
    assert result.exit_code == 1 and "12,345" in result.stdout and "8 rows: VMEM of [x] differs" in result.stdout
    assert result.stdout.rstrip().endswith("verdict: fail") and "a call" not in result.stdout
    stage("mkgen.prove.compile", compile_spec=lambda plan, steps: [replace(compiled(1, "pass"), steps=steps)])
    assert "context 2048, 16 steps a call" in run("compile", QWEN, "--steps", "16", "--context", "2048").stdout
    assert run_json("compile", QWEN, "--steps", "16")["variants"]["1"]["steps"] == 16


@pytest.mark.parametrize("verdicts, code", [(["pass", "skipped"], 0), (["pass", "fail"], 1), (["skipped"], 1), ([], 1)])
def test_verify(stage, verdicts, code):
    rungs = [dict(name=f"rung {n}", compared="logits", error=0.001, bound=0.02, verdict=word, reason="no [x]")
             for n, word in enumerate(verdicts)]
    stage("mkgen.prove.verify", verify_spec=lambda spec: rungs)
    made = run_json("verify", QWEN, code=code)
    assert made == {"verdict": "fail" if code else "pass", "rungs": rungs}
    result = run("verify", QWEN)
    assert result.exit_code == code and all(r["name"] in result.stdout for r in rungs)
    assert ("skipped: no [x]" in result.stdout) == ("skipped" in verdicts)
    assert "pass: no [x]" not in result.stdout


@pytest.mark.parametrize("answer, code", [("pass", 0), ("fail", 1)])
def test_pack(stage, tmp_path, answer, code):
    asked = []

    def pack_command(*args):
        asked.append(args[1:])
        return {"verdict": answer}

    stage("mkgen.pack.write", pack_command=pack_command)
    result = run("pack", QWEN, "--from", str(tmp_path), "--out", str(tmp_path / "out"), "--force", "--ignore", "a.*", "--ignore", "b")
    assert result.exit_code == code and asked == [(tmp_path, tmp_path / "out", False, True, False, ("a.*", "b"))]


# -- the project's files ---------------------------------------------------------------------------


def test_every_package_is_in_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {".".join(p.parent.relative_to(ROOT).parts) for p in (ROOT / "mkgen").rglob("*.py")}
    assert listed == sorted(listed) and set(listed) == found | {"mkgen.hub", "mkgen.templates"}


def test_ci_runs_the_readme_s_test_command():
    command = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]' && .venv/bin/pytest -q"
    assert command.replace(".venv", '"$venv"') in (ROOT / ".ci" / "run").read_text()
