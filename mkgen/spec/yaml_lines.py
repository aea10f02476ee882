"""YAML that remembers where everything was written.

PyYAML's own constructors forget the lines and guess the types. Here the composed nodes are kept, with the
text of every scalar as written; `typed.py` turns a text into the type that the field asks for, so that 1e-6
(a string to PyYAML, for want of a dot) is a float where a float is expected, and a mixer may be called `on`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import yaml

from mkgen.errors import Problem


@dataclass(frozen=True)
class Scalar:
    """A single value. `plain`: it was not quoted; `tag`: what YAML takes it for (str, int, null, …)."""

    file: str
    line: int
    text: str
    tag: str
    plain: bool

    @property
    def is_null(self) -> bool:
        return self.tag == "null"


@dataclass(frozen=True)
class Seq:
    """A list."""

    file: str
    line: int
    items: tuple[Node, ...]


@dataclass(frozen=True)
class Entry:
    """A key's place and the value under it."""

    file: str
    line: int
    value: Node


@dataclass(frozen=True)
class Map:
    """A mapping, in the order of the file. Keys are always text."""

    file: str
    line: int
    entries: dict[str, Entry]

    def with_entry(self, key: str, entry: Entry) -> Map:
        """The same mapping with one entry added or replaced."""
        return Map(self.file, self.line, {**self.entries, key: entry})


Node = Scalar | Seq | Map


@dataclass
class Where:
    """Path of a value -> the file and line in which it was written."""

    places: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)

    def put(self, path: tuple[str, ...], file: str, line: int) -> None:
        self.places[path] = (file, line)

    def has(self, *path: str) -> bool:
        """Whether somebody wrote this value, as against leaving it to its default."""
        return path in self.places

    def at(self, *path: str) -> tuple[str, int]:
        """The place of the value, or of the nearest thing around it that was written."""
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, ("?", 0))


def read_yaml(path: str | Path) -> tuple[Node | None, list[Problem]]:
    """Read a file. Returns its root (None if it is not YAML at all) and what is wrong with it."""
    file = str(path)
    try:
        text = Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        return None, [
            Problem(file, 0, f"cannot be read: {error.strerror}", "a spec is a YAML file", "check the path")
        ]
    except UnicodeDecodeError as error:
        return None, [
            Problem(
                file,
                1,
                f"is not UTF-8 text (byte {error.start})",
                "a spec is a YAML file in UTF-8",
                "save it as UTF-8",
            )
        ]
    return parse_yaml(text, file)


def parse_yaml(text: str, file: str, lines: bool = True) -> tuple[Node | None, list[Problem]]:
    """Parse YAML text. With `lines` False every place is line 0: for a value from the command line."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = (mark.line + 1 if mark else 1) if lines else 0
        parts = [
            str(part) for part in (getattr(error, "problem", None), getattr(error, "reason", None)) if part
        ]
        column = f", column {mark.column + 1}" if mark else ""
        detail = parts[0] if parts else str(error).splitlines()[0]
        return None, [
            Problem(
                file,
                line,
                f"is not valid YAML: {detail}{column}",
                "nothing can be read from a file that does not parse",
                "check indentation, colons, brackets and quotes on this line and the one before",
            )
        ]
    except RecursionError:
        return None, [
            Problem(
                file,
                1 if lines else 0,
                "is nested too deeply",
                "no spec needs hundreds of levels",
                "check for stray brackets",
            )
        ]
    if root is None:
        return None, [
            Problem(file, 1 if lines else 0, "is empty", "there is nothing to read", "write a value")
        ]
    reader = _Reader(file, lines)
    return reader.node(root), reader.problems


class _Reader:
    """Turns PyYAML's nodes into ours. An alias is followed; one that contains itself is refused."""

    def __init__(self, file: str, lines: bool):
        self.file, self.lines = file, lines
        self.problems: list[Problem] = []
        self._done: dict[int, Node] = {}
        self._open: set[int] = set()

    def line(self, node: yaml.Node) -> int:
        return node.start_mark.line + 1 if self.lines else 0

    def node(self, node: yaml.Node) -> Node:
        if id(node) in self._open:
            self.problems.append(
                Problem(
                    self.file,
                    self.line(node),
                    "contains an alias of itself",
                    "it would have no end",
                    "write the value out",
                )
            )
            return Scalar(self.file, self.line(node), "", "null", True)
        if id(node) not in self._done:
            self._open.add(id(node))
            self._done[id(node)] = self._convert(node)
            self._open.discard(id(node))
        return self._done[id(node)]

    def _convert(self, node: yaml.Node) -> Node:
        if isinstance(node, yaml.SequenceNode):
            return Seq(self.file, self.line(node), tuple(self.node(item) for item in node.value))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node)
        return Scalar(self.file, self.line(node), node.value, node.tag.rsplit(":", 1)[-1], node.style is None)

    def _mapping(self, node: yaml.MappingNode) -> Map:
        entries: dict[str, Entry] = {}
        for key, value in node.value:
            line = self.line(key)
            if not isinstance(key, yaml.ScalarNode):
                self.problems.append(
                    Problem(
                        self.file,
                        line,
                        "a key is a list or a mapping",
                        "keys are names",
                        "write the key as one word",
                    )
                )
            elif key.value in entries:
                self.problems.append(
                    Problem(
                        self.file,
                        line,
                        f"key {key.value!r} is written twice",
                        f"line {entries[key.value].line} gives it already, and only one can be meant",
                        "delete one of them",
                    )
                )
            else:
                entries[key.value] = Entry(self.file, line, self.node(value))
        return Map(self.file, self.line(node), entries)
