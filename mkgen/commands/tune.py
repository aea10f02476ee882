"""`mkgen tune`: a better `build:` for a spec, found against the simulator."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from mkgen.cli_base import Asked, finish, spec_options


class Weights(click.ParamType):
    """`1=3,8=1`: how much a rows variant counts."""

    name = "ROWS=W[,ROWS=W...]"

    def convert(self, value, param, ctx) -> dict[int, float]:
        if isinstance(value, dict):
            return value
        try:
            found = {int(rows): float(weight) for rows, weight in (word.split("=") for word in value.split(","))}
        except ValueError:
            found = {}
        if not found or min(found.values()) <= 0:
            self.fail(f"{value!r} does not say what rows weigh; write --weights 1=3,8=1", param, ctx)
        return found


@click.command()
@spec_options
@click.option("-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Where the overlay goes; if not given, it is printed.")
@click.option("--seconds", default=300.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
              help="Time limit: no candidate is begun after it; one that runs, and the confirmation, are finished.")
@click.option("--seed", default=0, show_default=True, help="Of the restarts, and of the draws of experts.")
@click.option("--restarts", default=2, show_default=True, type=click.IntRange(min=0), help="Further descents, each from a kick of the best build.")
@click.option("--layout/--no-layout", default=True, show_default=True, help="Whether what changes the layout of packed weights is searched.")
@click.option("--allow", multiple=True, type=click.Choice(["activations", "wire"]), help="Search a knob that changes the numerics. Repeatable.")
@click.option("--weights", type=Weights(), default=None, help="How much each rows variant counts; 1 if not given.")
@click.option("--at", type=click.IntRange(min=1), metavar="N", help="Tokens that each row has at this step; the whole context if not given.")
@click.option("--host-latency", default=1.0, show_default=True, type=click.FloatRange(min=0, min_open=True),
              help="What exchanges between hosts take of the latency within one.")
def tune(asked: Asked, out: str | None, seconds: float, seed: int, restarts: int, layout: bool, allow: tuple[str, ...], weights: dict[int, float] | None,
         at: int | None, host_latency: float) -> None:
    """Search the build of SPEC for a faster one, and write it as an overlay.

    What counts is the predicted step of --rows (all that the spec has, if not given). Every candidate passes the checker; the
    overlay is read again, planned, checked and predicted with 1,000 draws before it is written.
    """
    whole = replace(asked, sets=tuple(s for s in asked.sets if not s.startswith("build.rows=")))
    want, spec = asked.spec().build.rows, whole.spec()
    if not set(want) <= set(spec.build.rows):                 # rows that the spec does not have: they are its own here
        spec = asked.spec()
    if weights and set(weights) - set(want):
        raise click.UsageError(f"--weights speaks of rows {', '.join(map(str, sorted(set(weights) - set(want))))}; the search is for {', '.join(map(str, want))}")
    from mkgen.show import tune as show
    from mkgen.tune.run import run
    with show.searching(seconds, as_json=asked.json) as tell:
        result = run(spec, want, seconds=seconds, seed=seed, restarts=restarts, free=layout, allow=allow, weights=weights, context=at,
                     host_latency=host_latency, tell=tell)
    good = result.verdict == "pass"
    if out and good:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(result.overlay, encoding="utf-8")
    show.tuned(result, out if good else None, asked.json)
    finish(good)
