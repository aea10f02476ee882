"""YAML nodes to dataclasses, driven by nothing but the type hints of their fields.

Every mistake is noted and reading goes on; a value that cannot be read becomes `BAD` (see `bad.py`).
"""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mkgen.errors import Problem, closest, did_you_mean
from mkgen.spec.bad import BAD
from mkgen.spec.bounds import out_of_bounds
from mkgen.spec.yaml_lines import Map, Node, Scalar, Seq, Where

Path = tuple[str, ...]

_INT = re.compile(r"[-+]?(0|[1-9][0-9_]*)")
_FLOAT = re.compile(r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_EXPECTED = {
    int: ("a whole number", "8"),
    float: ("a number", "1.0e-6"),
    bool: ("true or false", "true"),
    str: ("a text", "name"),
}


def dotted(path: Path) -> str:
    """A path as people write it."""
    return ".".join(path)


def shown(node: Node) -> str:
    """A node in a few words, for messages."""
    if isinstance(node, Scalar):
        if node.is_null and node.plain:
            return "nothing"
        return node.text if node.plain else f'"{node.text}"'
    return "a list" if isinstance(node, Seq) else "a mapping"


class Reader:
    """Reads values of a given type out of nodes. `kinds`: the word under `kind:` -> the dataclass meant."""

    def __init__(self, kinds: Mapping[str, type]):
        self.kinds = kinds
        self.where = Where()
        self.problems: list[Problem] = []

    def say(self, place: tuple[str, int], what: str, why: str, fix: str) -> None:
        self.problems.append(Problem(*place, what, why, fix))

    def value(self, hint: Any, node: Node, path: Path) -> Any:
        """The value of type `hint` that `node` holds, or BAD."""
        if not self.where.has(*path):
            self.where.put(path, node.file, node.line)
        origin, args = get_origin(hint), get_args(hint)
        if origin in (Union, types.UnionType):
            inner = [arg for arg in args if arg is not type(None)]
            if len(inner) < len(args) and isinstance(node, Scalar) and node.is_null:
                return None
            return self.value(inner[0], node, path) if len(inner) == 1 else self.one_of(inner, node, path)
        if is_dataclass(hint):
            return self.object(hint, node, path)
        if origin is dict:
            return self.mapping(args[1], node, path)
        if origin is tuple:
            return self.sequence(args[0], node, path)
        if origin is Literal:
            return self.choice(args, node, path)
        return self.scalar(hint, node, path)

    def scalar(self, hint: type, node: Node, path: Path) -> Any:
        if isinstance(node, Scalar):
            text = node.text
            if hint is str and node.tag == "str" and text.strip():
                return text
            if hint is int and node.plain and _INT.fullmatch(text) and len(text) < 40:
                return int(text)
            if hint is float and node.plain and _FLOAT.fullmatch(text) and math.isfinite(float(text)):
                return float(text)
            if hint is bool and node.plain and text in ("true", "false"):
                return text == "true"
        noun, example = _EXPECTED[hint]
        quoted = isinstance(node, Scalar) and not node.plain and hint is not str
        self.say(
            (node.file, node.line),
            f"{dotted(path)} is {shown(node)}, not {noun}",
            "a value in quotes is a text" if quoted else f"this key takes {noun}",
            f"write {noun}, such as {example}",
        )
        return BAD

    def choice(self, words: tuple[str, ...], node: Node, path: Path) -> Any:
        """One of the words."""
        word = self.scalar(str, node, path)
        if word is BAD or word in words:
            return word
        self.say(
            (node.file, node.line),
            f"unknown {path[-1]} {word!r} in {dotted(path[:-1])}",
            f"it is one of {', '.join(words)}",
            did_you_mean(word, words),
        )
        return BAD

    def bounded(self, value: Any, path: Path, default: Any = None) -> Any:
        """The value, or BAD if it is a number that cannot be."""
        broken = out_of_bounds(path[-1], value, default)
        if broken is None:
            return value
        self.say(self.where.at(*path), f"{dotted(path)} is {value}", *broken)
        return BAD

    def sequence(self, hint: Any, node: Node, path: Path) -> Any:
        if isinstance(node, Seq):
            paths = [(*path, str(i)) for i in range(len(node.items))]
            return tuple(self.bounded(self.value(hint, item, p), p) for item, p in zip(node.items, paths))
        self.say(
            (node.file, node.line),
            f"{dotted(path)} is {shown(node)}, not a list",
            "this key takes a list",
            f"write `{path[-1]}: [{shown(node) if isinstance(node, Scalar) else '…'}]`",
        )
        return BAD

    def is_map(self, node: Node, path: Path) -> bool:
        if isinstance(node, Map):
            return True
        self.say(
            (node.file, node.line),
            f"{dotted(path)} is {shown(node)}, not a mapping",
            "this key takes a mapping of names to values",
            f"write `{path[-1]}: {{name: value}}`",
        )
        return False

    def mapping(self, hint: Any, node: Node, path: Path) -> Any:
        if not self.is_map(node, path):
            return BAD
        out = {}
        for key, entry in node.entries.items():
            self.where.put((*path, key), entry.file, entry.line)
            out[key] = self.bounded(self.value(hint, entry.value, (*path, key)), (*path, key))
        return out

    def one_of(self, classes: list[type], node: Node, path: Path) -> Any:
        """A mapping whose `kind` says which of the classes it is."""
        if not self.is_map(node, path):
            return BAD
        known = [word for word, cls in self.kinds.items() if cls in classes]
        entry = node.entries.get("kind")
        if entry is None:
            self.say(
                self.where.at(*path),
                f"{dotted(path)} has no kind",
                "the kind says which formula is meant, and which keys belong here",
                f"add `kind:` with one of {', '.join(known)}",
            )
            return BAD
        word = self.value(str, entry.value, (*path, "kind"))
        if word is BAD:
            return BAD
        if word not in known:
            self.say(
                (entry.file, entry.line),
                f"unknown kind {word!r} in {dotted(path)}",
                "there is no formula of that name here",
                did_you_mean(word, known),
            )
            return BAD
        rest = Map(node.file, node.line, {key: e for key, e in node.entries.items() if key != "kind"})
        return self.object(self.kinds[word], rest, path)

    def object(self, cls: type, node: Node, path: Path) -> Any:
        """An instance of the dataclass; fields that could not be read, or are missing, are BAD."""
        if not self.is_map(node, path):
            return BAD
        hints = get_type_hints(cls)
        mine = {f.name: f for f in fields(cls) if not f.metadata.get("derived")}
        meant = set()
        for key, entry in node.entries.items():
            if key not in mine:
                free = [name for name in mine if name not in node.entries]
                meant.add(closest(key, free))
                self.say(
                    (entry.file, entry.line),
                    f"unknown key {dotted((*path, key))}",
                    f"{path[-1] if path else 'the file'} has no key of that name, and a key is never ignored",
                    did_you_mean(key, free if closest(key, free) else mine),
                )
        values: dict[str, Any] = {f.name: BAD for f in fields(cls) if f.metadata.get("derived")}
        for name, f in mine.items():
            if name in node.entries:
                entry = node.entries[name]
                scalar = isinstance(entry.value, Scalar)
                place = entry.value if scalar else entry
                self.where.put((*path, name), place.file, place.line)
                value = self.value(hints[name], entry.value, (*path, name))
                values[name] = self.bounded(value, (*path, name), f.default)
            elif f.default is MISSING and f.default_factory is MISSING:
                values[name] = BAD
                if name not in meant:  # a misspelt key has been reported as such
                    self.say(
                        self.where.at(*path),
                        f"missing key {dotted((*path, name))}",
                        f"{path[-1]} cannot do without it, and it has no default",
                        f"add `{name}:`",
                    )
        return cls(**values)
