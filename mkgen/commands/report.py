"""`mkgen report` and `mkgen trace`: a plan and its predicted step, to look at."""
from __future__ import annotations

from pathlib import Path

import click

from mkgen.cli_base import Asked, finish, spec_options


def out_option(what: str):
    return click.option("-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help=f"Where to write; build/{what} if not given.")


@click.command()
@spec_options
@out_option("report/<name>.html")
def report(asked: Asked, out: str | None) -> None:
    """Write one HTML page that explains the plan and its predicted step; it needs no network.

    It shows the first of the row variants: --rows 8 for another. A plan that the checker refuses is shown with its findings.
    """
    made = asked.plan()
    from mkgen.show import look
    finish(look.report(made, Path(out) if out else Path("build/report") / f"{made.spec.model.name}.html", asked.json))


@click.command()
@spec_options
@out_option("trace/<name>.json.gz")
def trace(asked: Asked, out: str | None) -> None:
    """Write the predicted step as trace events, for Perfetto or chrome://tracing; compressed if FILE ends in .gz.

    It holds the first of the row variants: --rows 8 for another.
    """
    made = asked.plan()
    from mkgen.show import look
    finish(look.trace(made, Path(out) if out else Path("build/trace") / f"{made.spec.model.name}.json.gz", asked.json))
