"""Cross checks of a spec that could be read: each says what is wrong, why, and what would be right.

A check is a function of a `Checker` in `checks_*.py`. All of them run; one that meets a value that could not
be read (`BAD`) is skipped, since that value's own mistake has been reported.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mkgen.errors import MkgenError, Problem
from mkgen.spec import checks_build, checks_ffns, checks_mixers, checks_model, checks_roles, checks_stream, checks_unbuilt
from mkgen.spec.bad import BAD, Poison
from mkgen.spec.model import Spec
from mkgen.targets import Target, UnknownChip, load_target


class Checker:
    """What a check can see, and where it says what it found."""

    def __init__(self, spec: Spec, problems: list[Problem]):
        self.spec, self.model, self.build, self.where = spec, spec.model, spec.build, spec.where
        self.problems = problems
        self.target: Target = BAD
        try:
            self.ranks = spec.build.ranks         # BAD once the mesh is found wanting
        except Poison:
            self.ranks = BAD

    def say(self, path: tuple[str, ...], what: str, why: str, fix: str) -> None:
        """Report a problem at the place where the value at `path` was written."""
        self.problems.append(Problem(*self.where.at(*path), what, why, fix))

    def run(self, check: Callable[..., None], *args: Any) -> bool:
        """Run a check; False if it had to be skipped or cut short."""
        try:
            check(self, *args)
        except Poison:
            return False
        return True

    def each(self, group: str) -> list[tuple[str, Any]]:
        """The kinds under model.mixers or model.ffns that could be read."""
        kinds = getattr(self.model, group)
        return [] if kinds is BAD else [(name, kind) for name, kind in kinds.items() if kind is not BAD]

    def layers_of(self, owner: str | None) -> list[int]:
        """The layers that have a kind, or any 'mixer' or 'ffn'; [0] for what is the model's own."""
        if owner is None:
            return [0]
        runs = self.model.schedule
        return [i for i, run in enumerate(runs) if (getattr(run, owner) if owner in ("mixer", "ffn") else owner in (run.mixer, run.ffn))]


def validate(spec: Spec, clean: bool = True) -> list[Problem]:
    """All the problems of a spec, in no special order. `clean`: reading it has found no problem so far.

    The published parameter count is compared only if nothing else is wrong: a count that is off is
    the consequence of a wrong width more often than a mistake of its own.
    """
    problems: list[Problem] = []
    checker = Checker(spec, problems)
    checker.run(_find_target)
    for module in (checks_model, checks_stream, checks_mixers, checks_ffns, checks_unbuilt, checks_build, checks_roles):
        for check in module.CHECKS:
            checker.run(check)
    if clean and not problems:
        checker.run(checks_model.parameters)
    return problems


def _find_target(c: Checker) -> None:
    try:
        if c.build.chip is not BAD:
            c.target = load_target(c.build.chip)
    except UnknownChip as error:
        c.say(("build", "chip"), str(error).partition(":")[0],
              "the numbers of a chip are data, in mkgen/targets/, and there are none for this one",
              str(error).partition(": ")[2])
    except MkgenError as error:
        c.say(("build", "chip"), "the chip's own file is not right", str(error), "correct that file")
