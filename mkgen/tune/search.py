"""From the spec's own build to a better one: coordinate descent, restarted from kicks of the best, deterministic for a seed.

All values of one dimension are tried beside the best build so far, the best of them is taken if it gains enough, then comes the next
dimension, until none moves. A kick sets a few dimensions at random and descends again. What a candidate is worth depends on nothing
but the candidate, so a time limit cuts the search short but does not change its way.
"""
from __future__ import annotations

import random
from dataclasses import dataclass

from mkgen.spec.model import Build
from mkgen.tune.space import Dimension
from mkgen.tune.trial import Bench, Trial

GAIN = 1e-3                              # a change must give a thousandth of the step
KICK = 3                                 # dimensions that a restart sets at random
SEARCH, KICKS = 0.6, 0.75                # shares of the time: for the first descent with its repeats, and till no kick is begun


@dataclass(frozen=True)
class Found:
    """best: with the draws of the search; converged: the descent has ended by itself; kicks: restarts that were finished."""
    best: Trial
    converged: bool
    kicks: int


def search(bench: Bench, dims: list[Dimension], seed: int = 0, restarts: int = 2) -> Found:
    """The best build that was found within the time."""
    rng = random.Random(seed)
    best, converged = descend(bench, dims, bench.base, KICKS)
    kicks = 0
    for _ in range(restarts):
        if not converged or bench.clock.over(SEARCH):
            break
        start = bench.try_many([kicked(best.build, dims, rng)], SEARCH)[0]
        order = rng.sample(dims, len(dims))
        if start is None or not start.good:
            continue
        other, ended = descend(bench, order, start, KICKS)
        kicks += ended
        if bench.score(other) < bench.score(best) - GAIN:
            best = other
    return Found(simplified(bench, dims, best), converged, kicks)


def descend(bench: Bench, dims: list[Dimension], start: Trial, share: float) -> tuple[Trial, bool]:
    """(the best that single changes lead to, whether there was time to see that no more does)."""
    best, still = start, 0
    while still < len(dims):
        for d in dims:
            tried = bench.try_many([build for _, build in d.neighbours(best.build)], share)
            taken = min((t for t in tried if t is not None), key=bench.score, default=None)
            if taken is not None and bench.score(taken) < bench.score(best) - GAIN:
                best, still = taken, 0
            still += 1
            if None in tried:
                return best, False
            if still >= len(dims):
                break
    return best, True


def kicked(build: Build, dims: list[Dimension], rng: random.Random) -> Build:
    for d in rng.sample(dims, min(KICK, len(dims))):
        build = d.to(build, rng.choice(d.values))
    return build


def simplified(bench: Bench, dims: list[Dimension], best: Trial) -> Trial:
    """Without the changes that give nothing beside the others."""
    for d in dims:
        own = d.of(bench.base.build)
        if d.of(best.build) == own:
            continue
        (back,) = bench.try_many([d.to(best.build, own)])
        if back is not None and back.good and bench.score(back) <= bench.score(best) + GAIN / 10:
            best = back
    return best
