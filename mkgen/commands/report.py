"""`mkgen report` and `mkgen trace`: a plan and its predicted step, to look at."""
from __future__ import annotations

from pathlib import Path

import click

from mkgen.cli_base import Asked, finish, spec_options


def look_options(what: str):
    """SPEC and its options, where to write, and the terms of the prediction."""
    options = (
        click.option("-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help=f"Where to write; build/{what} if not given."),
        click.option("--at", type=click.IntRange(min=1), metavar="N", help="Tokens that each row has at this step; the whole context if not given."),
        click.option("--host-latency", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True, metavar="X",
                     help="What exchanges between hosts take of the latency within one: nothing is published."),
    )

    def add(command):
        for option in reversed(options):
            command = option(command)
        return spec_options(command)

    return add


@click.command()
@look_options("report/<name>.html")
def report(asked: Asked, out: str | None, at: int | None, host_latency: float) -> None:
    """Write one HTML page that explains the plan and its predicted step; it needs no network.

    It shows the first of the row variants: --rows 8 for another. A plan that the checker refuses is shown with its findings.
    """
    made = asked.plan()
    from mkgen.show import look
    finish(look.report(made, Path(out) if out else Path("build/report") / f"{made.spec.model.name}.html", asked.json, at=at, host_latency=host_latency))


@click.command()
@look_options("trace/<name>.json.gz")
def trace(asked: Asked, out: str | None, at: int | None, host_latency: float) -> None:
    """Write the predicted step as trace events, for Perfetto or chrome://tracing; compressed if FILE ends in .gz.

    It holds the first of the row variants: --rows 8 for another.
    """
    made = asked.plan()
    from mkgen.show import look
    finish(look.trace(made, Path(out) if out else Path("build/trace") / f"{made.spec.model.name}.json.gz", asked.json, at=at, host_latency=host_latency))
