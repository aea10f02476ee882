"""Compile time against the number of layers: python benchmarks/compile_depth.py [SPEC] [--rows N]

The layer loop is rolled and each kind of sub-layer is compiled once, so the time should not grow with depth. Prints the ratio of
each depth to the shallowest; absolute seconds depend on the machine and on what else it does.
"""
from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.prove.compile import compile_spec
from mkgen.spec import schedule
from mkgen.spec.load import load_spec
from mkgen.spec.model import Run, Spec
from mkgen.targets import load_target

ROOT = Path(__file__).resolve().parents[1]


def cut(spec: Spec, layers: int) -> Spec:
    """The first `layers` layers of a spec, as a spec of its own."""
    runs = tuple(Run(*run) for run in zip(*(schedule.expand(c)[:layers] for c in (spec.model.mixer, spec.model.ffn))))
    return replace(spec, model=replace(spec.model, layers=layers, schedule=runs, parameters=None))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("spec", nargs="?", default=str(ROOT / "model_specs" / "kimi_k3.yaml"))
    asked.add_argument("--rows", type=int, default=8)
    given = asked.parse_args()
    spec = load_spec(given.spec)
    first = None
    print(f"{'layers':>8} {'seconds':>9} {'CPU s':>9} {'ratio of CPU s':>15} {'code MB':>9}")
    for share in (8, 2, 1):
        layers = max(spec.model.layers // share, 2)
        part = cut(spec, layers)
        [made] = compile_spec(make_plan(part, build_graph(part), load_target(part.build.chip)), given.rows)
        if made.verdict != "pass":
            raise SystemExit(f"{layers} layers do not compile: {'; '.join(made.reasons)}")
        first = first or made.cpu_seconds
        print(f"{layers:>8} {made.compile_seconds:>9.1f} {made.cpu_seconds:>9.1f} {made.cpu_seconds / first:>15.2f} "
              f"{made.code_bytes / 1e6:>9.2f}", flush=True)


if __name__ == "__main__":
    main()
