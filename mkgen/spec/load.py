"""A YAML file, overlays and `--set` arguments to a `Spec`; or all of their mistakes at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from mkgen.errors import Problem, SpecErrors, did_you_mean
from mkgen.spec import extends, schedule
from mkgen.spec.bad import BAD, Poison
from mkgen.spec.model import Build, Gqa, Linear, Mla, Mlp, Model, Moe, Run, Spec
from mkgen.spec.typed import Reader
from mkgen.spec.validate import validate
from mkgen.spec.yaml_lines import Entry, Map, Node, Scalar, Where, parse_yaml, read_yaml

MIXERS = {"gqa": Gqa, "mla": Mla, "linear": Linear}
FFNS = {"mlp": Mlp, "moe": Moe}
SECTIONS = ("model", "build")


def load_spec(path: str | Path, overlays: Iterable[str | Path] = (), sets: Iterable[str] = ()) -> Spec:
    """Read, build and validate a spec.

    path: the YAML file with `model:` and, usually, `build:`.
    overlays: YAML files with only a `build:`; each of its keys replaces that key as a whole, later files win.
    sets: `build.key=value` with a YAML value; `build.mesh.chip=2` replaces one entry. They come last.
    Raises `SpecErrors` with every mistake that was found, each with its file and line.
    """
    file = str(path)
    problems: list[Problem] = []
    root = _root(path, problems)
    build = root.entries.get("build") if root else None
    for overlay in overlays:
        build = _overlay(build, _root(overlay, problems), str(overlay), problems)
    for text in sets:
        build = _set(build, text, problems)
    if root is None:
        raise SpecErrors(problems)
    for key, entry in root.entries.items():
        if key not in SECTIONS:
            problems.append(
                Problem(
                    entry.file,
                    entry.line,
                    f"unknown key {key}",
                    "a spec has two sections, and a key is never ignored",
                    did_you_mean(key, SECTIONS),
                )
            )
    reader = Reader({**MIXERS, **FFNS})
    model = _read(reader, root, problems)
    spec = Spec(model, _section(reader, Build, "build", build, root), file, reader.where)
    problems += reader.problems
    problems += validate(spec, clean=not problems)
    if problems:
        order = {place: i for i, place in enumerate(dict.fromkeys([file, *(p.file for p in problems)]))}
        raise SpecErrors(sorted(problems, key=lambda p: (order[p.file], p.line)))
    return spec


def read_model(root: Map) -> tuple[Model, Where, list[Problem]]:
    """The `model:` section of a parsed spec by itself, not validated; values that could not be read are BAD."""
    reader = Reader({**MIXERS, **FFNS})
    problems = reader.problems
    model = _read(reader, root, problems)
    return model, reader.where, problems


def _read(reader: Reader, root: Map, problems: list[Problem]) -> Model:
    """The model with its schedule expanded and every `extends` written out, or BAD."""
    written, parents = _written_out(root.entries.get("model"), problems)
    model = _section(reader, Model, "model", written, root)
    if model is not BAD:
        model = replace(model, schedule=_schedule(model, reader.where, problems))
        if parents:
            model = _with_inherited(model, parents, reader.where)
    return model


def _written_out(model: Entry | None, problems: list[Problem]) -> tuple[Entry | None, dict[str, str]]:
    """The model section with every `extends` written out, and which kind extends which."""
    parents: dict[str, str] = {}
    if model is None or not isinstance(model.value, Map):
        return model, parents
    section = model.value
    for group in ("mixers", "ffns"):
        entry = section.entries.get(group)
        if entry is not None and isinstance(entry.value, Map):
            kinds, found = extends.merged(entry.value, problems)
            section = section.with_entry(group, replace(entry, value=kinds))
            parents |= found
    return replace(model, value=section), parents


def _with_inherited(model: Model, parents: dict[str, str], where: Where) -> Model:
    try:
        return replace(model, checkpoint=extends.inherited(model, parents, where))
    except Poison:  # something that the shapes hang on could not be read, and has been reported
        return model


def _root(path: str | Path, problems: list[Problem]) -> Map | None:
    node, found = read_yaml(path)
    problems += found
    if node is None or isinstance(node, Map):
        return node
    problems.append(
        Problem(
            node.file,
            node.line,
            "is not a mapping",
            "a spec has the sections model: and build:",
            "begin with `model:`",
        )
    )
    return None


def _section(reader: Reader, cls: type, name: str, entry: Entry | None, root: Map):
    if entry is None:
        reader.say(
            (root.file, root.line),
            f"there is no `{name}:` section",
            {
                "model": "it says what the model is",
                "build": "it says for which chip and mesh the program is made",
            }[name],
            f"add `{name}:`" + (" here, or give a second file that has it" if name == "build" else ""),
        )
        return BAD
    reader.where.put((name,), entry.file, entry.line)
    return reader.object(cls, entry.value, (name,))


def _overlay(build: Entry | None, root: Map | None, file: str, problems: list[Problem]) -> Entry | None:
    """The build section with the overlay's keys put over it."""
    if root is None:
        return build
    for key, entry in root.entries.items():
        if key != "build":
            problems.append(
                Problem(
                    entry.file,
                    entry.line,
                    f"an overlay has the key {key}",
                    "an overlay says how to build a model, never what the model is",
                    "leave only `build:` in it",
                )
            )
    over = root.entries.get("build")
    if over is None:
        problems.append(
            Problem(
                file,
                root.line,
                "an overlay without `build:`",
                "there is nothing to put over the spec",
                "add `build:`",
            )
        )
        return build
    if build is None or not isinstance(build.value, Map) or not isinstance(over.value, Map):
        return over
    merged = build.value
    for key, entry in over.value.entries.items():
        merged = merged.with_entry(key, entry)
    return replace(build, value=merged)


