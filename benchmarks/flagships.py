"""Predicted steps of the flagship specs beside the hand-written kernels of the same models: python benchmarks/flagships.py [-o PAGE]

Both sides by one simulator on one set of terms: independent rows, uniform routing with a fixed seed, at least 1,000 layers drawn, each
waiting for its busiest rank; the last position of the context; prologue, dispatch and every exchange counted, with a call of the host for
every step and with one for `CALL` steps. A spec is taken with
its overlay in model_specs/tuned/, if there is one (that for its rows before that for one), once as it is and once with what `EXTRA` says; each
row count as a module of its own. Modules whose overlays cut the experts alike read the same packed weights.
"""
from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from handwritten import HOST_LATENCY, predicted

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.figures import figures
from mkgen.plan.planner import make_plan
from mkgen.profile import profile_plan
from mkgen.simulate.predict import Prediction, predict, sensitivity
from mkgen.spec.load import load_spec
from mkgen.targets import load_target

CASES = {  # spec, and what is said of it: (context, {rows: (published or estimated ms, aim)}, hand-written schedule, tokens)
    "kimi_k3": (1152, {1: (4.02, 2.8), 2: (5.10, 3.4), 4: (7.77, 4.8), 8: (9.25, 6.5)}, "kimi_k3", "independent"),
    "muse_spark_1_2": (4096, {1: (3.26, 2.3), 8: (4.46, 3.4)}, "muse_spark_nvfp4_int8_identical", "identical"),
    "muse_spark_1_2, distinct rows": (4096, {8: (None, None)}, "muse_spark_nvfp4_int8", "independent"),
    "qwen3_8_27b": (2048, {1: (3.05, 2.5)}, "qwen38_27b", "independent"),
    "qwen3_30b_a3b": (2048, {1: (1.17, 0.6)}, None, "independent"),
}
BUDGET = {"computes": "compute", "waits for exchanges": "wait: exchange", "for experts": "wait: experts", "dispatch": "dispatch"}
CHANGES = {"half the latency of exchanges": "half the latency", "compute twice as fast": "computing twice as fast",
           "one more ring slot": "a ring slot more", "one more expert slot": "an expert slot more"}
CALL = 16                                # steps, as the published kernels: Muse Spark 16, Kimi K3 64
EXTRA = {"kimi_k3": ("build.wire=bf16", "build.activations=bf16"), "muse_spark_1_2": ("build.wire=bf16",)}   # as the hand-written kernels


@dataclass(frozen=True)
class Step:
    """ms: host latency -> of a call of one step; many: of a step of `CALL` a call. found: the former at one times; changes: what
    `simulate` says that more of something would give, us; padding: % of the true bytes."""
    ms: dict[float, float]
    many: float
    found: Prediction
    changes: dict[str, float | str]
    padding: float
    verdict: str


def step(name: str, rows: int, context: int, tokens: str, sets: tuple[str, ...]) -> Step:
    overlay = next((p for p in (Path(f"model_specs/tuned/{name}{which}.yaml") for which in (f"_{rows}_rows", "")) if p.exists()), None)
    sets = (f"build.rows=[{rows}]", f"build.context={-(-context // 256) * 256}", *sets)
    spec = load_spec(f"model_specs/{name}.yaml", overlays=[str(overlay)] if overlay else [], sets=list(sets))
    plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
    profile = profile_plan(plan, rows)
    hosts = "host" in spec.build.mesh
    terms = {"context": context, "tokens": tokens}
    found = {x: predict(plan, rows, host_latency=x, profile=profile, **terms) for x in (HOST_LATENCY if hosts else (1.0,))}
    many = predict(plan, rows, steps_a_call=CALL, profile=profile, **terms).predicted_ms
    return Step({x: p.predicted_ms for x, p in found.items()}, many, found[1.0], sensitivity(plan, rows, **terms),
                100 * figures(plan, rows)["padding_fraction"], "fail" if list(check_plan(plan)) else "pass")


def times(by: dict) -> str:
    return " / ".join(f"{ms:.2f}" for ms in by.values())


