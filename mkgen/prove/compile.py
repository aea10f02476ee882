"""The full-size program through the real TPU compiler, ahead of time and without a TPU, one subprocess a row variant.

`compile_spec(plan)` answers what only the compiler knows: seconds, VMEM by buffer against the plan, spills, code size,
bytes in HBM. A variant passes if VMEM is as planned, spills fit into what the plan leaves, and XLA copies no weight and no state:
neither in a call of one step nor, if that is asked for, in the loop of a call of several.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mkgen.emit.module import write_module
from mkgen.plan.plan import Plan
from mkgen.prove.vmem_report import Allocation, BufferBytes, NoReport, compare, lifted, planned, read_report, spilled

PACKAGE = "compiled_module"
TIMEOUT_SECONDS = 1800
TAIL_LINES, TAIL_COLUMNS = 24, 400
KIB = 1024
SMALL_BYTES = 64 * KIB                   # HBM that no plan counts: tokens and positions, padded
COPY_BYTES = 4 * 2**20                   # HBM beside the kernel: outputs and tables, far less than any state
MEASURED = ("compile_seconds", "lower_seconds", "cpu_seconds", "temporary_bytes", "code_bytes")    # by the worker
# only the report: 0.5 s more for the largest kernel; the text of all passes doubles the time, and takes 300 MB
DUMP_FLAGS = "--xla_jf_dump_llo_pass_label_regex=vmem_report"


@dataclass(frozen=True)
class CompileResult:
    """One row variant. Seconds are wall clock without imports, bytes a core's; None: the compiler did not get there."""
    rows: int
    verdict: str                                 # pass | fail
    reasons: tuple[str, ...]                     # of a failure
    compile_seconds: float | None                # lowering (tracing, Mosaic) and compiling
    lower_seconds: float | None                  # the first part of it
    cpu_seconds: float | None                    # the same, of all threads: a busy machine does not raise it
    planned_vmem_bytes: int
    bytes_per_core: int | None                   # HBM: arguments of the program
    planned_bytes_per_core: int
    temporary_bytes: int | None                  # HBM beside arguments and results
    code_bytes: int | None
    vmem_bytes: int | None = None                # the kernel's allocations, without spills
    lifted_bytes: int | None = None              # planned, but kept in registers: vmem + lifted = planned
    spill_bytes: int | None = None
    buffers: tuple[BufferBytes, ...] = ()
    steps: int = 1                               # that one call decodes


def compile_spec(plan: Plan, rows: int | Iterable[int] | None = None, steps: int = 1) -> list[CompileResult]:
    """Compiles the variants in `rows` (by default all of the spec), one after another: seconds shall mean something.
    steps: that a call of the program decodes."""
    wanted = plan.spec.build.rows if rows is None else (rows,) if isinstance(rows, int) else tuple(rows)
    with tempfile.TemporaryDirectory(prefix="mkgen-compile-") as scratch:
        write_module(plan, Path(scratch) / PACKAGE)
        return [compile_rows(plan, n, steps, Path(scratch)) for n in wanted]


def compile_variant(plan: Plan, rows: int, steps: int = 1) -> CompileResult:
    """One variant alone."""
    return compile_spec(plan, rows, steps)[0]


def as_dict(results: Iterable[CompileResult]) -> dict:
    """For JSON: the verdict over all, and every variant by its rows."""
    results = list(results)
    good = bool(results) and all(r.verdict == "pass" for r in results)
    return {"verdict": "pass" if good else "fail", "variants": {str(r.rows): asdict(r) for r in results}}


# -- one variant -------------------------------------------------------------------------------------------------------

def compile_rows(plan: Plan, rows: int, steps: int, scratch: Path) -> CompileResult:
    """The module that stands in scratch/PACKAGE, for `rows` rows and `steps` steps a call."""
    dump = scratch / f"dump{rows}"
    topology, _ = plan.target.topology(plan.mesh.ranks)
    job = {"directory": str(scratch), "package": PACKAGE, "rows": rows, "steps": steps, "topology": topology, "ranks": plan.mesh.ranks}
    got = run_worker(job, scratch / f"job{rows}", dump)
    if "error" in got:
        return judge(plan, rows, got, None, steps)
    try:
        return judge(plan, rows, got, read_report(dump), steps)
    except NoReport as error:
        return judge(plan, rows, got | {"error": str(error)}, None, steps)


