"""A data file of model_specs/hub, filled in from a config: the text of a `model:` section, before it is tidied."""
from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2.exceptions import TemplateRuntimeError

from mkgen.errors import MkgenError, closest
from mkgen.importing.config import Config, rope_keys
from mkgen.importing.record import NOTHING, Keys, Missing, Record, shown
from mkgen.plan.runs import as_schedule, fold

SUFFIX = ".yaml.j2"


def hub_dir() -> Path:
    """The data files: inside the installed package, or in the checkout's model_specs."""
    packaged = Path(str(files("mkgen"))) / "hub"
    return packaged if packaged.is_dir() else packaged.parent.parent / "model_specs" / "hub"


def known_types() -> list[str]:
    """The model types that there is a data file for."""
    return sorted(p.name.removesuffix(SUFFIX) for p in hub_dir().glob(f"*{SUFFIX}") if not p.name.startswith("_"))


def ignorable() -> dict[str, dict[str, str]]:
    """keys, tensors: name or shell pattern -> why no decoder needs it."""
    raw = yaml.safe_load((hub_dir() / "_ignore.yaml").read_text("utf-8"))
    return {group: {name: why for why, names in raw[group].items() for name in names} for group in ("keys", "tensors")}


def data_file(config: Config) -> str:
    """The model type whose data file describes the config. Raises MkgenError if there is none."""
    known = known_types()
    for name in config.model_types:
        if name in known:
            return name
    wanted = " or ".join(config.model_types)
    near = closest(config.model_types[0], known)
    hint = f"the nearest known one is {near}; " if near else ""
    raise MkgenError(f"{config.file}: model_type: {wanted} has no data file\n"
                     f"  why: what a model type means is written in model_specs/hub/<model_type>{SUFFIX}, and is never guessed\n"
                     f"  fix: {hint}write that file (a spec with holes), or a spec by hand; known: {', '.join(known)}")


