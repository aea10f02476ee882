"""What all commands share: the way errors reach a user, and the options that say which spec is meant.

Exit codes: 0 good, 1 a verdict is bad, 2 the input is wrong, 3 mkgen itself is wrong, 130 interrupted.
"""
from __future__ import annotations

import errno
import functools
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mkgen.errors import MkgenError

if TYPE_CHECKING:                                # a stage is imported when a command needs it: --help stays fast
    from mkgen.plan.plan import Plan
    from mkgen.spec.model import Spec

BAD_VERDICT, BAD_INPUT, BUG, INTERRUPTED = 1, 2, 3, 130
_DEBUG = "mkgen.debug"


class Guarded(click.Group):
    """A group whose commands never show a traceback, unless --debug or MKGEN_DEBUG=1 asks for it."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except MkgenError as error:
            self.stop(ctx, str(error), error.exit_code)
        except KeyboardInterrupt:
            self.stop(ctx, "interrupted", INTERRUPTED)
        except OSError as error:
            if error.errno == errno.EPIPE:       # the reader of our output has gone; click ends quietly
                raise
            if error.filename is None:
                self.stop(ctx, bug(error), BUG)
            self.stop(ctx, f"{error.filename}: {error.strerror}", BAD_INPUT)
        except Exception as error:
            self.stop(ctx, bug(error), BUG)

    def stop(self, ctx: click.Context, text: str, code: int) -> None:
        """Says why on stderr, with the traceback where it was asked for, and ends the program with `code`."""
        if wants_debug(ctx):
            click.echo(traceback.format_exc(), err=True, nl=False)
        click.echo(text, err=True)
        ctx.exit(code)


def bug(error: BaseException) -> str:
    """One line for an exception that nobody foresaw."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"mkgen: internal error: {type(error).__name__}: {first} (--debug or MKGEN_DEBUG=1 shows where)"


def wants_debug(ctx: click.Context) -> bool:
    return bool(ctx.meta.get(_DEBUG)) or os.environ.get("MKGEN_DEBUG", "") not in ("", "0")


def _debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        ctx.meta[_DEBUG] = True                  # one dict for the group and its commands


debug_option = click.option("--debug", is_flag=True, expose_value=False, callback=_debug, is_eager=True,
                            help="Show the traceback of an error.")


class Rows(click.ParamType):
    """`1,8`: row variants, each at least 1."""

    name = "N[,N...]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isascii() and word.isdigit() and int(word) for word in words):
            self.fail(f"{value!r} is not a list of whole numbers from 1; write --rows 1,8", param, ctx)
        return tuple(int(word) for word in words)


@dataclass(frozen=True)
class Asked:
    """Which spec a command is about, with what it overrides, and whether it prints JSON."""
    path: str
    overlays: tuple[str, ...]
    sets: tuple[str, ...]
    json: bool

    def spec(self) -> Spec:
        """Reads the spec. Raises `SpecErrors`."""
        from mkgen.spec.load import load_spec
        return load_spec(self.path, overlays=self.overlays, sets=self.sets)

    def plan(self) -> Plan:
        """Reads, builds the graph and plans. Raises `MkgenError` for a wrong spec, or one that the chip cannot hold."""
        spec = self.spec()
        from mkgen.graph.build import build_graph
        from mkgen.plan.planner import make_plan
        from mkgen.targets import load_target
        return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


OPTIONS = (
    click.argument("spec", type=click.Path()),
    click.option("--set", "sets", multiple=True, metavar="KEY=VALUE",
                 help="Replace one value: build.context=8192. Repeatable."),
    click.option("--overlay", "overlays", multiple=True, type=click.Path(), metavar="FILE",
                 help="A YAML file with a build: section to put over the spec's. Repeatable; the last one wins."),
    click.option("--rows", type=Rows(), help="Row variants, in place of build.rows."),
    click.option("--context", type=click.IntRange(min=1), metavar="N",
                 help="Tokens of context, in place of build.context."),
    click.option("--chip", metavar="NAME", help="The chip, in place of build.chip."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables."),
    debug_option,
)


steps_option = click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, metavar="N",
                            help="Decode steps in one call of the module.")


def spec_options(command: Callable) -> Callable:
    """Gives a command the SPEC argument and the common options; it is called with an `Asked` in front of its own."""

    @functools.wraps(command)
    def run(spec, sets, overlays, rows, context, chip, as_json, **own):
        flags = {"rows": rows and list(rows), "context": context, "chip": chip}
        over = [f"build.{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
        return command(Asked(spec, tuple(overlays), (*sets, *over), as_json), **own)

    for option in reversed(OPTIONS):
        run = option(run)
    return run


def finish(good: bool) -> None:
    """Ends the program: 0 for a good verdict, 1 for a bad one."""
    click.get_current_context().exit(0 if good else BAD_VERDICT)


def finish_input() -> None:
    """Ends the program after an input was refused and the reasons were shown."""
    click.get_current_context().exit(BAD_INPUT)