def run_worker(job: dict, stem: Path, dump: Path) -> dict:
    """What the worker found, or {"error": why}: its own words, or the end of its stderr if it died."""
    asked, answer, said = (stem.with_suffix(s) for s in (".json", ".out.json", ".err"))
    asked.write_text(json.dumps(job), encoding="utf-8")
    command = [sys.executable, "-m", f"{__package__}.worker_compile", str(asked), str(answer)]
    with said.open("w", encoding="utf-8") as err:
        try:
            code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=err, stderr=err, timeout=TIMEOUT_SECONDS,
                                  env=worker_environment(dump)).returncode
        except subprocess.TimeoutExpired:
            return {"error": f"the compiler was stopped after {TIMEOUT_SECONDS} s"}
    if answer.exists():
        return json.loads(answer.read_text(encoding="utf-8"))
    died = f"died of signal {-code}" if code < 0 else f"ended with exit code {code}"
    words = tail(said.read_text(encoding="utf-8", errors="replace"))
    return {"error": f"the compiler {died}; its last words:\n{words}"}


def worker_environment(dump: Path, flags: str = DUMP_FLAGS) -> dict[str, str]:
    """No TPU is looked for, several may compile at once, no cache answers, and libtpu leaves what `flags` ask for: its VMEM report."""
    keep = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return keep | {
        "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false",
        "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} {flags}",
    }


def tail(text: str) -> str:
    """The last lines, each cut to a bearable width."""
    return "\n".join(line[:TAIL_COLUMNS] for line in text.strip().split("\n")[-TAIL_LINES:])


def head(text: str) -> str:
    return "\n".join(line[:TAIL_COLUMNS] for line in text.strip().split("\n")[:TAIL_LINES])


# -- the verdict -------------------------------------------------------------------------------------------------------

def judge(plan: Plan, rows: int, got: dict, allocations: list[Allocation] | None, steps: int = 1) -> CompileResult:
    """got: what the worker found, or an error; allocations: None without a report."""
    reasons = [head(got["error"])] if "error" in got else []
    vmem, reason = judge_vmem(plan, rows, allocations) if allocations is not None else ({}, [])
    hbm = plan.bytes_per_core(rows)
    reasons += reason + (judge_hbm(hbm, got) if "argument_bytes" in got else [])
    measured = {key: got.get(key) for key in MEASURED}
    return CompileResult(
        rows=rows, verdict="fail" if reasons else "pass", reasons=tuple(reasons),
        planned_vmem_bytes=sum(plan.vmem(rows).values()), bytes_per_core=got.get("argument_bytes"),
        planned_bytes_per_core=hbm, steps=steps, **measured, **vmem)


def judge_vmem(plan: Plan, rows: int, allocations: list[Allocation]) -> tuple[dict, list[str]]:
    """(fields of the result, what is wrong)."""
    places = plan.buffers.values()
    scratch, outputs = ([planned(b, rows) for b in places if b.space == space] for space in ("vmem", "out"))
    buffers, spills = compare(allocations, scratch, outputs), spilled(allocations)
    wrong = [f"VMEM {b.name}: planned {b.planned or 0:,} bytes, allocated {b.actual:,}"
             for b in buffers if b.actual is not None and b.actual != b.planned]
    left = plan.target.vmem_usable_bytes - sum(plan.vmem(rows).values())                     # build.spill_kib at the least
    if spills > left:
        wrong.append(f"the compiler spills {spills:,} bytes; the plan leaves {left:,} of VMEM"
                     f"; fix: --set build.spill_kib={-(-spills // KIB)}, and what the plan then asks for")
    total = sum(a.bytes for a in allocations) - spills
    fields = {"vmem_bytes": total, "lifted_bytes": lifted(buffers), "spill_bytes": spills, "buffers": tuple(buffers)}
    return fields, wrong


def judge_hbm(planned_bytes: int, got: dict) -> list[str]:
    wrong, arguments, beside = [], got["argument_bytes"], got["temporary_bytes"]
    if not 0 <= arguments - planned_bytes <= SMALL_BYTES:
        wrong.append(f"HBM: planned {planned_bytes:,} bytes a core, the program's arguments have {arguments:,}")
    if beside > COPY_BYTES:
        wrong.append(f"HBM: XLA keeps {beside:,} bytes beside the kernel; it copies states on every step")
    return wrong + [f"HBM: XLA moves what the kernel reads and writes in place: {what}" for what in got["moved"]]
