"""Checks of `model.checkpoint`: every tensor that the kinds need has a name pattern, and no other has."""

from __future__ import annotations

from fnmatch import fnmatchcase
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
            "add a line for each, as in "
            + " and ".join(
                f"`{next(role for role in missing if known[role].per == per)}: {name}`"
                for per, name in {"model": "name", "layer": "name.{layer}.weight", "expert": "name.{layer}.{expert}.weight"}.items()
                if any(known[role].per == per for role in missing)
            ),
        )


def patterns(c: Checker) -> None:
    """Each pattern has the placeholders that its tensor needs, and cuts that give its shape; no two take one element."""
    known, _ = known_tensors(c)
    sharing: dict[tuple[str, str], list[str]] = {}
    for role, pattern in c.model.checkpoint.items():
        if pattern is BAD or role not in known or not c.run(_pattern, role, pattern, known[role]):
            continue
        try:
            name = checkpoint.parse(pattern).name
        except checkpoint.BadPattern:                # said by _pattern
            continue
        owner = known[role].owner or ""
        sharing.setdefault((owner if owner not in ("mixer", "ffn") else "", name), []).append(role)
    single = all(run.mixer is None or run.ffn is None for run in c.model.schedule)      # one sub-layer a layer, with one norm
    for (_, name), found in sharing.items():
        if len(found) > 1 and not (single and {known[role].owner for role in found} == {"mixer", "ffn"}):
            c.run(_apart, name, [known[role] for role in found])


def _pattern(c: Checker, role: str, text: str, tensor: Tensor) -> None:
    path, wanted = ("model", "checkpoint", role), _FIELDS[tensor.per]
    try:
        pattern = checkpoint.parse(text)
    except checkpoint.BadPattern as error:
        c.say(path, f"the pattern of {role} is {text!r}", str(error), "write `name | cut | cut`, see docs/spec.md")
        return
    found = pattern.fields
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
    try:
        checkpoint.uncut(pattern.cuts, tensor.shape)
    except checkpoint.BadPattern as error:
        c.say(path, f"the pattern of {role} is {text!r}", str(error), f"the cuts must give {list(tensor.shape)}")


def _apart(c: Checker, name: str, found: list[Tensor]) -> None:
    """Roles that share a tensor take different parts of it."""
    taken: dict[str, tuple[tuple[checkpoint.Cut, ...], list[checkpoint.Axis]]] = {}
    for t in found:
        cuts = checkpoint.parse(c.model.checkpoint[t.role]).cuts
        try:
            axes = checkpoint.uncut(cuts, t.shape)
        except checkpoint.BadPattern:                # said by _pattern
            continue
        for other, (theirs, their_axes) in taken.items():
            if cuts == theirs or _meet(cuts, axes, theirs, their_axes):
                c.say(
                    ("model", "checkpoint", t.role),
                    f"{t.role} and {other} have the same tensor, {name}" + ", and their cuts overlap" * (cuts != theirs),
                    "two weights cannot be one tensor, nor share a part of one",
                    "give each its own name or its own cut; write `tied_head: true` and leave `head` out if they are one",
                )
                break
        taken[t.role] = cuts, axes


def _meet(a: tuple, a_axes, b: tuple, b_axes) -> bool:
    """Whether two cuts take a common element of the smallest tensor that has both."""
    if a_axes is None or b_axes is None or len(a_axes) != len(b_axes):
        return False
    shape = tuple(max(x.size, y.size) for x, y in zip(a_axes, b_axes))
    try:
        pairs = list(zip(checkpoint.picks(a, shape), checkpoint.picks(b, shape)))
    except checkpoint.BadPattern:                    # the packer, who knows the shape, will say it
        return False
    return all(not set(x).isdisjoint(y) for x, y in pairs)


def ignored(c: Checker) -> None:
    """What is ignored is not what a role needs."""
    known, _ = known_tensors(c)
    names: dict[str, str] = {}
    for role, pattern in c.model.checkpoint.items():
        if pattern is not BAD and role in known:
            try:
                made = checkpoint.parse(pattern)
                names |= {made.format(layer, 0): role for layer in c.layers_of(known[role].owner)}
            except (checkpoint.BadPattern, ValueError, KeyError, IndexError):      # said by _pattern
                continue
    for i, shell in enumerate(c.model.ignore):
        needed = None if shell is BAD else next((n for n in names if fnmatchcase(n, shell)), None)
        if needed:
            c.say(
                ("model", "ignore", str(i)),
                f"model.ignore has {shell!r}, and {names[needed]} is {needed}",
                "a tensor that the decoder needs cannot be left out",
                "make the pattern narrower",
            )


CHECKS = (roles, patterns, ignored)
