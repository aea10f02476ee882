"""config.json -> spec: the steps, and what came of them."""
from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mkgen.errors import MkgenError
from mkgen.importing.build import BuildSection, build_section
from mkgen.importing.config import Config, given, read_config
from mkgen.importing.listing import check_tensors, names_beside, resolve
from mkgen.importing.quant import QUANT_KEY
from mkgen.importing.record import Record, Refusal, shown, unread
from mkgen.importing.render import Filler, data_file, ignorable
from mkgen.importing.tidy import Comments, comments, only_keys, printed, with_extends, without_defaults
from mkgen.spec import checks_ffns, checks_mixers, checks_model, checks_roles, checks_stream, params, schedule
from mkgen.spec.load import read_model
from mkgen.spec.model import Build, Model, Spec
from mkgen.spec.roles import tensors
from mkgen.spec.validate import Checker
from mkgen.spec.yaml_lines import Entry, Map, Scalar, Seq, parse_yaml

BLOCK = (("model",), ("model", "mixers"), ("model", "ffns"), ("model", "checkpoint"), ("model", "mixers", "*"), ("model", "ffns", "*"),
         ("build",))
OTHER = "another modality"                       # of _ignore.yaml


class ImportRefused(MkgenError):
    """A config that cannot be imported: everything that stands against it, and what was read."""

    def __init__(self, file: str, model_type: str, record: Record):
        self.file, self.model_type, self.record = file, model_type, record
        lines = [f"{file}: cannot be imported as {model_type}:"]
        for r in record.refused:
            lines.append(f"  {r}")
            if r.fix:
                lines.append(f"    fix: {r.fix}")
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class Imported:
    """text: the spec. tensors_ignored: shell patterns of checkpoint tensors that the text decoder has no use for."""
    file: str
    model_type: str
    text: str
    model: Model
    record: Record
    build: BuildSection | None
    parameters: int
    tensors_ignored: dict[str, str] = field(default_factory=dict)


def import_hf(path: str | Path, name: str | None = None, settings: tuple[str, ...] = (), ignore: tuple[str, ...] = (),
              model_only: bool = False, chip: str = "tpu7x", names: Iterable[str] | None = None) -> Imported:
    """Imports the config.json at `path` (or in the folder `path`). Raises MkgenError; ImportRefused with all the reasons."""
    config = read_config(path)
    if names is None:
        names = names_beside(Path(config.file))
    return import_config(replace(config, raw=given(config.raw, settings)), name, settings, ignore, model_only, chip, names)


def import_config(config: Config, name: str | None = None, settings: tuple[str, ...] = (), ignore: tuple[str, ...] = (),
                  model_only: bool = False, chip: str = "tpu7x", names: Iterable[str] | None = None) -> Imported:
    """settings: the `--given` already in the config, for the comment. names: of the checkpoint's tensors, where it is there."""
    model_type = data_file(config)
    filler = Filler(config, name or identifier(model_type))
    record, present = filler.record, None if names is None else frozenset(names)
    text = filler.text(model_type)
    ignored = ignorable()
    mine = {key: "--ignore" for key in ignore} | filler.keys_ignored | ignored["keys"]
    tree = notes = model = None
    if text:
        tree, notes, model = _model(text, filler, present)
    _account(config, record, mine)
    if record.refused:
        raise ImportRefused(config.file, model_type, record)
    assert tree is not None and notes is not None and model is not None
    tensors_ignored = ignored["tensors"] | filler.tensors_ignored
    idle = unneeded(filler, present, tensors_ignored)
    if present is not None:
        check_tensors(model, present, tensors_ignored, record)
    if idle:
        model, tree = replace(model, ignore=idle), _put(tree, "ignore", Seq("", 0, tuple(Scalar("", 0, i, "str", False) for i in idle)))
        notes.behind[("model", "ignore")] = "tensors that the decoder has no use for"
    section = None if model_only else build_section(config, model, chip, filler.unquantised, record)
    if record.refused:
        raise ImportRefused(config.file, model_type, record)
    if section is not None:
        tree = tree.with_entry("build", section.entry)
        notes.behind |= {("build", key): note for key, note in section.notes.items()}
        notes.above |= {("build", key): lines for key, lines in section.above.items()}
    notes.head = _head(config, model_type, model, record, settings, notes.head)
    return Imported(config.file, model_type, _checked(printed(tree, notes, BLOCK), model), model, record, section,
                    params.count(model), tensors_ignored)


def unneeded(filler: Filler, present: frozenset[str] | None, patterns: dict[str, str]) -> tuple[str, ...]:
    """Shell patterns of tensors that no role needs: those that the checkpoint has, or that one of its kind may have."""
    if present is not None:
        return tuple(p for p in patterns if any(fnmatch.fnmatchcase(name, p) for name in present))
    mine = [*filler.tensors_ignored]
    return tuple(mine + [p for p, why in patterns.items() if why == OTHER and filler.config.nested and p not in mine])


def identifier(text: str) -> str:
    """A model's name out of a file's or folder's."""
    name = "".join(ch if ch.isascii() and ch.isalnum() else "_" for ch in text).strip("_").lower()
    return name if name[:1].isalpha() else f"model_{name}".rstrip("_")


