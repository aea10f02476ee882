"""A whole search: the bench, the dimensions, the search, the decisions, and the overlay that is read back and proven again."""
from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

from mkgen.check import check_plan
from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.spec.load import load_spec
from mkgen.spec.model import Spec
from mkgen.targets import load_target
from mkgen.tune.decisions import Decision, decide
from mkgen.tune.overlay import Result, overlay_text
from mkgen.tune.search import GAIN, search
from mkgen.tune.space import Dimension, dimensions
from mkgen.tune.trial import MANY, Bench, Clock, Trial


def run(spec: Spec, rows: tuple[int, ...], *, seconds: float, seed: int = 0, restarts: int = 2, free: bool = True, allow: tuple[str, ...] = (),
        weights: dict[int, float] | None = None, context: int | None = None, host_latency: float = 1.0, tell=lambda bench: None) -> Result:
    """Searches the build of `spec`, which was read from a file. Raises `MkgenError` if the spec's own build is refused."""
    clock = Clock(seconds)
    bench = Bench(spec, rows, clock, weights=weights, free=free, context=context, seed=seed, host_latency=host_latency, tell=tell)
    dims = dimensions(spec.model, spec.build, bench.plan(spec.build), rows, allow)
    found = search(bench, dims, seed, restarts)
    chosen, decisions = settled(bench, dims, found.best)
    best, base = bench.confirmed(chosen), bench.confirmed(bench.base)
    if chosen is not bench.base and not faster(bench, base, best):       # what few draws have seen, many do not
        best, decisions = base, decide(bench, dims, bench.base)
    file = load_spec(spec.path).build                        # what weights are packed for where nothing else is said
    repack = best.layout != layout_hash(bench.plan(file))
    terms = f"independent rows at context {context or spec.build.context}, {MANY:,} draws, exchanges between hosts x {host_latency:g}, seed {seed}"
    text = overlay_text(file, base, best, decisions, repack, terms)
    verdict = "pass" if proven(bench, text, best) else "fail"
    alone = {r: bench.predict(alone_plan(bench, best, r), MANY, (r,))[r] for r in rows} if len(best.build.rows) > 1 else {}
    return Result(spec.path, text, base, best, decisions, alone, len(bench.known), bench.predicted, dict(bench.refusals.most_common()),
                  found.converged, found.kicks, clock.spent, repack, terms, verdict)


def settled(bench: Bench, dims: list[Dimension], best: Trial) -> tuple[Trial, list[Decision]]:
    """(the best that is known, its decisions): where an alternative of a decision turns out to be better, it is taken."""
    while True:
        decisions = decide(bench, dims, best)
        top = min(list(bench.known.values()), key=bench.score)
        if bench.score(top) >= bench.score(best) - GAIN:
            return best, decisions
        best = top


def faster(bench: Bench, base: Trial, best: Trial) -> bool:
    total = {r: best.ms[r] / base.ms[r] for r in bench.rows}
    product = 1.0
    for r, ratio in total.items():
        product *= ratio ** bench.weights[r]
    return product < 1


def alone_plan(bench: Bench, best: Trial, rows: int) -> Plan:
    return bench.plan(replace(best.build, rows=(rows,)))


def proven(bench: Bench, text: str, best: Trial) -> bool:
    """The overlay, read back over the spec's file, is the build that was found: same plan, no finding, same step."""
    with tempfile.TemporaryDirectory(prefix="mkgen-tune-") as folder:
        path = Path(folder) / "overlay.yaml"
        path.write_text(text, encoding="utf-8")
        spec = load_spec(bench.spec.path, overlays=[path])
    if spec.build != best.build:
        raise MkgenError(f"{bench.spec.path}: the overlay does not give the build that was found: {spec.build} instead of {best.build}")
    plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
    return not check_plan(plan) and bench.predict(plan, MANY) == best.ms
