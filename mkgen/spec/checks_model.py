"""Checks of what the model is, whatever it is built for."""

from __future__ import annotations

import keyword
import re
from typing import TYPE_CHECKING

from mkgen.errors import closest, did_you_mean
from mkgen.spec import params, schedule
from mkgen.spec.bad import BAD

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker

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


CHECKS = (model_name, kind_names, columns, layers)
