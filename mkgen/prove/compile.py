"""The full-size program through the real TPU compiler, ahead of time and without a TPU, one subprocess a row variant.

`compile_spec(plan)` answers what only the compiler knows: seconds, VMEM by buffer against the plan, spills, code size, bytes
in HBM. A variant passes if VMEM is as planned, spills stay within the spec's reserve, and nothing is copied that the plan
does not know of.
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
from mkgen.plan.vmem import vmem_bytes
from mkgen.prove.vmem_report import BufferBytes, NoReport, compare, read_report, spilled

PACKAGE = "compiled_module"
TIMEOUT_SECONDS = 1800
TAIL_LINES, TAIL_COLUMNS = 24, 400
KIB, MIB = 1024, 2**20
SMALL_BYTES = 64 * KIB                   # HBM that no plan counts: tokens, positions and tables, padded
# all that a dump writes but the report: with texts of every pass, a compile takes half as long again, and 300 MB
DUMP_FLAGS = "--xla_jf_dump_llo_pass_label_regex=vmem_report"


@dataclass(frozen=True)
class CompileResult:
    """One row variant. Seconds are wall clock, without imports; bytes are a core's; None: the compiler did not get there."""
    rows: int
    verdict: str                         # pass | fail
    reasons: tuple[str, ...]             # of a failure
    compile_seconds: float | None        # lowering (tracing, Mosaic) and compiling
    lower_seconds: float | None          # the first part of it
    vmem_bytes: int | None               # all allocations of the kernel, spills not counted
    planned_vmem_bytes: int
    spill_bytes: int | None
    bytes_per_core: int | None           # HBM: arguments of the program
    planned_bytes_per_core: int
    temporary_bytes: int | None          # HBM: what XLA puts around the kernel, copies of states above all
    code_bytes: int | None
    buffers: tuple[BufferBytes, ...] = ()


def compile_spec(plan: Plan, rows: int | Iterable[int] | None = None) -> list[CompileResult]:
    """Compiles each variant in `rows` (all of the spec's by default), one after another so that seconds mean something."""
    wanted = plan.spec.build.rows if rows is None else (rows,) if isinstance(rows, int) else tuple(rows)
    with tempfile.TemporaryDirectory(prefix="mkgen-compile-") as scratch:
        write_module(plan, Path(scratch) / PACKAGE)
        return [compile_rows(plan, n, Path(scratch)) for n in wanted]


def compile_variant(plan: Plan, rows: int) -> CompileResult:
    """One variant alone."""
    return compile_spec(plan, rows)[0]


def as_dict(results: Iterable[CompileResult]) -> dict:
    """For JSON: the verdict over all, and every variant by its rows."""
    results = list(results)
    good = bool(results) and all(r.verdict == "pass" for r in results)
    return {"verdict": "pass" if good else "fail", "variants": {str(r.rows): asdict(r) for r in results}}


# -- one variant --------------------------------------------------------------------------------------------------------

def compile_rows(plan: Plan, rows: int, scratch: Path) -> CompileResult:
    """The module that stands in scratch/PACKAGE, for `rows` rows."""
    dump = scratch / f"dump{rows}"
    topology, _ = plan.target.topology(plan.mesh.ranks)
    job = {"directory": str(scratch), "package": PACKAGE, "rows": rows, "topology": topology, "ranks": plan.mesh.ranks}
    got = run_worker(job, scratch / f"job{rows}", dump)
    if "error" in got:
        return judge(plan, rows, got, None)
    try:
        return judge(plan, rows, got, read_report(dump))
    except NoReport as error:
        return judge(plan, rows, got | {"error": str(error)}, None)


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
    return {"error": f"the compiler {died}; its last words:\n{tail(said.read_text(encoding='utf-8', errors='replace'))}"}


def worker_environment(dump: Path) -> dict[str, str]:
    """No TPU is looked for, several may compile at once, nothing comes from a cache, and libtpu leaves its VMEM report."""
    keep = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    return keep | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
                   "JAX_ENABLE_COMPILATION_CACHE": "false", "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={dump} {DUMP_FLAGS}"}


def tail(text: str) -> str:
    """The last lines, each cut to a bearable width."""
    return "\n".join(line[:TAIL_COLUMNS] for line in text.strip().split("\n")[-TAIL_LINES:])


def head(text: str) -> str:
    return "\n".join(line[:TAIL_COLUMNS] for line in text.strip().split("\n")[:TAIL_LINES])


# -- the verdict --------------------------------------------------------------------------------------------------------

def judge(plan: Plan, rows: int, got: dict, allocations: list | None) -> CompileResult:
    """got: what the worker found, or an error; allocations: None without a report."""
    reasons, buffers = [], []
    planned, planned_hbm = sum(plan.vmem(rows).values()), plan.bytes_per_core(rows)
    if "error" in got:
        reasons.append(head(got["error"]))
    if allocations is not None:
        buffers = compare(allocations, *planned_buffers(plan, rows))
        reasons += [f"VMEM {b.name}: planned {amount(b.planned)}, allocated {amount(b.actual)}"
                    for b in buffers if b.planned != b.actual]
        reserve = plan.spec.build.spill_kib * KIB
        if spilled(allocations) > reserve:
            reasons.append(f"the compiler spills {spilled(allocations):,} bytes; build.spill_kib leaves {reserve:,}")
    if "argument_bytes" in got:
        if not 0 <= got["argument_bytes"] - planned_hbm <= SMALL_BYTES:
            reasons.append(f"HBM: planned {planned_hbm:,} bytes a core, the program's arguments have {got['argument_bytes']:,}")
        if got["temporary_bytes"] > MIB:
            reasons.append(f"XLA keeps {got['temporary_bytes']:,} bytes beside the kernel: states are copied on every step")
    known = None if allocations is None else spilled(allocations)
    return CompileResult(
        rows, "fail" if reasons else "pass", tuple(reasons), got.get("compile_seconds"), got.get("lower_seconds"),
        None if allocations is None else sum(a.bytes for a in allocations) - known, planned, known,
        got.get("argument_bytes"), planned_hbm, got.get("temporary_bytes"), got.get("code_bytes"), tuple(buffers))


def planned_buffers(plan: Plan, rows: int) -> tuple[dict, dict]:
    """(scratch, outputs): name -> (dims, bytes) in the kernel's order."""
    return tuple({b.name: (b.dims(rows), vmem_bytes(b, rows)) for b in plan.buffers.values() if b.space == space}
                 for space in ("vmem", "out"))


def amount(n: int | None) -> str:
    return "nothing" if n is None else f"{n:,}"
