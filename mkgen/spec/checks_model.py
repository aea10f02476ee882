"""Checks of what the model is, whatever it is built for."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING

from mkgen.errors import closest, did_you_mean
from mkgen.spec import params, schedule
from mkgen.spec.bad import BAD
from mkgen.spec.model import Activation, Gqa, Kda, Mla, Moe, Residual, Rope

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker

ACTIVATIONS = ("silu", "situ")
SCORES = ("softmax", "sigmoid")
RESIDUALS = ("add", "block_softmax")
RESERVED = ("begin", "end", "mixer", "ffn", "residual", "embed", "head", "norm", "experts")
TOLERANCE = 1e-3  # of the published parameter count: it is often rounded

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def usable(name: str) -> bool:
    """Whether a name can stand in generated Python and in a schedule column."""
    return bool(_NAME.fullmatch(str(name))) and not keyword.iskeyword(name)


def model_name(c: Checker) -> None:
    if not usable(c.model.name):
        c.say(
            ("model", "name"),
            f"model.name is {c.model.name!r}",
            "it becomes the name of a Python module",
            "use letters, digits and '_', not beginning with a digit",
        )


def kind_names(c: Checker) -> None:
    for group, other in (("mixers", None), ("ffns", "mixers")):
        kinds = getattr(c.model, group)
        if kinds is BAD:
            continue
        for name in kinds:
            if not usable(name) or name in RESERVED:
                c.say(
                    ("model", group, name),
                    f"{name!r} cannot be the name of a kind",
                    "it becomes a Python function, a word of the schedule and a prefix of checkpoint roles",
                    f"use letters, digits and '_', and none of {', '.join(RESERVED)}",
                )
            elif other and getattr(c.model, other) is not BAD and name in getattr(c.model, other):
                c.say(
                    ("model", group, name),
                    f"{name!r} is a mixer and an ffn",
                    "checkpoint roles begin with this name, and could not be told apart",
                    "rename one of the two",
                )


def columns(c: Checker) -> None:
    """Each column names kinds that are defined, and every defined kind is named."""
    for column, group in (("mixer", "mixers"), ("ffn", "ffns")):
        text, kinds = getattr(c.model, column), getattr(c.model, group)
        if text is BAD or kinds is BAD:
            continue
        try:
            used = schedule.names(schedule.parse(text))
        except schedule.ScheduleError:
            continue  # reported by load.py
        meant = set()
        for name in used:
            if name not in kinds:
                meant.add(closest(name, kinds))
                c.say(
                    ("model", column),
                    f"model.{column} names {name!r}, which is not under {group}",
                    f"a layer needs a kind that is defined under model.{group}",
                    did_you_mean(name, kinds),
                )
        for name in kinds:
            if name not in used and name not in meant:
                c.say(
                    ("model", group, name),
                    f"model.{group}.{name} is never used",
                    f"the column `{column}: {text}` does not name it",
                    "use it in the column, or delete it",
                )


def layers(c: Checker) -> None:
    """Every layer does something; a block of snapshots is opened by a mixer."""
    empty = [i for i, run in enumerate(c.model.schedule) if run.mixer is None and run.ffn is None]
    if empty:
        c.say(
            ("model", "ffn"),
            f"layer {empty[0]} has neither a mixer nor an ffn ({len(empty)} such layers)",
            "both columns have '-' there",
            "delete these layers from both columns and from layers",
        )
    if c.model.residual.kind == "block_softmax" and c.model.residual.block:
        bare = [
            i
            for i, run in enumerate(c.model.schedule)
            if run.mixer is None and i % c.model.residual.block == 0
        ]
        if bare:
            c.say(
                ("model", "mixer"),
                f"layer {bare[0]} opens a block of the residual but has no mixer",
                f"with block: {c.model.residual.block} the snapshot is taken in the mixer of that layer",
                "give the layer a mixer, or choose another block",
            )


def residual(c: Checker) -> None:
    r: Residual = c.model.residual
    path = ("model", "residual")
    if r.kind not in RESIDUALS:
        c.say(
            (*path, "kind"),
            f"unknown residual kind {r.kind!r}",
            "there is no formula of that name",
            did_you_mean(r.kind, RESIDUALS),
        )
    elif r.kind == "block_softmax":
        if r.block == 0:
            c.say(
                (*path, "block") if c.where.has(*path, "block") else path,
                "block_softmax needs a block of at least 1",
                "a snapshot is taken every `block` layers",
                "add `block:` with the number of layers",
            )
    elif r.block > 0:
        c.say(
            (*path, "block"),
            f"block: {r.block} has no effect with kind: add",
            "only block_softmax takes snapshots",
            "delete it, or write `kind: block_softmax`",
        )


def mixers(c: Checker) -> None:
    for name, kind in c.each("mixers"):
        path = ("model", "mixers", name)
        c.run(_MIXER_CHECKS[type(kind)], kind, path)


def _gqa(c: Checker, a: Gqa, path: tuple[str, ...]) -> None:
    c.run(_rope, a.rope, a.head_dim, "head_dim", path)
    if a.qk_norm is not None:
        c.run(_no_offset, a.qk_norm.offset, (*path, "qk_norm", "offset"))
    if a.heads % a.kv_heads:
        c.say(
            (*path, "kv_heads"),
            f"{a.heads} heads cannot share {a.kv_heads} kv_heads evenly",
            "each key/value head serves the same number of query heads",
            "make heads a multiple of kv_heads",
        )


def _mla(c: Checker, a: Mla, path: tuple[str, ...]) -> None:
    if a.rope is not None:
        c.say(
            (*path, "rope"),
            "rope on an mla is not built yet",
            "the shared key would be cached without its rotation",
            "leave it out if the model has no positional encoding here; otherwise it cannot be built",
        )


def _kda(c: Checker, a: Kda, path: tuple[str, ...]) -> None:
    c.run(_no_offset, a.norm.offset, (*path, "norm", "offset"))
    if a.conv < 2:
        c.say(
            (*path, "conv"),
            f"conv is {a.conv}",
            "the convolution keeps conv - 1 earlier inputs of each sequence",
            "write 2 or more taps",
        )
    if a.decay_floor >= 0:
        c.say(
            (*path, "decay_floor"),
            f"decay_floor is {a.decay_floor:g}",
            "the log decay lies between it and 0; at 0 or above the state would never fade",
            "write a number below 0, such as -5.0",
        )


def _no_offset(c: Checker, offset: float, path: tuple[str, ...]) -> None:
    if offset != 0.0:
        c.say(
            path,
            f"a per-head norm with offset {offset:g} is not built yet",
            "per-head norms multiply with their weight alone",
            "leave offset out",
        )


def _rope(c: Checker, rope: Rope | None, head_dim: int, name: str, path: tuple[str, ...]) -> None:
    if rope is None:
        return
    width = head_dim if rope.width is None else rope.width
    if width > head_dim or width % 2:
        c.say(
            (*path, "rope", "width"),
            f"rope cannot rotate {width} features of a head of {head_dim}",
            f"features are rotated in pairs, and there are {head_dim} ({name})",
            f"make width an even number of at most {head_dim}",
        )


_MIXER_CHECKS = {Gqa: _gqa, Mla: _mla, Kda: _kda}


def ffns(c: Checker) -> None:
    for name, kind in c.each("ffns"):
        path = ("model", "ffns", name)
        c.run(_activation, kind.activation, (*path, "activation"))
        if isinstance(kind, Moe):
            c.run(_top_k, kind, path)
            c.run(_latent_norm, kind, path)
            c.run(_score, kind, path)


def _activation(c: Checker, a: Activation, path: tuple[str, ...]) -> None:
    if a.kind not in ACTIVATIONS:
        c.say(
            (*path, "kind"),
            f"unknown activation {a.kind!r}",
            "there is no formula of that name",
            did_you_mean(a.kind, ACTIVATIONS),
        )
    elif a.kind == "silu":
        for key in ("beta", "linear_beta"):
            if c.where.has(*path, key):
                c.say(
                    (*path, key),
                    f"{key} has no effect with kind: silu",
                    "only situ has these constants",
                    "delete it, or write `kind: situ`",
                )


def _top_k(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    if f.top_k > f.experts:
        c.say(
            (*path, "top_k"),
            f"top_k {f.top_k} is more than the {f.experts} experts there are",
            "a row takes each expert at most once",
            f"make top_k at most {f.experts}",
        )


def _latent_norm(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    if f.latent_norm is not None and f.latent == 0:
        c.say(
            (*path, "latent_norm"),
            "latent_norm without latent",
            "it norms the sum of the experts in the latent width, and there is none",
            "add `latent:` with that width, or delete latent_norm",
        )


def _score(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    if f.router.score not in SCORES:
        c.say(
            (*path, "router", "score"),
            f"unknown router score {f.router.score!r}",
            "there is no formula of that name",
            did_you_mean(f.router.score, SCORES),
        )


def parameters(c: Checker) -> None:
    """The shapes add up to the published count."""
    published = c.model.parameters
    if published is None:
        return
    counted = params.count(c.model)
    if abs(counted - published) > TOLERANCE * published:
        c.say(
            ("model", "parameters"),
            f"the shapes add up to {counted:,} parameters, not {published:,}",
            f"they differ by {counted / published - 1:+.2%}: some width, count or switch is not the model's",
            "compare each number with the released config; or delete `parameters` if none was published",
        )


CHECKS = (model_name, kind_names, columns, layers, residual, mixers, ffns)
