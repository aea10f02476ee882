"""Runs the kernels of damaged plans: `python verdict_worker.py`, pickled (sound plan, {name: plan}) on stdin, {name: [what is wrong]} a line.

A process of its own: the number of virtual devices is fixed when JAX starts, and a kernel may wait for ever. A line is
written before each kernel (`... runs`) and after it, so that whoever waits knows which one hangs.
"""

from __future__ import annotations

import json
import pickle
import sys

from mkgen.prove.compare import all_rungs
from mkgen.prove.drive import Kernel, load_kernel, pack_operands
from mkgen.prove.interpret import MODES
from mkgen.prove.random_params import RandomParams
from mkgen.prove.scenario import run_reference

STEPS = 2


def main() -> None:
    sound, damaged = pickle.load(sys.stdin.buffer)
    out, sys.stdout = sys.stdout, sys.stderr
    params = RandomParams(sound.graph, 0, sound.spec)
    operands = pack_operands(sound, params)
    scenario = run_reference(sound.graph, params, sound.spec, STEPS)
    for name, plan in damaged.items():
        print(json.dumps([name, "runs"]), file=out, flush=True)
        print(json.dumps([name, wrong(plan, operands, scenario)]), file=out, flush=True)


def wrong(plan, operands, scenario) -> list[str]:
    """What interpreting the plan's kernel shows: in either mode, races, semaphores left, numbers that are not the reference's."""
    try:
        kernel = Kernel(plan, load_kernel(plan), operands, max(plan.spec.build.rows))
        for mode in MODES:
            rungs = all_rungs(plan, scenario, kernel.run(scenario, mode, range(1, STEPS)))
            bad = [f"{mode}, {r.name}: {r.error} {r.reason}"[:300] for r in rungs if r.verdict == "fail"]
            if bad:
                return bad
        return []
    except Exception as e:  # a kernel that cannot be run is wrong as well
        return [f"{type(e).__name__}: {e}"[:300]]


if __name__ == "__main__":
    main()
