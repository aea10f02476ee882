"""The full-size programs through the TPU compiler, and what it says about memory against the plan's own rules."""
from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from test_module import SMALL, planned as planned_text

from mkgen.emit.module import write_module
from mkgen.plan.regions import Buffer
from mkgen.plan.vmem import vmem_bytes
from mkgen.prove import compile as proof
from mkgen.prove.compile import (
    CompileResult, as_dict, compile_spec, compile_variant, judge, run_worker, worker_environment)
from mkgen.prove.worker_compile import moved
from mkgen.prove.vmem_report import (
    OUTPUT, SCRATCH, SPILL, Allocation, BufferBytes, NoReport, Planned, compare, planned, read_report, spilled)

ALLOCATED = Allocation(SCRATCH, "f32[8,128]", 4096)


@pytest.fixture
def small_plan(tmp_path):
    (tmp_path / "small.yaml").write_text(SMALL)
    return planned_text(tmp_path / "small.yaml")


def check(result: CompileResult, plan, seconds: float) -> None:
    """All that a full-size variant promises; seconds: of processor time, since tests share the machine."""
    assert result.verdict == "pass", result.reasons
    assert result.planned_vmem_bytes == sum(plan.vmem(result.rows).values())
    assert result.vmem_bytes + result.lifted_bytes == result.planned_vmem_bytes
    assert result.lifted_bytes < 0.05 * result.planned_vmem_bytes
    assert result.spill_bytes <= plan.spec.build.spill_kib * 1024
    assert result.vmem_bytes + result.spill_bytes <= plan.target.vmem_usable_bytes
    assert 0 <= result.bytes_per_core - plan.bytes_per_core(result.rows) <= 4096
    assert 0 < result.lower_seconds < result.compile_seconds and 0 < result.cpu_seconds < seconds


# -- the two models at full size ---------------------------------------------------------------------------------------

def test_qwen_compiles_as_planned(qwen_plan):
    results = compile_spec(qwen_plan)
    assert [r.rows for r in results] == list(qwen_plan.spec.build.rows)
    for result in results:
        check(result, qwen_plan, 10)
    as_json = json.loads(json.dumps(as_dict(results)))
    assert as_json["verdict"] == "pass" and as_json["variants"]["8"]["code_bytes"] == results[1].code_bytes


@pytest.mark.parametrize("rows", [1, 8])
def test_kimi_compiles_as_planned(kimi_plan, rows):
    check(compile_variant(kimi_plan, rows), kimi_plan, 20)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 8])
def test_kimi_decodes_several_steps_a_call_and_copies_nothing(kimi_plan, rows):
    result = compile_variant(kimi_plan, rows, steps=2)
    check(result, kimi_plan, 20)
    assert result.steps == 2 and result.temporary_bytes < 2**20     # the smallest state of a core has 7.6 MB


ALIASED = {"aliased = held if interpret else {}": "aliased = held", 'f"{n}_in" if interpret else n for': 'f"{n}_in" for',
           "if interpret else state": ""}


@pytest.mark.parametrize("steps", [1, 2])
def test_a_copied_state_is_found(small_plan, tmp_path, steps):
    """States as aliased results, which XLA copies in a kernel with remote copies: small ones, so that no limit on bytes shows it."""
    write_module(small_plan, tmp_path / proof.PACKAGE)
    good = proof.compile_rows(small_plan, 1, steps, tmp_path)
    assert (good.verdict, good.steps) == ("pass", steps), good.reasons
    kernel = tmp_path / proof.PACKAGE / "kernel.py"
    text = kernel.read_text()
    for old, new in ALIASED.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    kernel.write_text(text)
    bad = proof.compile_rows(small_plan, 1, steps, tmp_path)
    assert bad.verdict == "fail" and bad.temporary_bytes < proof.COPY_BYTES
    assert [r for r in bad.reasons if "XLA moves" in r], bad.reasons


PROGRAM = """
  %p.1 = u32[40,128]{1,0:T(8,128)} parameter(0), sharding={replicated}
  %p.2 = f32[6,8,128]{2,1,0:T(8,128)} parameter(1)
  %w = (s32[]{:T(128)}, u32[40,128]{1,0:T(8,128)}) while(%t), condition=%c, body=%b
  %g = u32[40,128]{1,0:T(8,128)} get-tuple-element(%w), index=1
  ROOT %a.2 = f32[6,8,128]{2,1,0:T(8,128)S(1)} add(%p.2, %p.2)
  %copy-done.1 = u32[40,128]{1,0:T(8,128)} copy-done(%copy-start.1)
  %k = f32[8,128]{1,0:T(8,128)} copy(%x)
"""


