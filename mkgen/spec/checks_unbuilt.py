"""What the spec can say and the planner cannot build yet: refused, never approximated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkgen.spec.model import Moe

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


def _say(c: Checker, path: tuple[str, ...], what: str) -> None:
    c.say(path, f"{what} is not built yet", "there is no kernel for it", "wait for it, or leave it out if the model allows")


def _moe(f: Moe) -> dict[str, bool]:
    return {"expert_norm": f.expert_norm is not None and f.expert_norm.kind != "rms"}


_KINDS = {Moe: _moe}
CHECKS = (unbuilt,)
