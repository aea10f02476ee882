"""The checker: an abstract run of a plan's region tree, independent of the planner. Gives findings, never raises.

`tape` and `memory` hold counts and sizes against each other; `run` walks a short schedule (`shorten`) with the
numbers of a few scenarios (`scenario`), on stand-ins for the kernel's refs (`refs`, `names`, `model`), and asks
`flight` whether each copy and each step may happen now, `exchange` whether the exchanges are in order, and `values`
whether what is read was made, `spread` whether sums are whole, `drift` whether ranks that drift apart can meet in a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mkgen.check.drift import check_drift
from mkgen.check.exchange import check_places
from mkgen.check.findings import Finding, Report, Stop
from mkgen.check.memory import check_memory
from mkgen.check.model import Model, Text
from mkgen.check.rules import RULES
from mkgen.check.run import AbstractRun
from mkgen.check.scenario import scenarios
from mkgen.check.shorten import shorten
from mkgen.check.tape import check_tape
from mkgen.check.values import Ledger, check_changes
from mkgen.plan.plan import Plan

__all__ = ["Finding", "check_plan", "examined"]


def check_plan(plan: Plan, rows: Iterable[int] | int | None = None) -> list[Finding]:
    """What is wrong with a plan; empty: nothing was found. rows: the variants to check (all of the spec's)."""
    variants = plan.spec.build.rows if rows is None else (rows,) if isinstance(rows, int) else tuple(rows)
    report = Report()
    guarded(report, "tape", lambda: check_tape(plan, report))
    guarded(report, "values", lambda: check_changes(plan, report))
    for n in variants:
        guarded(report, f"memory, {n} rows", lambda n=n: check_memory(plan, n, report))
        guarded(report, f"exchanges, {n} rows", lambda n=n: check_places(plan, n, report))
    guarded(report, "run", lambda: check_runs(plan, variants, report))
    return report.findings


def examined(plan: Plan) -> dict:
    """What a check looks at: its rules, how many scenarios, of how many layers."""
    short = shorten(plan)
    count = sum(len(scenarios(plan, n, short)) for n in plan.spec.build.rows)
    return {"rules": RULES, "scenarios": count, "layers": short.layers}


def check_runs(plan: Plan, variants: tuple[int, ...], report: Report) -> None:
    text, short = Text(plan), shorten(plan)
    traces: dict[tuple, str] = {}
    ledger = None
    for n in variants:
        model = Model(plan, n, text, short)
        ledger = ledger or Ledger(plan, model.moved)
        for scenario in scenarios(plan, n, short):
            trace = guarded(report, str(scenario), AbstractRun(model, scenario, ledger, report).run)
            traces.setdefault(tuple(trace or ()), str(scenario))
    if ledger:
        ledger.finish(report)
    for trace in traces:
        guarded(report, "drift", lambda trace=trace: check_drift(plan, trace, report))
    if len(traces) > 1 and not report.seen:
        names = list(traces.values())
        report.add(
            "exchange",
            "all regions",
            f"'{names[0]}' and '{names[1]}' differ",
            "every rank makes the same sequence of exchanges",
        )


def guarded(report: Report, where: str, work: Callable):
    """Runs a check; what breaks it is a finding too."""
    try:
        return work()
    except Stop:
        return None
    except Exception as e:
        if len(report.seen) < 2:
            try:
                report.add(
                    "checker",
                    where,
                    f"{type(e).__name__}: {e}",
                    "the check could not be finished: the plan is not what it expects",
                )
            except Stop:
                pass
        return None