def test_what_xla_moves_is_read_off_the_program():
    from jax import ShapeDtypeStruct
    tape, state = ShapeDtypeStruct((80, 128), "uint32"), ShapeDtypeStruct((12, 8, 128), "float32")
    assert moved(PROGRAM, {"tape": tape, "state": state}, 2) == ["add f32[6,8,128]", "copy-done u32[40,128]"]
    with pytest.raises(ValueError, match=r"no parameter u32\[80,128\]"):
        moved(PROGRAM, {"tape": tape}, 1)


# -- the padding rule --------------------------------------------------------------------------------------------------

SHAPES = [*((rows, 128) for rows in (1, 2, 3, 4, 5, 8, 9, 17, 32, 33)), (8, 1), (1, 896), (3, 8, 1152),
          (2, 10, 1, 7168), (2, 10, 8, 7168), (3, 5, 1, 128), (2, 3, 5, 130), (8, 224), (5, 4, 128),
          (1,), (256,), (1000,), (1500,)]
PROBES = [Buffer(f"probe{n}", shape, dtype, "vmem", "") for n, (dtype, shape) in
          enumerate((d, s) for d in ("f32", "u32", "i32", "bf16") for s in SHAPES)]

PROBE_KERNEL = """
    import json, sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.experimental import topologies, pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    types = {"f32": jnp.float32, "u32": jnp.uint32, "i32": jnp.int32, "bf16": jnp.bfloat16}
    shapes = [jax.ShapeDtypeStruct(tuple(s), types[d]) for s, d in json.loads(sys.argv[1])]
    chip = topologies.get_topology_desc(platform="tpu", topology_name="tpu7x:1x1x1")
    mesh = Mesh(np.array(chip.devices[:1]), ("tp",))
    n = len(shapes)

    def kernel(*refs):
        for hbm, vmem in zip(refs[:n], refs[n:2 * n]):                     # a buffer that nothing uses is not allocated
            for copy in (pltpu.make_async_copy(hbm, vmem, refs[-1]), pltpu.make_async_copy(vmem, hbm, refs[-1])):
                copy.start()
                copy.wait()

    def call():
        return pl.pallas_call(kernel, out_shape=shapes, out_specs=[pl.BlockSpec(memory_space=pltpu.HBM)] * n,
                              scratch_shapes=[pltpu.VMEM(s.shape, s.dtype) for s in shapes] + [pltpu.SemaphoreType.DMA],
                              compiler_params=pltpu.CompilerParams(vmem_limit_bytes=60 * 2**20), name="probe")()

    with jax.set_mesh(mesh):
        jax.jit(call, out_shardings=NamedSharding(mesh, P())).lower().compile()
"""


def test_padding_rule_is_the_compilers(tmp_path):
    wanted = json.dumps([(b.shape, b.dtype) for b in PROBES])
    subprocess.run([sys.executable, "-c", textwrap.dedent(PROBE_KERNEL), wanted], env=worker_environment(tmp_path),
                   check=True, capture_output=True, timeout=300)
    allocated = [a.bytes for a in read_report(tmp_path) if a.tag == SCRATCH]
    assert {(b.shape, b.dtype): size for b, size in zip(PROBES, allocated, strict=True)} == \
        {(b.shape, b.dtype): vmem_bytes(b, 1) for b in PROBES}


# -- the comparison ----------------------------------------------------------------------------------------------------

def names(rows: list[BufferBytes]) -> list[tuple]:
    return [(b.name, b.planned, b.actual) for b in rows]


def test_buffers_are_matched_in_order():
    wanted = [Planned("a", "f32[8,128]", 4096), Planned("b", "s32[8,1]", 4096), Planned("c", "f32[8,128]", 4096)]
    rows = compare([ALLOCATED, ALLOCATED], wanted, [])
    assert names(rows) == [("a", 4096, 4096), ("b", 4096, None), ("c", 4096, 4096)]


def test_what_the_plan_does_not_know_is_named():
    odd = Allocation(SCRATCH, "f32[16,128]", 8192)
    rows = compare([ALLOCATED, odd, Allocation("constants", None, 512)], [Planned("a", "f32[8,128]", 4096)], [])
    assert names(rows)[1:] == [("unknown scratch f32[16,128]", None, 8192), ("constants", None, 512)]


