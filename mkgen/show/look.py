"""What `report` and `trace` write, and what they say about it."""
from __future__ import annotations

from pathlib import Path

from rich.console import Console

from mkgen import show
from mkgen.check import check_plan
from mkgen.plan.plan import Plan
from mkgen.profile.compiling import NotProfiled
from mkgen.show import trace as events
from mkgen.show.report.forecast import Forecast, forecast
from mkgen.show.report.page import page


def report(made: Plan, target: Path, as_json: bool, **terms) -> bool:
    """Writes the page of the first row variant; True if the checker finds nothing. Without a forecast it says why there is none.
    terms: of the forecast."""
    rows, findings = made.spec.build.rows[0], list(check_plan(made))
    found, missing = None, ""
    try:
        with waiting(made):
            found = forecast(made, rows, **terms)
    except NotProfiled as error:
        missing = str(error)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page(made, rows, findings, found, missing), encoding="utf-8")
    tell(made, rows, target, findings, found, missing, as_json)
    return not findings


def trace(made: Plan, target: Path, as_json: bool, **terms) -> bool:
    """Writes the trace of the first row variant. Raises `NotProfiled` if no step can be predicted."""
    rows, findings = made.spec.build.rows[0], list(check_plan(made))
    with waiting(made):
        found = forecast(made, rows, changes=False, **terms)
    told = {"verdict of the checker": show.verdict(not findings), "predicted_ms": found.predicted_ms, "floor_ms": found.floor_ms}
    events.write(target, made, rows, found.timeline, told, found.needed)
    tell(made, rows, target, findings, found, "", as_json)
    return not findings


def waiting(made: Plan):
    """Says on a terminal's stderr what takes its time: code that was never compiled before takes minutes."""
    return Console(stderr=True).status(f"{made.spec.model.name}: cycles of the kernel from the TPU compiler, then the step")


def tell(made: Plan, rows: int, target: Path, findings: list, found: Forecast | None, missing: str, as_json: bool) -> None:
    """Where the file is, the prediction, and the verdict beside it."""
    if as_json:
        show.put_json({"verdict": show.verdict(not findings), "out": target, "bytes": target.stat().st_size, "rows": rows,
                       "findings": [str(f) for f in findings], "predicted_ms": found and found.predicted_ms,
                       "floor_ms": found and found.floor_ms, "missing": missing})
        return
    out = show.console()
    out.print(f"{target}: {target.stat().st_size:,} bytes")
    step = f"predicted {found.predicted_ms:.3f} ms, floor {found.floor_ms:.3f} ms" if found else f"no prediction: {missing}"
    out.print(f"{made.spec.model.name}, {show.several(rows, 'row')}: {step}")
    out.print("verdict of the checker:", show.coloured(show.verdict(not findings)))
