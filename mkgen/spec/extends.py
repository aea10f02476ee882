"""`extends: other` in a mixer or ffn: it is `other`, but for the keys that it writes itself; null takes a key's default back.

Its checkpoint roles are those of `other` as well, under its own name, but for those that `model.checkpoint` gives it.
"""
from __future__ import annotations

from mkgen.errors import Problem, did_you_mean
from mkgen.spec.bad import BAD
from mkgen.spec.model import Model
from mkgen.spec.roles import kind_tensors
from mkgen.spec.yaml_lines import Entry, Map, Scalar, Where

KEY = "extends"


def merged(group: Map, problems: list[Problem]) -> tuple[Map, dict[str, str]]:
    """The mapping of kinds with every `extends` written out; and which kind extends which."""
    parents = {name: e.value.entries[KEY] for name, e in group.entries.items() if isinstance(e.value, Map) and KEY in e.value.entries}
    done: dict[str, Map] = {}

    def whole(name: str, chain: tuple[str, ...]) -> Map:
        own = group.entries[name].value
        if name in done or name not in parents:
            return done.get(name, own)
        entry, rest = parents[name], Map(own.file, own.line, {k: e for k, e in own.entries.items() if k != KEY})
        parent = entry.value.text if isinstance(entry.value, Scalar) else ""
        others = [n for n, e in group.entries.items() if n != name and isinstance(e.value, Map)]
        if parent in chain or parent not in others:
            problems.append(Problem(entry.file, entry.line, f"{name} extends {parent or 'something that is no name'}",
                                    "it goes round in a circle" if parent in (name, *chain) else "there is no kind of that name beside it",
                                    did_you_mean(parent, [n for n in others if n not in chain])))
            done[name] = rest
            return rest
        base = whole(parent, (*chain, name))
        entries = {**base.entries, **rest.entries}
        done[name] = Map(own.file, own.line, {k: e for k, e in entries.items() if not (k in rest.entries and _is_null(e))})
        return done[name]

    out = {name: Entry(e.file, e.line, whole(name, (name,))) if name in parents else e for name, e in group.entries.items()}
    return Map(group.file, group.line, out), {n: e.value.text for n, e in parents.items() if isinstance(e.value, Scalar)}


def _is_null(entry: Entry) -> bool:
    return isinstance(entry.value, Scalar) and entry.value.is_null and entry.value.plain


def inherited(model: Model, parents: dict[str, str], where: Where) -> dict[str, str]:
    """model.checkpoint with the roles that kinds take over from those they extend."""
    out, kinds = dict(model.checkpoint), {**model.mixers, **model.ffns}
    for name in parents:
        if name not in kinds or kinds[name] is BAD:
            continue
        for t in kind_tensors(name, kinds[name], model.hidden):
            source, seen = name, {name}
            while t.role not in out and parents.get(source) not in (None, *seen):
                source = parents[source]
                seen.add(source)
                role = source + t.role[len(name):]
                if role in model.checkpoint:
                    out[t.role] = model.checkpoint[role]
                    where.put(("model", "checkpoint", t.role), *where.at("model", "checkpoint", role))
    return out
