"""Reading a config while keeping account of it: which keys were used, which were left to a default, what is refused.

A data file asks for keys through `Keys`. A key that must be there and is not becomes a `Missing`, which lets the rest of the file
be rendered, so that all the mistakes are found at once.
"""
from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mkgen.errors import closest

NOTHING = object()


class Missing(int):
    """Stands for a value that the config should have; a number, a list or a mapping, whichever is asked for."""

    def __new__(cls):
        return super().__new__(cls, 1)

    def __iter__(self):
        return iter(())

    def __len__(self):
        return 0

    def __getitem__(self, key):
        return self

    def __contains__(self, key):
        return False


@dataclass(frozen=True)
class Refusal:
    """Why something cannot be imported. key: the config's key, dotted; empty for what is not about one."""
    key: str
    why: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.key}: {self.why}" if self.key else self.why


@dataclass
class Record:
    """What happened to each key, by its dotted path."""
    used: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, tuple[Any, str]] = field(default_factory=dict)      # value, why
    ignored: dict[str, str] = field(default_factory=dict)                   # key -> why
    refused: list[Refusal] = field(default_factory=list)

    def refuse(self, key: str, why: str, fix: str = "") -> None:
        if all((r.key, r.why) != (key, why) for r in self.refused):
            self.refused.append(Refusal(key, why, fix))


@dataclass(frozen=True)
class Found:
    """A value and the dotted path under which the config has it."""
    path: str
    value: Any


class Keys:
    """A mapping of the config. `entries`: name -> Found. `label` says what it is, in messages."""

    def __init__(self, entries: dict[str, Found], record: Record, label: str = "the config"):
        self._entries, self._record, self._label = entries, record, label

    def _take(self, name: str) -> Any:
        """The value, noted as used; NOTHING if it is absent or null (transformers reads null as absent)."""
        found = self._entries.get(name)
        if found is None:
            return NOTHING
        self._record.used[found.path] = found.value
        if found.value is None:
            return NOTHING
        if isinstance(found.value, float) and math.isnan(found.value):
            self._record.refuse(found.path, "is not a number", "write a number")
        if isinstance(found.value, dict):
            return self.inside(name)
        return found.value

    def inside(self, name: str) -> Keys:
        found = self._entries[name]
        return Keys({key: Found(f"{found.path}.{key}", value) for key, value in found.value.items()}, self._record, found.path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self.one(name)

    __getitem__ = __getattr__

    def __contains__(self, name: str) -> bool:
        return name in self._entries and self._entries[name].value is not None

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def path(self, name: str) -> str:
        """The dotted path of a key as the config has it, or would have it."""
        return self._entries[name].path if name in self._entries else name

    def value(self, name: str) -> Any:
        """The value as it is, without taking note of it."""
        return self._entries[name].value if name in self._entries else None

    def one(self, *names: str) -> Any:
        """The value of a key that must be there; with several names, of the one that is."""
        value = self.maybe(*names)
        if value is NOTHING:
            self._record.refuse(names[0], f"{self._label} does not say it, and the model cannot be described without it",
                                f"add {' or '.join(names)}")
            return Missing()
        return value

    def maybe(self, *names: str) -> Any:
        """The value under the first name that is there, or NOTHING. Two names with different values contradict each other."""
        values = {self.path(name): self._take(name) for name in names if name in self._entries}
        values = {path: v for path, v in values.items() if v is not NOTHING}
        plain = {path: v for path, v in values.items() if not isinstance(v, Keys)}
        if len(plain) > 1 and any(v != next(iter(plain.values())) for v in plain.values()):
            listed = ", ".join(f"{path} is {v}" for path, v in plain.items())
            self._record.refuse(next(iter(plain)), f"two names of one number contradict each other: {listed}", "leave one of them")
        return next(iter(values.values()), NOTHING)

    def get(self, names: str | Iterable[str], default: Any, why: str = "the default of its class") -> Any:
        """The value, or a default that is not the config's and is noted as such."""
        names = (names,) if isinstance(names, str) else tuple(names)
        value = self.maybe(*names)
        if value is not NOTHING:
            return value
        self._record.defaults[self.path(names[0])] = (default, why)
        return default

    def opt(self, names: str | Iterable[str], absent: Any) -> Any:
        """The value, or what its absence means: a feature that the model does not have."""
        return self.get(names, absent, "")

    def has(self, *names: str) -> bool:
        """Whether one of the keys is there and is neither null, false, 0 nor empty."""
        value = self.maybe(*names) if names else NOTHING
        return value is not NOTHING and bool(value)


def unread(config: dict, record: Record, ignorable: dict[str, str], known: Iterable[str]) -> None:
    """Sorts the keys that nobody asked for into the ignorable and the refused. Null says nothing, and is no key."""
    patterns = [(pattern, why) for pattern, why in ignorable.items() if any(ch in pattern for ch in "*?[")]
    for path, value in flat(config, record).items():
        leaf = path.rpartition(".")[2]
        why = next((ignorable[name] for name in (path, leaf) if name in ignorable), None)
        why = why or next((w for pattern, w in patterns if any(fnmatch.fnmatchcase(n, pattern) for n in (path, leaf))), None)
        if why is None and value is None:
            why = "null"
        near = closest(leaf, set(known) - {leaf})
        if why is not None:
            record.ignored[path] = why
        else:
            record.refuse(path, f"a key that the data file of this model type does not read (its value is {shown(value)})",
                          (f"did you mean {near}? " if near else "") + f"if the decoder does not need it, say so: --ignore {leaf}")


def flat(config: dict, record: Record, prefix: str = "") -> dict[str, Any]:
    """Dotted path -> value of everything that was not used. A mapping that nobody looked into is one value."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        inside = f"{path}."
        if isinstance(value, dict) and any(used.startswith(inside) for used in record.used):
            out |= flat(value, record, inside)
        elif path not in record.used:
            out[path] = value
    return out


def shown(value: Any) -> str:
    """A value in a few words."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:56]} ..."
