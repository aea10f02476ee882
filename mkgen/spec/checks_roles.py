"""Checks of `model.checkpoint`: every tensor that the kinds need has a name pattern, and no other has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkgen.errors import closest, did_you_mean
from mkgen.spec import checkpoint, schedule
from mkgen.spec.bad import BAD
from mkgen.spec.roles import Tensor, kind_tensors, model_tensors

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker

_FIELDS = {"model": set(), "layer": {"layer"}, "expert": {"layer", "expert"}}


def known_tensors(c: Checker) -> tuple[dict[str, Tensor], set[str]]:
    """The tensors that are needed, and the owners whose tensors cannot be known for other mistakes."""
    known: dict[str, Tensor] = {}
    unsure: set[str] = set()

    def add(c: Checker, make, *args) -> None:
        known.update((t.role, t) for t in make(*args))

    if not c.run(add, model_tensors, c.model):
        unsure |= {"mixer", "ffn", "residual", "embed", "head", "norm"}
    for group in ("mixers", "ffns"):
        kinds = getattr(c.model, group)
        if kinds is BAD:
            return known, {"*"}
        for name, kind in kinds.items():
            if kind is BAD or not c.run(add, kind_tensors, name, kind, c.model.hidden):
                unsure.add(name)
        unsure |= {name for name in used(c) if name not in c.model.mixers and name not in c.model.ffns}
    return known, unsure


def used(c: Checker) -> set[str]:
    """The kinds that the two columns name, as far as these can be read."""
    out: set[str] = set()
    for text in (c.model.mixer, c.model.ffn):
        try:
            out.update(() if text is BAD else schedule.names(schedule.parse(text)))
        except schedule.ScheduleError:            # reported by load.py
            pass
    return out


def is_unsure(role: str, unsure: set[str]) -> bool:
    """Whether nothing can be said about a role because its owner could not be read."""
    return "*" in unsure or role.partition(".")[0] in unsure


def roles(c: Checker) -> None:
    patterns = c.model.checkpoint
    known, unsure = known_tensors(c)
    idle = {name for name, _ in c.each("mixers") + c.each("ffns")} - used(c)    # said to be unused already
    missing = [role for role, t in known.items() if role not in patterns and t.owner not in idle]
    path = ("model", "checkpoint")
    for role in patterns:
        if role not in known and not is_unsure(role, unsure):
            near = closest(role, missing)
            if near:
                missing.remove(near)  # one slip is one problem
            prefix = role.partition(".")[0]
            near_ones = [r for r in known if r.startswith(prefix + ".")] or list(known)
            c.say(
                (*path, role),
                f"unknown checkpoint role {role}",
                "no kind of this model has such a tensor",
                f"did you mean {near!r}?" if near else did_you_mean(role, near_ones) + "; or delete it",
            )
    if missing:
        c.say(
            path if c.where.has(*path) else ("model",),
            f"missing checkpoint roles: {', '.join(missing)}",
            "the kinds of this model have these tensors, and their names in the checkpoint are not known",
            "add a line for each, as in `"
            + f"{missing[0]}: "
            + {"model": "name`", "layer": "name.{layer}.weight`", "expert": "name.{layer}.{expert}.weight`"}[
                known[missing[0]].per
            ],
        )


def patterns(c: Checker) -> None:
    """Each pattern has the placeholders that its tensor needs; no two tensors of one owner share a name."""
    known, _ = known_tensors(c)
    seen: dict[tuple[str, str], str] = {}
    for role, pattern in c.model.checkpoint.items():
        if pattern is not BAD and role in known:
            c.run(_pattern, role, pattern, known[role])
            owner = known[role].owner or ""
            first = seen.setdefault((owner if owner not in ("mixer", "ffn") else "", pattern), role)
            if first != role:
                c.say(
                    ("model", "checkpoint", role),
                    f"{role} and {first} have the same tensor, {pattern}",
                    "two weights cannot be one tensor",
                    "give each its own name, or write `tied_head: true` and leave `head` out if they are one",
                )


def _pattern(c: Checker, role: str, text: str, tensor: Tensor) -> None:
    path, wanted = ("model", "checkpoint", role), _FIELDS[tensor.per]
    try:
        found = checkpoint.parse(text).fields
    except checkpoint.BadPattern as error:
        c.say(path, f"the pattern of {role} is {text!r}", str(error), "write `name | cut | cut`, see docs/spec.md")
        return
    if found != wanted and not (tensor.per == "expert" and found == {"layer"}):
        words = " and ".join(f"{{{name}}}" for name in sorted(wanted, reverse=True)) or "no placeholder"
        c.say(
            path,
            f"the pattern of {role} is {text!r}",
            {
                "model": "there is one such tensor in the model",
                "layer": "there is one such tensor a layer",
                "expert": "there is one such tensor for each expert of a layer, or one a layer for all experts",
            }[tensor.per],
            f"write a name with {words}",
        )


CHECKS = (roles, patterns)
