"""The run-length columns of a schedule: `(kda*3 mla)*23 mla`.

    column = item item …        item = name | '-' | item '*' count | '(' column ')'

A name is a kind, '-' is "none here". The tree is kept, since it is the loop nest that a person wrote: the
planner lowers it, and shrinking a model shortens its counts.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from mkgen.errors import MkgenError

MAX_LAYERS = 10_000                              # stops a slip of the finger from filling the memory
MAX_DEPTH = 16

_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*|-)|(?P<count>\d+)|(?P<mark>[()*])|(?P<bad>\S))", re.A)


class ScheduleError(MkgenError):
    """A column that cannot be read; `column` counts characters of the text from 1."""

    def __init__(self, text: str, column: int, what: str):
        self.text, self.column, self.what = text, column, what
        super().__init__(f"{what} at column {column} of {text!r}")


@dataclass(frozen=True)
class Name:
    """One layer of a kind; None for '-'."""
    name: str | None


@dataclass(frozen=True)
class Repeat:
    """`body` in order, `times` times over."""
    body: tuple[Item, ...]
    times: int


Item = Name | Repeat


def parse(text: str) -> tuple[Item, ...]:
    """Text to tree. Raises `ScheduleError` with the column of the first mistake."""
    return _Parser(text).parse()


def length(items: tuple[Item, ...]) -> int:
    """How many layers the tree covers, without expanding it."""
    return sum(1 if isinstance(item, Name) else item.times * length(item.body) for item in items)


def expand(schedule: str | tuple[Item, ...]) -> tuple[str | None, ...]:
    """Text or tree to one entry a layer; None where nothing stands."""
    items = parse(schedule) if isinstance(schedule, str) else schedule
    out: list[str | None] = []
    for item in items:
        if isinstance(item, Name):
            out.append(item.name)
        else:
            out.extend(expand(item.body) * item.times)
    return tuple(out)


def to_text(items: tuple[Item, ...]) -> str:
    """Tree to text; `parse(to_text(tree)) == tree`."""
    words = []
    for item in items:
        if isinstance(item, Name):
            words.append(item.name or "-")
        else:
            body = to_text(item.body)
            single = len(item.body) == 1 and isinstance(item.body[0], Name)
            words.append(f"{body}*{item.times}" if single else f"({body})*{item.times}")
    return " ".join(words)


def names(items: tuple[Item, ...]) -> tuple[str, ...]:
    """The kinds that the tree mentions, each once, in order of appearance."""
    return tuple(dict.fromkeys(name for name in _mentions(items) if name))


def _mentions(items: tuple[Item, ...]):
    for item in items:
        if isinstance(item, Name):
            yield item.name
        else:
            yield from _mentions(item.body)


class _Parser:
    def __init__(self, text: str):
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        at = 0
        while match := _TOKEN.match(text, at):
            kind = match.lastgroup or "bad"
            if kind == "bad":
                raise ScheduleError(text, match.start(kind) + 1, f"unexpected {match[kind]!r}")
            words = ("name", "count")             # two of them need a space between
            if at and at == match.start(kind) and kind in words and self.tokens[-1][0] in words:
                raise ScheduleError(text, at + 1, "a space is missing")
            self.tokens.append((kind, match[kind], match.start(kind) + 1))
            at = match.end()
        self.at = 0

    def parse(self) -> tuple[Item, ...]:
        items = self.column(0)
        if self.at < len(self.tokens):
            self.stop("')' without a '('")
        if length(items) > MAX_LAYERS:
            raise ScheduleError(self.text, 1, f"more than {MAX_LAYERS} layers")
        return items

    def stop(self, what: str, column: int | None = None):
        here = self.tokens[self.at][2] if self.at < len(self.tokens) else len(self.text) + 1
        raise ScheduleError(self.text, column or here, what)

    def next_is(self, word: str) -> bool:
        return self.at < len(self.tokens) and self.tokens[self.at][1] == word

    def column(self, depth: int) -> tuple[Item, ...]:
        if depth > MAX_DEPTH:
            self.stop("brackets nested too deeply")
        items: list[Item] = []
        while self.at < len(self.tokens) and not self.next_is(")"):
            items.extend(self.item(depth))
        if not items:
            self.stop("nothing to repeat" if depth else "no layers")
        return tuple(items)

    def item(self, depth: int) -> tuple[Item, ...]:
        kind, word, column = self.tokens[self.at]
        if kind == "count":
            self.stop(f"a number ({word}) where a name was expected")
        if word == "*":
            self.stop("'*' with nothing in front of it")
        self.at += 1
        body: tuple[Item, ...] = (Name(None if word == "-" else word),)
        if word == "(":
            body = self.column(depth + 1)
            if not self.next_is(")"):
                self.stop("'(' is never closed", column)
            self.at += 1
        if self.next_is("*"):
            self.at += 1
            if self.at == len(self.tokens) or self.tokens[self.at][0] != "count":
                self.stop("a number must follow '*'")
            times = int(self.tokens[self.at][1][:9])
            if times < 1:
                self.stop("a count must be at least 1")
            self.at += 1
            body = (Repeat(body, times),)
        return body