def test_a_missing_output_is_no_lifted_buffer():
    assert names(compare([], [], [Planned("logits", "f32[8,128]", 4096)])) == [("logits", 4096, 0)]


def plan_as_allocated(plan) -> list[Allocation]:
    """What the compiler would say if it did just what the plan says."""
    scratch = [planned(b, 1) for b in plan.buffers.values() if b.space == "vmem"]
    outputs = [planned(b, 1) for b in plan.buffers.values() if b.space == "out"]
    return [*(Allocation(SCRATCH, b.shape, b.bytes) for b in scratch),
            *(Allocation(f"{OUTPUT}{n}", b.shape, b.bytes) for n, b in enumerate(outputs))]


def got(plan, **changes) -> dict:
    return {"compile_seconds": 2.0, "lower_seconds": 1.0, "cpu_seconds": 2.0, "temporary_bytes": 0, "code_bytes": 1,
            "argument_bytes": plan.bytes_per_core(1) + 1024, "moved": []} | changes


def test_verdict(qwen_plan):
    allocated = plan_as_allocated(qwen_plan)
    good = judge(qwen_plan, 1, got(qwen_plan), allocated)
    assert (good.verdict, good.reasons, good.lifted_bytes, good.spill_bytes) == ("pass", (), 0, 0)
    assert good.vmem_bytes == good.planned_vmem_bytes
    ring = next(n for n, a in enumerate(allocated) if a.bytes == max(x.bytes for x in allocated))
    larger = [dataclasses.replace(a, bytes=a.bytes + 4096) if n == ring else a for n, a in enumerate(allocated)]
    left = qwen_plan.target.vmem_usable_bytes - sum(qwen_plan.vmem(1).values())
    assert left >= qwen_plan.spec.build.spill_kib * 1024
    assert judge(qwen_plan, 1, got(qwen_plan), [*allocated, Allocation(SPILL, None, left)]).verdict == "pass"
    spills = [*allocated, Allocation(SPILL, None, left + 1)]
    assert spilled(spills) == left + 1
    for said, given, changes in (
            ("VMEM ", larger, {}), ("spills", spills, {}), ("copies states", allocated, {"temporary_bytes": 2**27}),
            ("HBM: planned", allocated, {"argument_bytes": 2**20}), ("XLA moves", allocated, {"moved": ["copy u32[8,128]"]}), ("boom", None, {"error": "boom"})):
        bad = judge(qwen_plan, 1, got(qwen_plan, **changes), given)
        assert bad.verdict == "fail" and len(bad.reasons) == 1 and said in bad.reasons[0]
    assert as_dict([good, bad])["verdict"] == as_dict([])["verdict"] == "fail"


# -- the worker and the report, when they fail -------------------------------------------------------------------------

def test_a_report_that_is_not_there_or_reads_differently(tmp_path):
    with pytest.raises(NoReport, match="no VMEM report"):
        read_report(tmp_path)
    for page in ("<html></html>", "<script>const DATA ={\"other\": 1};</script>"):
        (tmp_path / "1-vmem_report.html").write_text(page)
        with pytest.raises(NoReport, match="reads differently"):
            read_report(tmp_path)


def package(directory: Path, text: str) -> dict:
    (directory / "sick").mkdir()
    (directory / "sick" / "__init__.py").write_text(text)
    return {"directory": str(directory), "package": "sick", "rows": 1, "steps": 1, "topology": "tpu7x:1x1x1", "ranks": 1}


def test_a_python_error_is_reported(tmp_path):
    said = run_worker(package(tmp_path, "raise ValueError('not lowered')"), tmp_path / "job", tmp_path / "dump")
    assert said == {"error": "ValueError: not lowered"}


def test_an_abort_is_survived(tmp_path):
    text = "import os, sys\nsys.stderr.write('Check failed: tile\\n')\nsys.stderr.flush()\nos.abort()"
    said = run_worker(package(tmp_path, text), tmp_path / "job", tmp_path / "dump")
    assert "died of signal 6" in said["error"] and "Check failed: tile" in said["error"]


def test_the_environment_is_the_workers_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/nowhere")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--other")
    made = worker_environment(tmp_path)
    assert "XLA_FLAGS" not in made and "--other" not in made["LIBTPU_INIT_ARGS"]
    assert str(Path(proof.__file__).parents[2]) in made["PYTHONPATH"].split(os.pathsep)
