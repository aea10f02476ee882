"""config.json in its two dialects: what a file says, with the text decoder's keys in front and the rope's in one place."""
from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mkgen.errors import MkgenError
from mkgen.importing.record import Found, Keys, Record

TEXT = "text_config"
QUANT_FILE, INDEX_FILE = "hf_quant_config.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class Config:
    """A config and what lies beside it. quant: the contents of hf_quant_config.json."""
    file: str
    raw: dict[str, Any]
    quant: dict[str, Any] = field(default_factory=dict)

    @property
    def nested(self) -> bool:
        return isinstance(self.raw.get(TEXT), dict)

    @property
    def is_quantised(self) -> bool:
        inner = self.raw[TEXT] if self.nested else {}
        return bool(self.quant or self.raw.get("quantization_config") or inner.get("quantization_config"))

    @property
    def model_types(self) -> tuple[str, ...]:
        """The names to look for, the outer one first: a text_config may call itself by the class it derives from."""
        inner = self.raw[TEXT].get("model_type") if self.nested else None
        return tuple(t for t in (self.raw.get("model_type"), inner) if isinstance(t, str))

    def entries(self) -> dict[str, Found]:
        """Name -> value. A key of the text_config counts before one of the same name around it."""
        out = {key: Found(key, value) for key, value in self.raw.items()}
        if self.nested:
            inner = {key: Found(f"{TEXT}.{key}", value) for key, value in self.raw[TEXT].items()}
            out |= {key: found for key, found in inner.items() if found.value is not None or key not in out}
        return out


def read_config(path: str | Path) -> Config:
    """Raises MkgenError if there is no file, or none that is a config."""
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    raw = _read(file)
    for key in ("model_type",):
        if not isinstance(raw.get(key), str):
            raise MkgenError(f"{file}: no {key}, which says what kind of model it is; this is not a config.json of transformers")
    beside = [file.with_name(QUANT_FILE), file.with_name(file.name.replace("config.json", QUANT_FILE))]
    quant = next((_read(p) for p in beside if p.is_file() and p != file), {})
    return Config(str(file), raw, quant)


def _read(file: Path) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict:
        out = dict(pairs)
        if len(out) < len(pairs):
            twice = sorted({k for k, _ in pairs if sum(k == other for other, _ in pairs) > 1})
            raise MkgenError(f"{file}: written twice: {', '.join(twice)}; only one can be meant")
        return {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}[out["__float__"]] if set(out) == {"__float__"} else out

    try:
        raw = json.loads(file.read_text("utf-8"), object_pairs_hook=once)
    except OSError as error:
        raise MkgenError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise MkgenError(f"{file}: is not JSON: {error}") from None
    if not isinstance(raw, dict):
        raise MkgenError(f"{file}: is not a JSON object; a config is one")
    return raw


def given(raw: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """The config with `key=value` of the command line put into it (into the text_config where there is one).

    A schedule may be written in run-length: layer_types='(linear_attention*3 full_attention)*12'."""
    from mkgen.spec import schedule

    out = json.loads(json.dumps(raw))
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise MkgenError(f"--given {text}: is not of the form key=value")
        try:
            read = json.loads(value)
        except ValueError:
            read = list(schedule.expand(value)) if any(ch in value for ch in "*( ") else value
        inside = out[TEXT] if isinstance(out.get(TEXT), dict) else out
        inside[key.strip()] = read
    return out


# -- rope: rope_parameters of transformers 5, or rope_theta + rope_scaling + partial_rotary_factor of older hub files ----------

def rope_keys(c: Keys, record: Record, kind: str | None) -> Keys:
    """The rope's keys under the names of transformers 5, from either dialect. kind: the layer type, where each has its own rope.

    Keys of `rope_parameters` count first; a key that stands in both places with two values is a contradiction."""
    entries: dict[str, Found] = {}
    for group in ("rope_parameters", "rope_scaling"):
        found = _inside(c, record, group, kind)
        for name, value in found.items():
            name = "rope_type" if name == "type" else name
            _put(entries, name, value, record)
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if name in c and not isinstance(c.value(name), (list, dict)):
            _put(entries, name, Found(c.path(name), c.value(name)), record)
    return Keys(entries, record, "the rope's part of the config")


def _inside(c: Keys, record: Record, group: str, kind: str | None) -> dict[str, Found]:
    if not isinstance(c.value(group), dict):
        if group in c:
            record.refuse(c.path(group), f"is {c.value(group)!r}, not a mapping", "write a mapping with rope_type and its numbers")
        return {}
    if not c.value(group):
        record.used[c.path(group)] = {}
    inner = c.inside(group)
    if kind is not None and isinstance(inner.value(kind), dict):
        inner = inner.inside(kind)
    return {name: Found(inner.path(name), inner.value(name)) for name in inner.names() if not isinstance(inner.value(name), dict)}


def _put(entries: dict[str, Found], name: str, found: Found, record: Record) -> None:
    first = entries.setdefault(name, found)
    if first.value is None and found.value is not None:
        entries[name] = found
    elif found.value is not None and first.value != found.value:
        record.refuse(found.path, f"is {found.value}, and {first.path} is {first.value}: the two contradict each other",
                      "leave one of them")
    if first is not found:
        record.used[found.path] = found.value
