"""`mkgen verify`: a mini of the spec, its kernel against the reference, on virtual devices in a process of its
own.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys

from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.prove.coverage import code
from mkgen.prove.mini import mini_spec
from mkgen.prove.rung import Rung
from mkgen.spec.model import Spec
from mkgen.targets import load_target

SECONDS = 1200  # a kernel that waits for ever is given up


def verify_spec(spec: Spec, progress: bool = False) -> list[Rung]:
    """The rungs of the proof of `spec`, in order. progress: stages and seconds on stderr as they come.

    Never raises for a kernel that is wrong: one that crashes or hangs is a rung that fails.
    """
    mini = mini_spec(spec)
    first = code(*(make_plan(s, build_graph(s), load_target(s.build.chip)) for s in (spec, mini)))
    return [first, *_run(mini, progress)]


def verify_whole_mesh(spec: Spec, progress: bool = False) -> list[Rung]:
    """One step of the mini on as many virtual devices as the spec has ranks: every exchange at its real width."""
    return _run(mini_spec(spec, whole_mesh=True), progress, "--once")


def _run(mini: Spec, progress: bool, *options: str) -> list[Rung]:
    worker = [sys.executable, "-m", "mkgen.prove.worker_verify", *options]
    try:
        done = subprocess.run(
            worker,
            input=pickle.dumps(mini),
            stdout=subprocess.PIPE,
            env=environment(mini.build.ranks),
            stderr=None if progress else subprocess.PIPE,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Rung("run", "the mini kernel, step by step", None, None, "fail", f"no answer in {SECONDS} s")]
    if done.returncode:
        said = "(see above)" if progress else done.stderr.decode(errors="replace").strip()[-2000:]
        return [
            Rung("run", "the mini kernel, step by step", None, None, "fail", f"exit code {done.returncode}: {said}")
        ]
    return [Rung(**rung) for rung in json.loads(done.stdout)]


def environment(devices: int) -> dict[str, str]:
    """For a process with that many virtual devices: each one blocks a thread of XLA's pool, hence NPROC."""
    flags = [
        f for f in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in f and "excess_precision" not in f
    ]
    flags += [f"--xla_force_host_platform_device_count={devices}", "--xla_allow_excess_precision=false"]
    path = os.pathsep.join(p for p in sys.path if p)
    return {
        **os.environ,
        "NPROC": str(max(64, 2 * devices)),
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "PYTHONPATH": path,
    }


def verdict(rungs: list[Rung]) -> str:
    """fail if any rung failed, or if there is none."""
    return "fail" if not rungs or any(r.verdict == "fail" for r in rungs) else "pass"


def as_dict(rungs: list[Rung]) -> dict:
    return {"verdict": verdict(rungs), "rungs": [r.as_dict() for r in rungs]}


def table(rungs: list[Rung]) -> str:
    """For a person: one line a rung, the reason of a fail or a skip beneath it."""

    def number(x: float | None) -> str:
        return "" if x is None else f"{x:.2g}"

    width = max(len(r.name) for r in rungs)
    lines = [f"{'rung':{width}}  {'error':>8}  {'bound':>6}  verdict  compared"]
    for r in rungs:
        lines.append(f"{r.name:{width}}  {number(r.error):>8}  {number(r.bound):>6}  {r.verdict:7}  {r.compared}")
        if r.reason:
            lines.append(f"{'':{width}}  {r.reason}")
    return "\n".join(lines)