class Filler:
    """What a data file can say. `tensors_ignored`: shell patterns of checkpoint tensors -> why."""

    def __init__(self, config: Config, name: str):
        self.config, self.name, self.record = config, name, Record()
        self.keys_ignored: dict[str, str] = {}
        self.tensors_ignored: dict[str, str] = {}
        self.unquantised: set[str] = set()
        self.c = Keys(config.entries(), self.record)
        self.record.used["model_type"] = config.raw["model_type"]
        if config.nested:
            self.record.used["text_config.model_type"] = config.raw["text_config"].get("model_type")

    def text(self, model_type: str) -> str:
        env = Environment(loader=FileSystemLoader(hub_dir()), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                          extensions=["jinja2.ext.do", "jinja2.ext.loopcontrols"])
        env.filters["yes"] = lambda value: "true" if value else "false"
        env.globals.update(c=self.c, name=self.name, nested=self.config.nested, range=range, sqrt=math.sqrt, ln=math.log,
                           refuse=self.refuse, only=self.only, ignore=self.ignore, ignore_tensors=self.ignore_tensors,
                           column=self.column, layers=self.layers, choose=self.choose, one_based=self.one_based,
                           rope_of=self.rope_of, whole=self.whole, keep_bf16=self.keep_bf16,
                           hint_every=self.hint_every, pick=self.pick, inf=math.inf, zip=zip, quantised=self.config.is_quantised)
        try:
            text = env.get_template(model_type + SUFFIX).render()
            return text if text.strip() else ""
        except (TemplateRuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError):
            if not self.record.refused:              # a wrong value somewhere: what is known to be wrong is the cause
                raise
            return ""

    # -- what is refused and what is not needed ------------------------------------------------------------------------

    def refuse(self, key: str, why: str, fix: str = "") -> str:
        self.record.refuse(self.c.path(key), why, fix)
        return ""

    def only(self, key: str, allowed: Any, why: str, absent: Any = NOTHING) -> str:
        """Reads a key that may have one value, or one of several; another one is refused. It may be absent (`absent`: what
        its class then takes, if that is not the same as null)."""
        allowed = allowed if isinstance(allowed, (list, tuple)) else [allowed]
        value = self.c.maybe(key)
        if value is NOTHING and absent is not NOTHING:
            value = absent
            self.record.defaults[self.c.path(key)] = (absent, "the default of its class")
        if value is not NOTHING and value not in allowed:
            self.record.refuse(self.c.path(key), f"is {shown(value)}: {why}")
        return ""

    def ignore(self, why: str, *patterns: str) -> str:
        self.keys_ignored |= {pattern: why for pattern in patterns}
        return ""

    def ignore_tensors(self, why: str, *patterns: str) -> str:
        self.tensors_ignored |= {pattern: why for pattern in patterns}
        return ""

    def keep_bf16(self, *roles: str) -> str:
        """Roles that no quantisation touches, although they are matrices and no list of the config says so."""
        self.unquantised |= set(roles)
        return ""

    # -- numbers ---------------------------------------------------------------------------------------------------------

    def whole(self, value: float, what: str) -> int:
        """A product or quotient that has to be a whole number."""
        if value != int(value):
            self.record.refuse("", f"{what} is {value:g}, which is no whole number")
        return int(value)

    def rope_of(self, kind: str | None = None) -> Keys:
        return rope_keys(self.c, self.record, kind)

    # -- the schedule: always from what the config says, never from a rule of its class -----------------------------------

    def column(self, names: str | list[str | None], layers: int | None = None) -> str:
        """One name a layer, or one for all -> the run-length column."""
        if isinstance(names, str):
            return f"{names}*{self.c.num_hidden_layers if layers is None else layers}"
        text = as_schedule(fold(names)) if names else "missing"
        return f'"{text}"' if text.startswith("-") else text             # YAML would take it for a list

    def layers(self, key: str, names: dict[str, str | None], hint: str = "", count: int | None = None) -> list[str | None]:
        """A list with one word a layer -> the names of the spec. An absent list is refused: `hint` is what its class would do,
        for the user to confirm."""
        words = self.c.maybe(key)
        if words is NOTHING or isinstance(words, Missing):
            fix = f"if this is the model's, say so: --given {key}={hint}" if hint else f"add {key}"
            why = "the config does not say which layer is of which kind, and a schedule is never guessed"
            self.record.refuse(self.c.path(key), why, fix)
            return []
        if not isinstance(words, list):
            self.record.refuse(self.c.path(key), f"is {shown(words)}, not a list with one entry a layer")
            return []
        count = self.c.num_hidden_layers if count is None else count
        if len(words) != count:
            self.record.refuse(self.c.path(key), f"has {len(words)} entries, the model has {count} layers")
        unknown = sorted({str(w) for w in words if w not in names})
        if unknown:
            self.record.refuse(self.c.path(key), f"has layers of kind {', '.join(unknown)}; known: {', '.join(map(str, names))}")
            return []
        return [names[w] for w in words]

    def pick(self, words: list[str], names: dict[str, str | None]) -> list[str | None]:
        """The name of each word, None for a word that has none."""
        return [names.get(word) for word in words]

    def hint_every(self, most: str, other: str, every: int) -> str:
        """The words of a schedule with `other` on every n-th layer, for a hint."""
        n = self.c.num_hidden_layers
        return f"'{as_schedule(fold([other if (i + 1) % every == 0 else most for i in range(n)]))}'"

    def choose(self, count: int, test: Any, yes: str | None, no: str | None) -> list[str | None]:
        """`yes` on the layers (from 0) that are in the list `test`, `no` elsewhere."""
        outside = [i for i in test if not 0 <= i < count]
        if outside:
            self.record.refuse("", f"layer {outside[0]} is named, and layers go from 0 to {count - 1}")
        return [yes if i in test else no for i in range(count)]

    def one_based(self, key: str, lists: dict[str, Any], count: int) -> list[str | None]:
        """name -> list of layers counted from 1; together they name every layer once. key: where the config has them."""
        out: list[str | None] = [None] * count
        for name, numbers in lists.items():
            for n in numbers:
                if not 1 <= n <= count or out[n - 1] is not None:
                    why = "twice" if 1 <= n <= count else f"although there are {count}"
                    self.record.refuse(self.c.path(key), f"the lists of layers (counted from 1) name layer {n} {why}")
                    return []
                out[n - 1] = name
        if None in out and count == len(out):
            self.record.refuse(self.c.path(key), f"the lists of layers (counted from 1) leave out layer {out.index(None) + 1}")
            return []
        return out