def tables() -> tuple[list[str], list[str]]:
    """Predictions beside the others', and where the time goes."""
    lines = [f"| | rows | mkgen, ms | {CALL} a call | floor | HBM busy | checker | hand-written, same simulator | {CALL} a call | ratio | published | aim |",
             "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|"]
    where = [f"| | rows | {' | '.join(BUDGET)} | other waits | padding | {' | '.join(CHANGES.values())} |", "|---|" + "---:|" * (len(BUDGET) + len(CHANGES) + 3)]
    for name, (context, by_rows, schedule, tokens) in CASES.items():
        other, others = (predicted(schedule, steps_a_call=n) if schedule else {} for n in (1, CALL))
        for rows, (published, aim) in by_rows.items():
            spec = name.split(",")[0]
            alike = ("build.lone_experts=false",) * (tokens == "identical" and rows > 1)     # no expert has one row then
            for sets in (alike, *([(*EXTRA[spec], *alike)] if spec in EXTRA else [])):
                s = step(spec, rows, context, tokens, sets)
                hand, hands = (found[rows]["ms"] if rows in found else {} for found in (other, others))
                least = min(filter(None, (published, hands["1.0"]))) / s.many if hands else published / s.ms[1.0]
                how = name + (f", {', '.join(s.removeprefix('build.') for s in sets)}" if sets else "")
                lines.append(f"| {how} | {rows} | {times(s.ms)} | {s.many:.2f} | {s.found.floor_ms:.2f} | {s.found.hbm_busy:.0%} | {s.verdict} | "
                             f"{times(hand) or 'none'} | {hands and format(hands['1.0'], '.2f') or 'none'} | {least:.2f} | {published or 'none'} | {aim or 'none'} |")
                told = [s.found.budget.get(key, 0.0) for key in BUDGET.values()]
                changes = [s.changes.get(key, "") for key in CHANGES]
                where.append(f"| {how} | {rows} | {' | '.join(f'{us:,.0f}' for us in (*told, sum(s.found.budget.values()) - sum(told)))} | {s.padding:.2f} % | "
                             + " | ".join(f"{c:+,.0f}" if isinstance(c, float) else "does not fit" if c else "" for c in changes) + " |")
                print(lines[-1], where[-1], sep="\n", flush=True)
    return lines, where


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("-o", "--out", type=Path)
    out = asked.parse_args().out
    lines, where = tables()
    if out:
        out.write_text(PAGE.format(table="\n".join(lines), where="\n".join(where)), encoding="utf-8")


PAGE = """# Predicted steps of the flagships

Made by `python benchmarks/flagships.py -o docs/flagships.md`; do not edit. Nothing here has run on a TPU. Both sides are predicted by the
simulator that docs/validation.md holds against published measurements, on the same terms (see the head of the program); three
times are for exchanges between hosts that take 1, 1.5 and 2 times as long as within one. Correctness is the checker's verdict here, and
`mkgen verify` of the same spec.

The host dispatches a call in 50 us. The times with their floor are of calls of one step; `16 a call` (at one times) is a step of a loop on the device, on
both sides: a sixteenth of the dispatch, and what a trip of the loop is assumed to take (`loop_trip_s` in mkgen/targets/tpu7x.yaml).
`ratio`: hand-written over mkgen, both at 16 a call; of simulated and published the smaller is taken.

{table}

Kimi K3's experts are cut over all 32 ranks at 1 and 2 rows, so that every rank has the same to do; at 4 and 8 rows over 8 ranks in each of 4 groups, whose larger
slices need fewer descriptors: two packings of the weights. Its rows are distinct; those of Muse Spark are alike, as in its published runs, unless a line says otherwise. `published` of the last two is
no measurement: an estimate of the hand-written kernel, and XLA's static profile (docs/against_xla.md), a dispatch a step: its ratio is to mkgen's with
one a step. The kernels were measured at 16 (Muse Spark) and 64 steps a call.

## Where the time goes, and what would change it

Microseconds of a step, one a call. Beside what limits it: bytes that are streamed as padding, and by how much the step would change if only the exchanges'
latency halved, if the core computed twice as fast, with one more slot of the ring, and with one more for experts (`mkgen simulate`).

{where}

Waits for exchanges are the rounds that a layer needs one after another, at the published and fitted times of the chip's links: no schedule takes them away,
only other work that is ready meanwhile. With no such wait but these, and no other, a step would take what it computes, waits for exchanges, and its dispatch.
"""


if __name__ == "__main__":
    main()