def _set(build: Entry | None, text: str, problems: list[Problem]) -> Entry | None:
    """The build section with one `build.key=value` applied."""
    place = f"--set {text}"
    key, equals, value_text = text.partition("=")
    path = key.strip().split(".")
    if not equals or len(path) < 2 or not all(path):
        problems.append(
            Problem(
                place,
                0,
                "is not of the form build.key=value",
                "it names one key and its new value",
                "write, for instance, --set build.context=8192",
            )
        )
        return build
    if path[0] != "build":
        problems.append(
            Problem(
                place,
                0,
                f"sets a key of {path[0]!r}",
                "only the build can be changed from outside; the model is what its file says",
                "set a key under build., or edit the file",
            )
        )
        return build
    value, found = parse_yaml(value_text, place, lines=False)
    problems += found
    if value is None:
        return build
    start = build or Entry(place, 0, Map(place, 0, {}))
    return replace(start, value=_put(start.value, path[1:], value, place, problems))


def _put(node: Node, path: list[str], value: Node, place: str, problems: list[Problem]) -> Node:
    if not path:
        return value
    if not isinstance(node, Map):
        problems.append(
            Problem(
                place,
                0,
                f"{path[0]!r} is set inside something that is not a mapping",
                "only a mapping has keys",
                "set the whole value, as in build.rows=[1, 8]",
            )
        )
        return node
    old = node.entries.get(path[0])
    below = old.value if old and (len(path) == 1 or not _is_null(old.value)) else Map(place, 0, {})
    return node.with_entry(path[0], Entry(place, 0, _put(below, path[1:], value, place, problems)))


def _is_null(node: Node) -> bool:
    return isinstance(node, Scalar) and node.is_null


def _schedule(model: Model, where: Where, problems: list[Problem]):
    """The two columns side by side, or BAD if they cannot be: too short, too long, or not readable."""
    columns = []
    for column in ("mixer", "ffn"):
        text = getattr(model, column)
        if text is BAD:
            continue
        place = where.at("model", column)
        try:
            tree = schedule.parse(text)
        except schedule.ScheduleError as error:
            problems.append(
                Problem(
                    *place,
                    f"model.{column}: {error}",
                    "a column is made of names, '-', name*3 and (a*3 b)*23",
                    "correct the column",
                )
            )
            continue
        covered = schedule.length(tree)
        if model.layers is not BAD and covered != model.layers:
            problems.append(
                Problem(
                    *place,
                    f"model.{column} covers {covered} layers, the model has {model.layers}",
                    "each column names one thing for every layer, '-' where there is nothing",
                    f"change the counts so that they add up to {model.layers}, or correct layers",
                )
            )
            continue
        columns.append(schedule.expand(tree))
    if len(columns) < 2 or len(columns[0]) != len(columns[1]):
        return BAD
    return tuple(Run(mixer, ffn) for mixer, ffn in zip(*columns))
