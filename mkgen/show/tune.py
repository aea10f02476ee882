"""What `tune` says: a bar while it searches, then each decision, what was refused, and the step before and after."""
from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

import yaml
from rich.console import Console

from mkgen import show
from mkgen.tune.decisions import Decision
from mkgen.tune.overlay import Result
from mkgen.tune.space import NOT_SEARCHED
from mkgen.tune.trial import Bench

REASONS = 8                              # lines of what was refused


@contextmanager
def searching(seconds: float, as_json: bool = False) -> Iterator[Callable[[Bench], None]]:
    """A bar of the time on stderr, with the best step so far; nothing is drawn where it is no terminal."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    columns = (TextColumn("tune"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty() or as_json) as shown:
        task = shown.add_task("", total=seconds)

        def tell(bench: Bench) -> None:
            best = min(bench.known.copy().values(), key=bench.score)
            ms = " / ".join(f"{ms:.3f}" for ms in best.ms.values())
            text = f"{len(bench.known)} tried, {sum(bench.refusals.values())} refused, best {ms} ms at {' / '.join(map(str, bench.rows))} rows"
            shown.update(task, completed=min(bench.clock.spent, seconds), description=text)

        yield tell


def tuned(result: Result, out: str | None, as_json: bool) -> None:
    if as_json:
        show.put_json(as_dict(result, out))
        return
    console = show.console()
    console.print(steps(result))
    for title, some in (("decisions", [d for d in result.decisions if d.changed]), ("kept as the spec has it", [d for d in result.decisions if not d.changed])):
        if some:
            console.print()
            console.print(decided(title, some, list(result.best.ms)))
    if result.refusals:
        console.print()
        t = show.table("refused candidates", ">how many", "why")
        for why, times in list(result.refusals.items())[:REASONS]:
            t.add_row(str(times), why)
        console.print(t)
    console.print()
    for rows, ms in result.alone.items():
        console.print(f"a module for {show.several(rows, 'row')} alone would take {ms:.3f} ms with the same overlay")
    console.print("not searched, since no key of a build says it:", "; ".join(f"{what} ({why})" for what, why in NOT_SEARCHED.items()))
    console.print(f"{result.tried} candidates tried, {result.predicted} plans predicted, in {result.seconds:,.0f} s;",
                  "no single change is better" if result.converged else "the time ended the search")
    console.print(f"terms: {result.terms}; predicted, not measured")
    console.print("weights have to be packed again" if result.repack else "weights that are packed already serve")
    if out:
        console.print(f"written: {out}; `mkgen compile {result.spec} --overlay {out}` asks the chip's compiler about the whole kernel")
    else:
        console.print(result.overlay)
    console.print("verdict of the checker:", show.coloured(result.verdict))


def steps(result: Result):
    t = show.table("a step, predicted", ">rows", ">own build, ms", ">tuned, ms", ">ratio", "verdict")
    for rows, ms in result.best.ms.items():
        t.add_row(str(rows), f"{result.base.ms[rows]:.3f}", f"{ms:.3f}", f"{result.base.ms[rows] / ms:.3f}", show.coloured(result.verdict))
    return t


def decided(title: str, some: list[Decision], rows: list[int]):
    ends = [f", {r} rows" for r in rows] if len(rows) > 1 else [""]
    t = show.table(title, "knob", "own", "chosen", *(f">own would cost, us{end}" for end in ends), "best alternative", *(f">would cost, us{end}" for end in ends), "")
    for d in some:
        t.add_row(d.name, d.own, d.chosen, *figures(d.gained if d.changed else None, rows), d.alternative or "-", *figures(d.costs, rows), d.why)
    return t


def figures(by_rows: dict[int, float] | None, rows: list[int]) -> list[str]:
    return [f"{by_rows[r]:+,.1f}" if by_rows else "-" for r in rows]


def as_dict(result: Result, out: str | None) -> dict:
    return {
        "verdict": result.verdict, "spec": result.spec, "predicted_ms": result.best.ms, "own_ms": result.base.ms, "alone_ms": result.alone,
        "build": yaml.safe_load(result.overlay)["build"], "overlay": result.overlay, "out": out, "repack": result.repack,
        "decisions": [{**asdict(d), "changed": d.changed} for d in result.decisions], "tried": result.tried, "predicted": result.predicted,
        "refused": result.refusals, "converged": result.converged, "restarts": result.kicks, "seconds": result.seconds, "terms": result.terms,
        "not_searched": NOT_SEARCHED,
    }
