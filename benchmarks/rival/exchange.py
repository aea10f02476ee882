"""What an exchange of XLA's costs by the model that mkgen's simulator uses, so that both sides pay the same for a message.

XLA's profile has figures of its own, about two thirds of these, which rest on exchanges that were timed on the chip. For each
exchange XLA is given the cheapest of the ways below, whatever it really does.
"""

from __future__ import annotations

from math import prod

from mkgen.targets import Target
from mkgen.targets.exchange import phase_seconds
from rival.hlo import Instruction


def stages(mesh: dict[str, int]) -> list[tuple[int, tuple[str, ...]]]:
    """(ranks, mesh factors) of each stage, the nearest ranks first."""
    return [(mesh[name], (name,)) for name in ("core", "chip", "host") if mesh.get(name, 1) > 1]


def all_gather(target: Target, mesh: dict[str, int], part: float) -> float:
    """Seconds until every rank has every rank's `part` bytes: all at once, or stage by stage, each with what the last one
    gathered."""
    every = stages(mesh)
    flat = phase_seconds(target, prod(n for n, _ in every) - 1, part, factors=tuple(f for _, fs in every for f in fs))
    staged, size = 0.0, part
    for n, factors in every:
        staged += phase_seconds(target, n - 1, size, factors=factors)
        size *= n
    return min(flat, staged)


def all_reduce(target: Target, mesh: dict[str, int], size: float) -> float:
    """Seconds until every rank has the sum of `size` bytes. Over a group, its members send each other all of it, or reduce a
    share each and gather; the group is all ranks, or one stage after another; or inner stages scatter, the outermost sums, and
    they gather again."""
    every = stages(mesh)

    def group(n: int, factors: tuple[str, ...], b: float) -> float:
        return min(phase_seconds(target, n - 1, b, factors=factors), 2 * phase_seconds(target, n - 1, b / n, factors=factors))

    flat = group(prod(n for n, _ in every), tuple(f for _, fs in every for f in fs), size)
    staged = sum(group(n, factors, size) for n, factors in every)
    nested, left = 0.0, size
    for n, factors in every[:-1]:
        left /= n
        nested += 2 * phase_seconds(target, n - 1, left, factors=factors)
    nested += group(*every[-1], left) if every else 0.0
    return min(flat, staged, nested) if every else 0.0


def cycles(target: Target, mesh: dict[str, int], i: Instruction) -> float:
    """Of a collective over all ranks, as the rival's all are. XLA turns a small gather into a sum: what it means is what it
    costs."""
    size = max(a.bytes for a in i.arrays)
    gather = "all-gather" in i.op or i.scope.endswith("all_gather")
    seconds = all_gather(target, mesh, size / prod(mesh.values())) if gather else all_reduce(target, mesh, size)
    return seconds * target.clock_hz
