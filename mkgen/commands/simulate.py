"""`mkgen profile` and `mkgen simulate`: cycles of a plan's work, and the step that they come to."""
from __future__ import annotations

import click

from mkgen.cli_base import Asked, finish, spec_options, steps_option


class Scales(click.ParamType):
    """`1.0,1.5,2.0`."""

    name = "X[,X...]"

    def convert(self, value, param, ctx) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            found = tuple(float(word) for word in value.split(","))
        except ValueError:
            found = ()
        if not found or min(found) <= 0:
            self.fail(f"{value!r} is not a list of numbers above 0; write --host-latency 1.0,1.5,2.0", param, ctx)
        return found


@click.command()
@spec_options
def profile(asked: Asked) -> None:
    """Show the compute cycles of each sub-layer and op, from the TPU compiler's static schedule; no TPU is needed.

    Pieces of the kernel that were compiled before come from a cache ($MKGEN_CACHE, or ~/.cache/mkgen).
    """
    made = asked.plan()
    from mkgen.profile import profile_plan
    from mkgen.show import simulate as show
    show.profiled(made, {rows: profile_plan(made, rows) for rows in made.spec.build.rows}, asked.json)


@click.command()
@spec_options
@click.option("--at", type=click.IntRange(min=1), metavar="N", help="Tokens that each row has at this step, the new one included; "
              "the whole context if not given.")
@click.option("--host-latency", type=Scales(), default="1.0", metavar="X[,X...]", show_default=True,
              help="What exchanges between hosts take of the latency within one: nothing is published.")
@steps_option
@click.option("--identical", is_flag=True, help="All rows hold the same tokens and choose the same experts.")
@click.option("--seed", default=0, show_default=True, help="Of the draws of experts.")
@click.option("--draws", default=1000, show_default=True, type=click.IntRange(min=1), help="Routing layers to draw at the least.")
@click.option("--sensitivity/--no-sensitivity", "probe", default=True, help="Whether to ask what more bandwidth, less latency and more slots would give.")
def simulate(asked: Asked, at: int | None, host_latency: tuple[float, ...], steps: int, identical: bool, seed: int, draws: int, probe: bool) -> None:
    """Predict a step's time on the chip, and say where it goes. No speed without the checker's verdict beside it."""
    made = asked.plan()
    from mkgen.check import check_plan
    from mkgen.show import simulate as show
    from mkgen.simulate.draws import IDENTICAL, ROWS
    from mkgen.simulate.predict import predict, sensitivity
    findings = list(check_plan(made))
    terms = {"context": at, "seed": seed, "tokens": IDENTICAL if identical else ROWS, "steps_a_call": steps}
    found = {(rows, scale): predict(made, rows, draws=draws, host_latency=scale, **terms) for rows in made.spec.build.rows for scale in host_latency}
    probes = {rows: sensitivity(made, rows, host_latency=host_latency[0], **terms) for rows in made.spec.build.rows} if probe else {}
    show.simulated(made, found, probes, findings, asked.json)
    finish(not findings)
