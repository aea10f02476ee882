"""What the spec can say and the planner cannot build yet: refused, never approximated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkgen.spec.model import Mla, Mlp, Moe, Norm

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker


def unbuilt(c: Checker) -> None:
    """One line an axis; a line goes away when its axis is built."""
    m = c.model
    for name, kind in (*c.each("mixers"), *c.each("ffns")):
        group = "mixers" if name in m.mixers else "ffns"
        for key, wrong in _KINDS.get(type(kind), lambda _: {})(kind).items():
            if wrong:
                _say(c, ("model", group, name, key), f"{key} as it is written for {name}")
    if c.build.mla_cache != "latent":
        _say(c, ("build", "mla_cache"), "an expanded MLA cache")


def _say(c: Checker, path: tuple[str, ...], what: str) -> None:
    c.say(path, f"{what} is not built yet", "there is no kernel for it", "wait for it, or leave it out if the model allows")


def _odd(n: Norm | None) -> bool:
    return n is not None and (n.kind, n.weight, n.bias) != ("rms", "after", False)


def _mla(a: Mla) -> dict[str, bool]:
    return {"q_rank": a.q_rank == 0, "scale": a.scale is not None, "rope": a.rope is not None,
            "query_temperature": a.query_temperature is not None,
            "gate": a.gate is not None and (a.gate.act, a.gate.per) != ("sigmoid", "channel")}


def _mlp(f: Mlp) -> dict[str, bool]:
    return {}


def _moe(f: Moe) -> dict[str, bool]:
    return {"expert_norm": f.expert_norm is not None and f.expert_norm.kind != "rms"}


_KINDS = {Mla: _mla, Mlp: _mlp, Moe: _moe}
CHECKS = (unbuilt,)
