"""What `verify` and `compile` say. Their results are records: dataclasses or mappings with the fields named here."""
from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from typing import Any

from rich.console import Console

from mkgen import show
from mkgen.plan.plan import Plan
from mkgen.spec.model import Spec

COMPILED = ("compile_seconds", "vmem_bytes", "planned_vmem_bytes", "bytes_per_core")
RUNG = ("name", "compared", "error", "bound", "verdict")


def record(of: Any) -> dict[str, Any]:
    """A result as a dict."""
    if is_dataclass(of):
        return asdict(of)
    return dict(of) if isinstance(of, Mapping) else dict(vars(of))


def plain(value: Any) -> str:
    """One cell: numbers short, what is missing empty."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return show.number(value) if isinstance(value, int) else f"{value:.4g}"


def compiled(made: Plan, results: Iterable[Any], as_json: bool) -> bool:
    """results: a record a row variant, with `rows`, `verdict`, `reasons`, `COMPILED`, `buffers` and whatever else was
    measured. True if all are good."""
    each = {r["rows"]: r for r in map(record, results)}
    good = bool(each) and all(r["verdict"] == "pass" for r in each.values())
    if as_json:
        first = next(iter(each.values()), {})
        top = {key: first.get(key) for key in COMPILED}
        show.put_json({**top, "verdict": show.verdict(good), "variants": {str(rows): r for rows, r in each.items()}})
        return good
    out = show.console()
    cores, context = show.several(made.mesh.ranks, "core"), made.spec.build.context
    steps = max((r.get("steps", 1) for r in each.values()), default=1)
    several = f", {steps} steps a call" if steps > 1 else ""
    out.print(f"{made.spec.model.name} compiled for {cores} of {made.target.name}, context {context}{several}")
    out.print(allocations(each))
    out.print()
    t = show.table("", "", *(f">{show.several(rows, 'row')}" for rows in each))
    scalars = (key for r in each.values() for key, v in r.items() if not isinstance(v, (dict, list, tuple)))
    for key in dict.fromkeys((*COMPILED, *scalars)):
        if key not in ("rows", "steps", "verdict"):
            t.add_row(key.replace("_", " "), *(plain(r.get(key)) for r in each.values()))
    t.add_row("verdict", *(show.coloured(r["verdict"]) for r in each.values()))
    out.print(t)
    for rows, r in each.items():
        for reason in r.get("reasons", ()):
            out.print(f"{show.several(rows, 'row')}: {reason}")
    out.print("verdict:", show.coloured(show.verdict(good)))
    return good


def allocations(each: dict[int, dict]):
    """The compiler's VMEM against the plan, a buffer a line; empty where the compiler did not get so far."""
    columns = [f">{what}, {show.several(rows, 'row')}" for rows in each for what in ("planned", "allocated")]
    t = show.table("VMEM, bytes", "buffer", *columns, "")
    found = {rows: {b["name"]: b for b in r.get("buffers", ())} for rows, r in each.items()}
    for name in dict.fromkeys(name for buffers in found.values() for name in buffers):
        pairs = [(b.get(name, {}).get("planned"), b.get(name, {}).get("actual")) for b in found.values()]
        cells = ["none" if size is None else plain(size) for pair in pairs for size in pair]
        t.add_row(name, *cells, remark(pairs))
    return t


def remark(pairs: list[tuple[int | None, int | None]]) -> str:
    """What to say of (planned, allocated) bytes: a buffer that lives in registers takes none."""
    if all(planned == actual for planned, actual in pairs):
        return ""
    return "in registers" if all(actual in (None, 0, planned) for planned, actual in pairs) else "differs"


def verified(spec: Spec, results: Iterable[Any], as_json: bool) -> bool:
    """results: one record a rung, with `RUNG` and, for a skipped one, `reason`. True if none failed and one was run."""
    rungs = [record(r) for r in results]
    good = any(r["verdict"] == "pass" for r in rungs) and all(r["verdict"] in ("pass", "skipped") for r in rungs)
    if as_json:
        show.put_json({"verdict": show.verdict(good), "rungs": rungs})
        return good
    t = show.table(f"{spec.model.name}: mini model against the reference", "rung", "compared", ">error", ">bound",
                   "verdict")
    t.columns[0].no_wrap = True
    for r in rungs:
        word = show.coloured(r["verdict"])
        if r.get("reason") and r["verdict"] != "pass":
            word = word + f": {r['reason']}"
        t.add_row(*(plain(r.get(key)) for key in RUNG[:4]), word)
    out = show.console()
    out.print(t)
    out.print("verdict:", show.coloured(show.verdict(good)))
    return good


def compared(spec: Spec, found: Any, as_json: bool) -> None:
    """What `compare` found."""
    good = show.verdict(found.good)
    if as_json:
        show.put_json({"model": spec.model.name, "verdict": good, **asdict(found)})
        return
    sequence, position, token = found.at
    text = (f"{spec.model.name}: largest difference {found.error:.2g}, allowed {found.bound:.2g} (sequence {sequence}, position {position}, "
            f"token {token}); the same choice at {100 * found.same_choice:.1f} % of the positions")
    if found.first_bad is not None:
        text += f"\nfirst position out of bounds: {found.first_bad}"
    show.console().print(text)
    show.console().print("verdict:", show.coloured(good))


@contextmanager
def counting(title: str):
    """tell(done, total): a bar on stderr; nothing is drawn where it is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
