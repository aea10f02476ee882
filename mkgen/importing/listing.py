"""The checkpoint's tensor names, where they are known: they choose between two spellings, and every one of them must be used."""
from __future__ import annotations

import fnmatch
import json
import re
from pathlib import Path

from mkgen.errors import MkgenError
from mkgen.importing.config import INDEX_FILE
from mkgen.importing.record import Record
from mkgen.pack.vendor import SPARE
from mkgen.spec.checkpoint import parse
from mkgen.spec.model import Model
from mkgen.spec.roles import Tensor, tensors
from mkgen.spec.yaml_lines import Entry, Map, Scalar, Seq

# how a stored weight may be called instead: codes and scales of quantised checkpoints
STORED = ("", "_packed", "_blocks", "_scales", "_scale", "_scale_inv", "_scale_2", "_global_scale", "_shape", "_zero_point",
          "_g_idx")
CODES = ("qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv", "weight_scale_2", "weight_shape",
         "weight_zero_point", "weight_g_idx", "weight_global_scale", *SPARE)


def names_beside(config: Path) -> list[str] | None:
    """The names of the tensors of the checkpoint in the config's folder; None if there is none."""
    index = config.with_name(INDEX_FILE)
    if index.is_file():
        try:
            return list(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise MkgenError(f"{index}: is not an index of a checkpoint: {type(error).__name__} {error}") from None
    if config.with_name("model.safetensors").is_file():
        from mkgen.pack.hub import Checkpoint
        return Checkpoint(config.parent).names
    return None


def resolve(root: Map, present: frozenset[str] | None) -> Map:
    """A role with several spellings gets the one that the checkpoint has, or the first where there is no checkpoint."""
    entry = root.entries["model"].value.entries.get("checkpoint")
    if entry is None or not isinstance(entry.value, Map):
        return root
    stems = None if present is None else {_mask(name) for name in present}
    out = {}
    for role, e in entry.value.entries.items():
        value = e.value
        if isinstance(value, Seq):
            items = [item for item in value.items if isinstance(item, Scalar)]
            fits = [item for item in items if stems is not None and _spellings(_mask_pattern(item.text)) & stems]
            value = (fits or items)[0]
        out[role] = Entry(e.file, e.line, value)
    model = root.entries["model"]
    checkpoint = Entry(entry.file, entry.line, Map(entry.value.file, entry.value.line, out))
    return root.with_entry("model", Entry(model.file, model.line, model.value.with_entry("checkpoint", checkpoint)))


def check_tensors(model: Model, present: frozenset[str], ignored: dict[str, str], record: Record) -> None:
    """Every tensor that a role names is there, and every one that is there is named by a role, or has no use."""
    wanted: set[str] = set()
    for role, t in tensors(model).items():
        mine = list(names(model, t))
        absent = [name for name in mine if not _spellings(name) & present]
        if absent:
            record.refuse("", f"the checkpoint has no {absent[0]} (role {role}; {len(absent)} of {len(mine)} such tensors are missing)",
                          "the config and the checkpoint do not belong together, or the data file has another name for it")
        for name in mine:
            wanted |= _spellings(name)
    left = sorted(n for n in present - wanted if not any(fnmatch.fnmatchcase(n, pattern) for pattern in ignored))
    groups: dict[str, list[str]] = {}
    for name in left:
        groups.setdefault(_mask(name), []).append(name)
    for some in groups.values():
        record.refuse("", f"the checkpoint has {some[0]} ({len(some)} of this kind), which no role of the spec reads",
                      "the model has a part that its data file does not describe")


def names(model: Model, t: Tensor) -> list[str]:
    """The checkpoint's names of one role, layer by layer."""
    pattern = parse(model.checkpoint[t.role])
    if t.per == "model":
        return [pattern.format()]
    if t.owner in ("mixer", "ffn"):
        layers = [n for n, run in enumerate(model.schedule) if getattr(run, t.owner)]
    else:
        layers = [n for n, run in enumerate(model.schedule) if t.owner in (run.mixer, run.ffn)]
    if t.per != "expert" or "expert" not in pattern.fields:
        return [pattern.format(layer) for layer in layers]
    return [pattern.format(layer, e) for layer in layers for e in range(model.ffns[t.owner].experts)]


def _spellings(name: str) -> set[str]:
    """The names under which a weight, or its codes and scales, may be stored."""
    stem, dot, leaf = name.rpartition(".")
    out = {name + ending for ending in STORED}
    return out | {f"{stem}.{code}" for code in CODES} if dot and leaf == "weight" else out


def _mask(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".#", name)


def _mask_pattern(text: str) -> str:
    return _mask(parse(text).name.replace("{layer}", "0").replace("{expert}", "0"))
