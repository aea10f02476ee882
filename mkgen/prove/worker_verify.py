"""The process that runs the proof: `python -m mkgen.prove.worker_verify`, a pickled spec on stdin, rungs as
JSON on stdout.

A process of its own, because the number of virtual devices is fixed when JAX starts.
"""

from __future__ import annotations

import json
import pickle
import sys
import time

STEPS = 3  # the second crosses the tile's edge; it is run in both modes
SEED = 0


def main() -> None:
    spec = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout, sys.stderr  # stdout is for the result alone
    rungs = prove_once(spec) if "--once" in sys.argv else prove(spec)
    json.dump([r.as_dict() for r in rungs], out)


def prove(spec) -> list:
    """All rungs of a mini spec, in this process, which must have its virtual devices."""
    from mkgen.graph.build import build_graph
    from mkgen.plan.planner import make_plan
    from mkgen.prove.compare import all_rungs, same_bits
    from mkgen.prove.coverage import reach
    from mkgen.prove.drive import Kernel, load_kernel, pack_operands
    from mkgen.prove.interpret import MODES
    from mkgen.prove.random_params import RandomParams
    from mkgen.prove.rung import Rung
    from mkgen.prove.scenario import run_reference
    from mkgen.prove.trace_code import code_rung
    from mkgen.targets import load_target

    graph = build_graph(spec)
    plan = make_plan(spec, graph, load_target(spec.build.chip))
    params = RandomParams(graph, SEED, spec)
    module, operands = load_kernel(plan), pack_operands(plan, params)
    scenario = _timed("reference", run_reference, graph, params, spec, STEPS)
    rungs = [*reach(plan, scenario), _timed("code = plan", code_rung, plan, module)]
    most = max(spec.build.rows)
    kernel = Kernel(plan, module, operands, most)
    late, early = MODES
    whole = _timed(f"{most} rows, {late}", kernel.run, scenario, late, range(STEPS))
    rungs += all_rungs(plan, scenario, whole)
    good = all(r.verdict != "fail" for r in rungs)
    start = whole.states[1] if good else None  # from the reference's states if the kernel's cannot be trusted
    edge = _timed(f"{most} rows, {early}", kernel.run, scenario, early, range(1, 2), start)
    rungs += all_rungs(plan, scenario, edge)
    rungs.append(
        same_bits(scenario, whole, edge)
        if good
        else Rung(f"{most} rows: both modes", "", None, None, "skipped", f"{late} failed")
    )
    if most > 1 and min(spec.build.rows) == 1:
        alone = scenario.row(0)
        trace = _timed("1 row", Kernel(plan, module, operands, 1).run, alone, late, range(1))
        rungs += all_rungs(plan, alone, trace)
    return rungs


def prove_once(spec) -> list:
    """One step of the most rows in one mode: for a mesh on which more would take too long."""
    from mkgen.graph.build import build_graph
    from mkgen.plan.planner import make_plan
    from mkgen.prove.compare import all_rungs
    from mkgen.prove.drive import Kernel, load_kernel, pack_operands
    from mkgen.prove.interpret import MODES
    from mkgen.prove.random_params import RandomParams
    from mkgen.prove.scenario import run_reference
    from mkgen.prove.trace_code import code_rung
    from mkgen.targets import load_target

    graph = build_graph(spec)
    plan = make_plan(spec, graph, load_target(spec.build.chip))
    params, most = RandomParams(graph, SEED, spec), max(spec.build.rows)
    module = load_kernel(plan)
    traced = _timed("code = plan", code_rung, plan, module)
    kernel = Kernel(plan, module, pack_operands(plan, params), most)
    scenario = _timed("reference", run_reference, graph, params, spec, 1)
    return [traced] + all_rungs(plan, scenario, _timed(f"{most} rows", kernel.run, scenario, MODES[0], range(1)))


def _timed(what: str, f, *args):
    begin = time.time()
    result = f(*args)
    steps = [round(s, 1) for s in getattr(result, "seconds", [])]
    print(f"{what}: {time.time() - begin:.1f} s {steps or ''}", file=sys.stderr, flush=True)
    return result


if __name__ == "__main__":
    main()
