"""`mkgen table`: what a set of specs comes to, one line a model: built, planned, checked, and compiled at full size."""
from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from mkgen import show
from mkgen.errors import MkgenError

HEAD = """# The models of `model_specs/`

Made by `mkgen table -o docs/models.md`{set}: every spec is read, planned within the memory of its chip and mesh, checked, {what}.

* parameters: counted from the shapes of the text decoder
* HBM: weights, states and tables of one core, at the largest row variant, for the spec's context
* streamed: bytes that a core reads of its weights in a step (routed experts: a mean share at uniform routing); floor: what that takes at
  the chip's HBM rate, exchanges and states not counted: no prediction
* padding: part of the streamed bytes that is there for alignment or even shares only
* VMEM: planned, at the largest row variant
{more}
"""
COMPILED = "* compiled: wall-clock seconds of the TPU compiler, by rows, on whatever machine made this page\n"


@dataclass(frozen=True)
class Line:
    """One model. `error` says why there is nothing else."""
    name: str
    parameters: int = 0
    mixer: str = ""
    ffn: str = ""
    formats: str = ""
    mesh: str = ""
    rows: tuple[int, ...] = ()
    hbm_bytes: int = 0
    streamed_bytes: tuple[int, ...] = ()
    floor_ms: tuple[float, ...] = ()
    padding: tuple[float, ...] = ()
    vmem_bytes: int = 0
    findings: int = 0
    compile_seconds: tuple[float, ...] = ()
    verdict: str = "fail"
    error: str = ""


def line(path: Path, compile_too: bool) -> Line:
    """Everything of one spec. One that cannot be read, planned or printed is a line with an error; the others go on."""
    try:
        return measured(path, compile_too)
    except MkgenError as error:
        return Line(path.stem, error=str(error).splitlines()[0])
    except Exception as error:                                     # a defect, which `mkgen build` of this spec shows in full
        return Line(path.stem, error=f"internal error: {type(error).__name__}: {error}".splitlines()[0])


def measured(path: Path, compile_too: bool) -> Line:
    from mkgen.check import check_plan
    from mkgen.graph.build import build_graph
    from mkgen.plan.figures import figures
    from mkgen.plan.planner import make_plan
    from mkgen.spec import params
    from mkgen.spec.load import load_spec
    from mkgen.targets import load_target
    spec = load_spec(path)
    plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
    model, build = spec.model, spec.build
    rows = tuple(sorted(build.rows))
    each = [figures(plan, r) for r in rows]
    findings, seconds, error = len(list(check_plan(plan))), (), ""
    if compile_too:
        from mkgen.prove.compile import compile_spec
        results = compile_spec(plan, rows)
        seconds = tuple(round(r.compile_seconds, 1) for r in results if r.verdict == "pass")
        error = "; ".join(f"{r.rows} rows: {' '.join(reason.split())}" for r in results if r.verdict != "pass" for reason in r.reasons)[:200]
    return Line(
        model.name, params.count(model), model.mixer, model.ffn,
        ", ".join(f"{family} {fmt}" for family, fmt in build.formats.items() if fmt != "bf16") or "bf16",
        f"{build.ranks} x {build.chip} core", rows, each[-1]["bytes_per_core"], tuple(f["streamed_bytes_per_step"] for f in each),
        tuple(1e3 * f["floor_seconds"] for f in each), tuple(f["padding_fraction"] for f in each), each[-1]["planned_vmem_bytes"],
        findings, seconds, show.verdict(not findings and not error), error or (f"{findings} findings of the checker" if findings else ""))


def markdown(lines: Iterable[Line], compiled: bool) -> str:
    """The page."""
    head = HEAD.format(set="" if compiled else " --no-compile", what="and compiled at full size by the TPU compiler" if compiled else "not compiled",
                       more=COMPILED if compiled else "")
    columns = ["spec", "parameters", "mixers", "ffns", "weights", "mesh", "rows", "HBM GB a core", "VMEM MiB", "streamed GB", "floor ms",
               "padding %", *["compiled s"] * compiled, "verdict"]
    out = [head, "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]

    def by_rows(values: tuple, form: str) -> str:
        return " / ".join(format(v, form) for v in values)

    for x in lines:
        cells = [f"[{x.name}](../model_specs/{x.name}.yaml)"]
        if x.mesh:
            cells += [f"{x.parameters:,}", f"`{x.mixer}`", f"`{x.ffn}`", x.formats, x.mesh, by_rows(x.rows, "d"), f"{x.hbm_bytes / 1e9:.1f}",
                      f"{x.vmem_bytes / 2**20:.1f}", by_rows(tuple(b / 1e9 for b in x.streamed_bytes), ".2f"), by_rows(x.floor_ms, ".3f"),
                      by_rows(tuple(100 * p for p in x.padding), ".2f"), *[by_rows(x.compile_seconds, ".1f")] * compiled]
        else:
            cells += [""] * (len(columns) - 2)
        out.append("| " + " | ".join([*cells, x.verdict if not x.error else f"{x.verdict}: {x.error}".replace("|", "\\|")]) + " |")
    return "\n".join(out) + "\n"


def make(paths: Iterable[Path], compile_too: bool, out: Path | None, as_json: bool) -> bool:
    """Makes all lines, with a bar on stderr, and shows or writes them. True if every one is good."""
    paths, lines = sorted(paths), []
    with bar(len(paths)) as advance:
        for path in paths:
            advance(path.stem)
            lines.append(line(path, compile_too))
    if out:
        out.write_text(markdown(lines, compile_too))
    if as_json:
        print(json.dumps([asdict(x) for x in lines], indent=2))
    elif not out:
        print(markdown(lines, compile_too))
    else:
        print(f"{out}: {show.several(len(lines), 'model')}, {sum(x.verdict == 'pass' for x in lines)} good")
    return bool(lines) and all(x.verdict == "pass" for x in lines)


def bar(total: int):
    """A bar on stderr that names what is at work; nothing is drawn where it is no terminal."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    @contextmanager
    def shown():
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
        with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("", total=total, completed=-1)
            advance: Callable[[str], None] = lambda name: progress.update(task, advance=1, description=name)
            yield advance

    return shown()
