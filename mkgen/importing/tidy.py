"""The rendered text as a person would have written it: nothing that is a default, no kind and no tensor that the model does
not have, one style, and the comments of the data file behind their keys."""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

from mkgen.spec.yaml_lines import Entry, Map, Node, Scalar, Seq

Path = tuple[str, ...]
SPELT = ("eps", "base", "score", "renorm", "norm", "router")                 # written out even where they are the default: a reader looks for them
WIDE = 118
_COMMENT = re.compile(r"\s{2,}#\s?(.*)$")


@dataclass
class Comments:
    """behind: path -> the comment on the key's line; above: path -> the lines in front of it."""
    behind: dict[Path, str] = field(default_factory=dict)
    above: dict[Path, list[str]] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)


def comments(text: str, root: Map) -> Comments:
    """The comments of a text, by the first key on their line, or on the next line that has one."""
    out, first = Comments(), {}
    for path, line in _places(root, ()):
        first.setdefault(line, path)
    waiting: list[str] = []
    for n, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            waiting.append(line.strip())
        elif n in first:
            if waiting:
                if len(first[n]) == 1 and not out.head:
                    out.head = waiting
                else:
                    out.above[first[n]] = waiting
                waiting = []
            if match := _COMMENT.search(line):
                out.behind[first[n]] = match[1]
    return out


def _places(node: Node, path: Path):
    if isinstance(node, Map):
        for key, entry in node.entries.items():
            yield (*path, key), entry.line
            yield from _places(entry.value, (*path, key))


def without_defaults(node: Node, value: Any) -> Node:
    """The node less the keys whose value is what the field is anyway. `value`: what was read out of it."""
    if not isinstance(node, Map):
        return node
    if isinstance(value, dict):
        return _replaced(node, {key: without_defaults(e.value, value[key]) for key, e in node.entries.items() if key in value})
    if not is_dataclass(value):
        return node
    mine, kept = {f.name: f for f in fields(value)}, {}
    for key, entry in node.entries.items():
        f = mine.get(key)
        if f is not None:
            have, default = getattr(value, key), _default(f)
            written = not (isinstance(entry.value, Scalar) and entry.value.is_null)
            if have == default and not (key in SPELT and written):
                continue
            if not written:
                continue
        kept[key] = without_defaults(entry.value, getattr(value, key, None))
    return _replaced(node, kept)


def _default(f: Any) -> Any:
    return f.default if f.default is not MISSING else f.default_factory() if f.default_factory is not MISSING else MISSING


def _replaced(node: Map, values: dict[str, Node]) -> Map:
    return Map(node.file, node.line, {k: Entry(node.entries[k].file, node.entries[k].line, v) for k, v in values.items()})


def only_keys(node: Map, path: Path, keep: Callable[[str], bool]) -> Map:
    """The tree with only those entries of the mapping at `path` that are to be kept."""
    if path[0] not in node.entries or not isinstance(node.entries[path[0]].value, Map):
        return node
    entry = node.entries[path[0]]
    if len(path) > 1:
        inner = only_keys(entry.value, path[1:], keep)
    else:
        inner = Map(entry.value.file, entry.value.line, {k: e for k, e in entry.value.entries.items() if keep(k)})
    return node.with_entry(path[0], Entry(entry.file, entry.line, inner))


# -- a kind as a variation of another -----------------------------------------------------------------------------------------

def with_extends(root: Map) -> Map:
    """The tree with kinds written as `extends`, where that takes at most half as many keys; and without the roles that they
    then take over."""
    model = root.entries["model"].value
    parents: dict[str, str] = {}
    for group in ("mixers", "ffns"):
        entry = model.entries[group]
        model = model.with_entry(group, Entry(entry.file, entry.line, _varied(entry.value, parents)))
    entry = model.entries["checkpoint"]
    roles = {role: e.value.text for role, e in entry.value.entries.items() if isinstance(e.value, Scalar)}

    def own(role: str) -> bool:
        name, _, leaf = role.partition(".")
        return name not in parents or roles[role] != roles.get(f"{parents[name]}.{leaf}")

    model = model.with_entry("checkpoint", Entry(entry.file, entry.line, Map(entry.value.file, entry.value.line, {
        role: e for role, e in entry.value.entries.items() if own(role)})))
    return root.with_entry("model", Entry(root.entries["model"].file, root.entries["model"].line, model))


