"""Checks of the feed-forward kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkgen.spec.model import Activation, Mlp, Moe

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker


def ffns(c: Checker) -> None:
    for name, kind in c.each("ffns"):
        path = ("model", "ffns", name)
        c.run(_activation, kind, kind.activation, (*path, "activation"))
        if isinstance(kind, Moe):
            for check in (_top_k, _latent_norms, _groups, _router, _shared):
                c.run(check, kind, path)


_OF = {"alpha": "silu", "beta": "situ", "linear_beta": "situ"}


def _activation(c: Checker, f: Mlp | Moe, a: Activation, path: tuple[str, ...]) -> None:
    for key, kind in _OF.items():
        if c.where.has(*path, key) and a.kind != kind:
            c.say(
                (*path, key),
                f"{key} has no effect with kind: {a.kind}",
                f"only {kind} has this constant",
                f"delete it, or write `kind: {kind}`",
            )
    if a.limit < 0:
        c.say(
            (*path, "limit"),
            f"limit {a.limit}",
            "the gate is cut to at most the limit, and up to between -limit and limit",
            "write a number greater than 0, or delete it",
        )
    if not f.gated and c.where.has(*path, "up_offset"):
        c.say(
            (*path, "up_offset"),
            "up_offset without a gate",
            "an ffn that is not gated has one projection in, and u is left out",
            "delete it, or write `gated: true`",
        )


def _top_k(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    most = f.experts // f.router.groups * f.router.group_top_k
    if f.top_k > most:
        c.say(
            (*path, "top_k"),
            f"top_k {f.top_k} is more than the {most} experts there are" + (" in the chosen groups" if f.router.groups > 1 else ""),
            "a row takes each expert at most once",
            f"make top_k at most {most}",
        )


def _latent_norms(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    for key in ("latent_norm", "latent_input_norm"):
        if getattr(f, key) is not None and f.latent == 0:
            c.say(
                (*path, key),
                f"{key} without latent",
                "it norms in the latent width, and there is none",
                f"add `latent:` with that width, or delete {key}",
            )


def _groups(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    r = f.router
    if f.experts % r.groups or r.group_top_k > r.groups:
        c.say(
            (*path, "router", "groups"),
            f"{r.group_top_k} of {r.groups} groups of {f.experts} experts",
            "groups are equal runs of experts, and only so many can be chosen",
            f"choose a divisor of {f.experts}, and group_top_k at most as many",
        )
    if r.groups > 1 and r.group_score == "top2" and f.experts // r.groups < 2:
        c.say(
            (*path, "router", "groups"),
            f"{r.groups} groups of {f.experts} experts, and a group is as good as its two best",
            "every group has one expert only",
            "write fewer groups, or `group_score: max`",
        )


def _router(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    idle = [("renorm_eps", not f.router.renorm, "renorm: true")]
    idle += [(key, f.router.groups == 1, "groups: n") for key in ("group_top_k", "group_score")]
    for key, wrong, fix in idle:
        if wrong and c.where.has(*path, "router", key):
            c.say(
                (*path, "router", key),
                f"{key} has no effect without {fix.partition(':')[0]}",
                "nothing else reads it",
                f"delete it, or write `{fix}`",
            )
    if f.router.renorm_eps < 0:
        c.say((*path, "router", "renorm_eps"), f"renorm_eps {f.router.renorm_eps}", "it keeps a sum from zero", "write 0 or more")


def _shared(c: Checker, f: Moe, path: tuple[str, ...]) -> None:
    for key, wrong in (("shared_gate", f.shared_gate), ("shared_multiplier", f.shared_multiplier != 1)):
        if wrong and not f.shared_width:
            c.say(
                (*path, key),
                f"{key} without shared experts",
                "it multiplies their output",
                "add `shared_width:`, or delete it",
            )


CHECKS = (ffns,)
