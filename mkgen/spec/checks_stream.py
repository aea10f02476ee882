"""Checks of the residual stream and of the ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker


def residual(c: Checker) -> None:
    r, path = c.model.residual, ("model", "residual")
    if r.kind == "block_softmax" and r.block == 0:
        c.say(
            (*path, "block") if c.where.has(*path, "block") else path,
            "block_softmax needs a block of at least 1",
            "a snapshot is taken every `block` layers",
            "add `block:` with the number of layers",
        )
    for key, kinds in _ONLY.items():
        if c.where.has(*path, key) and r.kind not in kinds:
            c.say(
                (*path, key),
                f"{key} has no effect with kind: {r.kind}",
                f"only {' and '.join(kinds)} has it" if len(kinds) == 1 else f"only {' and '.join(kinds)} have it",
                f"delete it, or write `kind: {kinds[0]}`",
            )
    for key in ("post_norm", "ffn_post_norm"):
        if c.where.has(*path, key) and "post" not in r.norms:
            c.say(
                (*path, key),
                f"{key} has no effect: residual.norms has no 'post'",
                "it is the norm behind a sub-layer",
                "write `norms: [post]` or `norms: [pre, post]`, or delete it",
            )
    for i, place in enumerate(r.norms):
        if place not in ("pre", "post") or place in r.norms[:i]:
            c.say(
                (*path, "norms", str(i)),
                f"residual.norms has {place!r}" + (" twice" if place in r.norms[:i] else ""),
                "a norm stands in front of a sub-layer (pre) or behind it (post)",
                "write [pre], [post] or [pre, post]",
            )
    for key in ("alpha", "beta"):
        for name in getattr(r, key):
            if name not in c.model.mixers and name not in c.model.ffns:
                c.say(
                    (*path, key, name),
                    f"residual.{key} names {name!r}, which is no kind of this model",
                    "the constant is one of a kind",
                    f"write one of {', '.join((*c.model.mixers, *c.model.ffns))}",
                )


_ONLY = {
    "block": ("block_softmax",),
    "eps": ("block_softmax",),
    "alpha": ("alpha_beta",),
    "beta": ("alpha_beta",),
    "temperature": ("gated",),
    "multiplier": ("add", "parallel"),
    "norms": ("add", "gated"),
    "post_norm": ("add", "gated"),
    "ffn_post_norm": ("add", "gated"),
}


def parallel(c: Checker) -> None:
    """A parallel layer has both of its branches."""
    if c.model.residual.kind == "parallel":
        bare = [i for i, run in enumerate(c.model.schedule) if run.mixer is None or run.ffn is None]
        if bare:
            c.say(
                ("model", "residual", "kind"),
                f"layer {bare[0]} has only one branch",
                "with kind: parallel a mixer and an ffn read the same norm",
                "give the layer both",
            )


def usable_vocab(c: Checker) -> None:
    if c.model.usable_vocab > c.model.vocab:
        c.say(
            ("model", "usable_vocab"),
            f"usable_vocab {c.model.usable_vocab} is more than the vocab of {c.model.vocab}",
            "it counts the ids that may be chosen",
            f"make it at most {c.model.vocab}",
        )


CHECKS = (residual, parallel, usable_vocab)