def _varied(group: Map, parents: dict[str, str]) -> Map:
    out: dict[str, Entry] = {}
    for name, entry in group.entries.items():
        mine, best = entry.value.entries, None
        for other in (n for n in out if n not in parents):
            theirs = group.entries[other].value.entries
            if inline(mine["kind"].value) != inline(theirs["kind"].value):
                continue
            changed = {k: e for k, e in mine.items() if k not in theirs or inline(e.value) != inline(theirs[k].value)}
            changed |= {k: Entry("", 0, Scalar("", 0, "null", "null", True)) for k in theirs if k not in mine}
            if 2 * (len(changed) + 1) <= len(mine) and (best is None or len(changed) < len(best[1])):
                best = (other, changed)
        if best:
            parents[name] = best[0]
            keys = {"extends": Entry("", 0, Scalar("", 0, best[0], "str", True)), **best[1]}
            entry = Entry(entry.file, entry.line, Map(entry.value.file, entry.value.line, keys))
        out[name] = entry
    return Map(group.file, group.line, out)


# -- printing -----------------------------------------------------------------------------------------------------------------

def printed(root: Map, notes: Comments, block: tuple[Path, ...]) -> str:
    """YAML text. `block`: paths of mappings that are always written one key a line."""
    lines = [*notes.head]
    _print(root, (), 0, notes, {*block}, lines)
    return "\n".join(lines) + "\n"


def _print(node: Map, path: Path, indent: int, notes: Comments, block: set[Path], out: list[str]) -> None:
    pad = "  " * indent
    for key, entry in node.entries.items():
        here = (*path, key)
        out += [pad + line for line in notes.above.get(here, ())]
        short = isinstance(entry.value, Map) and "extends" in entry.value.entries and not any(here == p[:-1] for p in notes.behind)
        flow = None if isinstance(entry.value, Map) and _is_block(here, block) and not short else inline(entry.value)
        if flow is None or isinstance(entry.value, Map) and len(pad) + len(key) + len(flow) + 2 > WIDE:
            out.append(_commented(f"{pad}{key}:", notes.behind.get(here)))
            _print(entry.value, here, indent + 1, notes, block, out)
        else:
            out.append(_commented(f"{pad}{key}: {flow}", notes.behind.get(here)))


def _is_block(path: Path, block: set[Path]) -> bool:
    return path in block or any(len(b) == len(path) and all(x in ("*", y) for x, y in zip(b, path)) for b in block)


def _commented(line: str, comment: str | None) -> str:
    return line if not comment else f"{line:<35} # {comment}" if len(line) < 35 else f"{line}    # {comment}"


def inline(node: Node) -> str:
    """A node on one line."""
    if isinstance(node, Map):
        return "{" + ", ".join(f"{key}: {inline(e.value)}" for key, e in node.entries.items()) + "}"
    if isinstance(node, Seq):
        return "[" + ", ".join(inline(item) for item in node.items) + "]"
    return number(node.text) if node.plain else '"' + node.text.replace('"', "'") + '"'


def number(text: str) -> str:
    """1e-06 -> 1.0e-6, which YAML takes for a number too; other texts as they are."""
    match = re.fullmatch(r"(-?\d+)(\.\d+)?e([-+]?)0*(\d+)", text)
    return f"{match[1]}{match[2] or '.0'}e{'-' if match[3] == '-' else ''}{match[4]}" if match else text
