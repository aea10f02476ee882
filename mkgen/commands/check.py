"""`mkgen check`: is the plan safe, and does the generated code do what the plan says?"""

from __future__ import annotations

import os

import click

from mkgen.cli_base import Asked, finish, spec_options


@click.command()
@spec_options
@click.option(
    "--code/--no-code", default=True, help="Whether the generated module is traced and held against the plan as well."
)
def check(asked: Asked, code: bool) -> None:
    """Run the checker on the plan, then trace the generated module and hold it against the plan.

    The plan: live buffers, starts and waits, exchanges, values, the memory's budget. The code: every start, wait and
    access of the module as JAX traces it for the chip, at full size.
    """
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")  # nothing is run: no chip is looked for
    made = asked.plan()
    from mkgen.check import check_plan, examined
    from mkgen.show import check as show

    findings = list(check_plan(made))
    traced = None
    if code and not findings:
        from mkgen.prove.trace_code import check_code

        traced = check_code(made, few=True)
    show.checked(made, findings, examined(made), traced, asked.json)
    finish(not findings and not (traced and traced.findings))