def _model(text: str, filler: Filler, present: frozenset[str] | None) -> tuple[Map | None, Comments | None, Model | None]:
    """The tidied tree, its comments and the model; None where the record says why not."""
    record = filler.record
    root, problems = parse_yaml(text, "the data file, filled in")
    if problems or not isinstance(root, Map):
        if record.refused:
            return None, None, None
        raise AssertionError(f"{problems[0] if problems else root}\n{text}")
    notes = comments(text, root)
    columns = [entry.value for key in ("mixer", "ffn") if (entry := root.entries["model"].value.entries.get(key))]
    try:
        used = {name for column in columns for name in schedule.names(schedule.parse(column.text))}
    except schedule.ScheduleError:
        used = None
    if used is not None:
        for group in ("mixers", "ffns"):
            root = only_keys(root, ("model", group), used.__contains__)
            if not root.entries["model"].value.entries[group].value.entries:
                root = _put(root, group, Map("", 0, {}))
    root = resolve(root, present)
    model, where, problems = read_model(root)
    if problems:
        for p in problems if not record.refused else ():      # else a consequence of what is said already
            record.refuse("", f"{p.what}: {p.why}{_suspects(p.what, record)}", p.fix)
        return None, None, None
    wanted = tensors(model)
    root = only_keys(root, ("model", "checkpoint"), wanted.__contains__)
    model = replace(model, checkpoint={role: p for role, p in model.checkpoint.items() if role in wanted})
    found: list = []
    checker = Checker(Spec(model, Build("tpu7x", {"core": 1}), "", where), found)
    for module in (checks_model, checks_stream, checks_mixers, checks_ffns, checks_roles):
        for check in module.CHECKS:
            checker.run(check)
    for p in found:
        record.refuse("", f"{p.what}: {p.why}")
    entry = root.entries["model"]
    root = root.with_entry("model", Entry(entry.file, entry.line, without_defaults(entry.value, model)))
    return with_extends(root), notes, model


def _put(root: Map, key: str, node: Any) -> Map:
    entry = root.entries["model"]
    return root.with_entry("model", Entry(entry.file, entry.line, entry.value.with_entry(key, Entry("", 0, node))))


def _suspects(what: str, record: Record) -> str:
    """The keys whose value a message shows: the spec's own key says little to the reader of a config."""
    same = [key for key, v in record.used.items() if not isinstance(v, (bool, dict, list)) and v is not None and f" {v}" in f" {what}"]
    return f" (in the config: {', '.join(f'{key} = {shown(record.used[key])}' for key in same[:3])})" if same else ""


def _account(config: Config, record: Record, ignored: dict[str, str]) -> None:
    """Every key is used, ignorable or refused."""
    outer = {k: v for k, v in config.raw.items() if not (k == "text_config" and config.nested)}
    record.used |= {k: v for k, v in outer.items() if f"text_config.{k}" in record.used}      # said twice; compared below
    known = {*ignored, *record.used, *record.defaults}
    for prefix, keys in (("", outer), ("text_config.", config.raw["text_config"] if config.nested else {})):
        part = Record(used={k.removeprefix(prefix): v for k, v in record.used.items() if k.startswith(prefix)})
        unread({k: v for k, v in keys.items() if k != QUANT_KEY}, part, ignored, {k.rpartition(".")[2] for k in known})
        record.ignored |= {prefix + key: why for key, why in part.ignored.items()}
        for r in part.refused:
            record.refused.append(Refusal(prefix + r.key, r.why, r.fix))
    for key in (k for k in outer if f"text_config.{k}" in record.used and k != "model_type"):
        inner = config.raw["text_config"][key]
        if inner is not None and outer[key] is not None and inner != outer[key]:
            record.refuse(key, f"is {shown(outer[key])}, and text_config.{key} is {shown(inner)}: the two contradict each other")


def _head(config: Config, model_type: str, model: Model, record: Record, settings: tuple[str, ...], said: list[str]) -> list[str]:
    """The comment at the top: where everything comes from."""
    file = Path(config.file)
    source = f"{file.parent.name}/{file.name}" if file.name == "config.json" and file.parent.name else file.name
    lines = [f"# Written by `mkgen import-hf` from {source}, model_type {model_type}.", *said]
    if settings:
        lines.append(f"# Said by the user, not by the config: {', '.join(settings)}.")
    for value, keys in _grouped(record).items():
        lines.append(f"# Not in the config, {value}: {', '.join(keys)}.")
    lines.append(f"# {params.count(model):,} parameters, counted from the shapes.")
    return lines


def _grouped(record: Record) -> dict[str, list[str]]:
    """Why -> `key = value` of the defaults that say something: false, 0, null and what is merely not there are left out."""
    out: dict[str, list[str]] = {}
    for key, (value, why) in record.defaults.items():
        if value and why:
            out.setdefault(why, []).append(f"{key} = {shown(value)}")
    return out


def _checked(text: str, model: Model) -> str:
    """The text, after it has been read again: it must say what was read before it was tidied."""
    root, problems = parse_yaml(text, "the spec")
    assert not problems and isinstance(root, Map), f"{problems}\n{text}"
    again, _, problems = read_model(root)
    assert not problems, f"{problems}\n{text}"
    assert again == model, f"the tidied spec differs:\n{again}\n{model}"
    return text
