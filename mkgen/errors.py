"""What mkgen says when it refuses: all the mistakes at once, each with its place, reason and remedy."""
from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

_LISTED = 24                                     # names in an advice, at most


class MkgenError(Exception):
    """Something the user can put right: printed without a traceback, and the exit code is `exit_code`."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake. `line` counts from 1; 0 means that the place has no lines (a command-line argument)."""
    file: str
    line: int
    what: str
    why: str
    fix: str

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.what}\n  why: {self.why}\n  fix: {self.fix}"


class SpecErrors(MkgenError):
    """All the problems found in a spec, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]):
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be, or None."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Advice for an unknown word: the nearest known one, and the others."""
    names = sorted(known)
    near = closest(word, names)
    more = f", and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(names[:_LISTED]) + more if names else "none at all"
    return f"did you mean {near!r}? (known: {listed})" if near else f"use one of: {listed}"
