"""Measures one model on one number of rows: each program in a process of its own, one after another; a line of log for each."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mkgen.spec.model import Spec
from mkgen.targets import load_target
from rival import exchange
from rival.cases import ROOT, Case, experts_of, routed
from rival.fit import FITTED, extrapolate
from rival.hlo import Module
from rival.model import Rival
from rival.ours import command, find, in_flight
from rival.timing import step

TIMEOUT_SECONDS = 900
# without the first, XLA relays out whole weight stacks on every step; the others keep exchanges on the TensorCore, of which
# the profile is: programs for the SparseCore have no figure there, and take seconds more to compile
LAYOUT = "--xla_tpu_impure_enable_large_2nd_minor_layout=false"
ON_CORE = " ".join(
    f"--xla_tpu_enable_sparse_core_collective_offload_{c}=false" for c in ("all_reduce", "all_gather", "reduce_scatter")
)
# the profiler aborts on some programs: tried in turn (caches written by a select instead of in place; another check of types)
WAYS = ((False, ""), (True, ""), (False, "--xla_tpu_check_llo_types=false"), (True, "--xla_tpu_check_llo_types=false"))


class Failed(Exception):
    """A program that did not compile; the text says which, and the compiler's words."""


@dataclass
class Program:
    """One form of the rival at full depth. Seconds without tracing; cycles at the busiest and the mean rank's experts."""

    form: str
    depths: list[dict]  # what was compiled: layers, compile_seconds, cpu_seconds, launches, cycles, …
    full: dict = field(default_factory=dict)  # the same at full depth: compiled, or extrapolated
    extrapolated: bool = False
    worst_residual: dict = field(default_factory=dict)  # relative, of the fit, by quantity


class Bench:
    """Runs jobs in `scratch` and keeps what they left; say(text) tells the user."""

    def __init__(self, scratch: Path, say):
        self.scratch, self.say, self.jobs = scratch, say, 0
        self.way: dict[str, int] = {}

    def job(self, flags: str, **job) -> dict:
        self.jobs += 1
        where = self.scratch / f"job{self.jobs}"
        where.mkdir(parents=True)
        (where / "job.json").write_text(json.dumps({"text": str(where)} | job if job.pop("keep", False) else job))
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")} | {
            "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}",
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "LIBTPU_INIT_ARGS": flags.format(where=where),
        }
        began = time.perf_counter()
        with (where / "said").open("w") as said:
            try:
                subprocess.run(
                    [sys.executable, "-m", "rival.worker", str(where / "job.json"), str(where / "out.json")],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    timeout=TIMEOUT_SECONDS,
                    cwd=where,
                )
            except subprocess.TimeoutExpired:
                raise Failed(f"{job}: stopped after {TIMEOUT_SECONDS} s") from None
        out = where / "out.json"
        got = json.loads(out.read_text()) if out.exists() else {"error": died((where / "said").read_text(errors="replace"))}
        if "error" in got:
            raise Failed(f"{job.get('form', 'mkgen')} of {job.get('layers', 'all')} layers: {got['error']}")
        return got | {"wall_seconds": time.perf_counter() - began, "where": str(where)}

    # -- the rival -----------------------------------------------------------------------------------------------------

    def compiled(self, case: Case, rows: int, form: str, layers: int, ep: int) -> dict:
        """As a user would compile it: seconds and bytes, nothing else asked of the compiler."""
        got = self.job(f"{LAYOUT} {ON_CORE}", **asked(case, rows, form, layers, ep))
        return {k: v for k, v in got.items() if k not in ("where", "wall_seconds")}

    def profiled(self, case: Case, rows: int, form: str, layers: int, ep: int) -> dict:
        """The same program once more, with its text and the static profile of every operation."""
        key, errors = f"{case.spec} {form} {rows}", []
        first = self.way.get(key, 0)
        for n in [first, *(n for n in range(len(WAYS)) if n != first)] if first < len(WAYS) else []:
            masked, more = WAYS[n]
            try:
                flags = f"{LAYOUT} {ON_CORE} --xla_jf_dump_static_llo_profile_to={{where}} {more}"
                got = self.job(flags, keep=True, **asked(case, rows, form, layers, ep, masked))
            except Failed as error:
                errors.append(str(error))
                continue
            self.way[key] = n
            return read(Path(got["where"]), case, rows, layers, form, ep) | {"masked_write": masked, "profiler": None}
        errors = errors or ["as for another depth"]
        self.say(f"  {form}, {layers} layers: the profiler aborts; no step time. {errors[0][:160]}")
        self.way[key] = len(WAYS)  # it will not be asked again
        got = self.job(f"{LAYOUT} {ON_CORE}", keep=True, **asked(case, rows, form, layers, ep))
        return read(Path(got["where"]), case, rows, layers, form, ep) | {"masked_write": False, "profiler": errors[0]}

    def best_layout(self, case: Case, rows: int, tried: list[int]) -> tuple[int, list[dict]]:
        """Expert parallelism with the least estimated time of two layers, each waiting for its busiest group."""
        spec, found = case.load(), []
        moe = routed(spec)
        for ep in tried if moe else []:
            got = self.profiled(case, rows, "unrolled", 2, ep)
            if "cycles" not in got:
                raise Failed(f"{case.spec}: the profiler aborts on two layers: {got['profiler']}")
            found.append(
                {"expert_parallel": ep, "busiest_experts": experts_of(spec, ep, rows)["busiest"], "cycles": got["cycles"]}
            )
            most = found[-1]["busiest_experts"]
            self.say(
                f"  experts over {ep} groups: {got['cycles']:,.0f} cycles for two layers and the ends, {most:.1f} on the busiest"
            )
        return min(found, key=lambda f: f["cycles"])["expert_parallel"] if found else 1, found

    def unrolled(self, case: Case, rows: int, ep: int, depths: list[int]) -> Program:
        spec, seen = case.load(), []
        for layers in depths:
            deep = case, rows, "unrolled", layers, ep
            seen.append(self.compiled(*deep) | self.profiled(*deep) | {"layers": layers})
            self.say(f"  unrolled, {layers} layers: {line(seen[-1])}")
        made = Program("unrolled", seen)
        made.full, made.worst_residual = extrapolate(spec, seen)
        made.extrapolated = True
        if case.full_depth:  # and how far off that was
            deep = case, rows, "unrolled", spec.model.layers, ep
            whole = self.compiled(*deep) | self.profiled(*deep)
            self.say(f"  unrolled, all {spec.model.layers} layers: {line(whole)}")
            made.worst_residual["full depth"] = {k: made.full[k] / whole[k] - 1 for k in FITTED if whole.get(k)}
            made.full, made.extrapolated = whole, False
        return made

    def loop(self, case: Case, rows: int, ep: int) -> Program:
        layers = case.load().model.layers
        whole = self.compiled(case, rows, "loop", layers, ep) | self.profiled(case, rows, "loop", layers, ep)
        self.say(f"  loop, all {layers} layers: {line(whole)}")
        return Program("loop", [whole | {"layers": layers}], whole)

    # -- mkgen ---------------------------------------------------------------------------------------------------------

    def mkgen(self, case: Case, rows: int) -> dict:
        """The generated module through the same worker and the same counters; bytes, floor and prediction from its own
        commands."""
        sets = (*case.all_sets, f"build.rows=[{rows}]")
        got = self.job("", kind="mkgen", spec=case.path, sets=sets, rows=rows, keep=True)
        module = Module.parse(text_of(Path(got["where"])))
        planned = command(case, rows, "plan")
        said = planned["variants"][str(rows)]
        simulated = command(case, rows, "simulate", optional=True)
        got |= module.counts() | in_flight(case, rows)
        got |= {
            "verdict": said["verdict"],
            "streamed_bytes": said["streamed_bytes_per_step"],
            "hbm_bytes": said["bytes_per_core"],
            "predicted_ms": find(simulated, "predicted_ms", rows),
            "floor_ms": find(simulated, "floor_ms", rows),
        }
        self.say(f"  mkgen: {line(got)}, {got['launches']:.0f} launches")
        return got


def asked(case: Case, rows: int, form: str, layers: int, ep: int, masked: bool = False) -> dict:
    """A job of the worker."""
    sizes = {"rows": rows, "form": form, "layers": layers, "expert_parallel": ep, "masked_write": masked}
    return {"kind": "xla", "spec": case.path, "sets": case.all_sets, **sizes}


def text_of(where: Path) -> str:
    """The text of the largest module that was compiled."""
    return max(where.glob("*after_codegen.txt"), key=lambda p: p.stat().st_size).read_text()


def read(where: Path, case: Case, rows: int, layers: int, form: str, ep: int) -> dict:
    """What the text says. Launches for no expert, and what one more of each layer adds. Cycles with exchanges at the
    simulator's prices, for the busiest group's experts and the mean one's; for the busiest with exchanges as profiled, and
    free."""
    spec, rival = case.load(), Rival(case.load(), rows, case.context, form)
    target, text, drawn = load_target(spec.build.chip), text_of(where), experts_of(spec, ep, rows)
    rate = target.hbm_bytes_per_s / target.clock_hz
    module = Module.parse(text)

    def with_experts(n: float) -> Module:
        module.trips = lambda scope: (
            n if scope.endswith("experts/while") else rival.nest.turns if scope.endswith("layers/while") else None
        )
        return module

    none, one = (with_experts(n).counts() for n in (0.0, 1.0))
    out = module.prefetch(layers) | {
        "launches_fixed": none["launches"],
        "launches_per_expert": one["launches"] - none["launches"],
        "collectives": none["collectives"],
        "instructions": none["instructions"],
        "copied_bytes": none["copied_bytes"],
        "untold_loops": sorted(module.untold),
    }
    priced = lambda i: exchange.cycles(target, spec.build.mesh, i)
    same, mean = (step(with_experts(drawn[k]), rate, priced) for k in ("busiest", "mean"))
    own, free = (step(with_experts(drawn["busiest"]), rate, price) for price in (None, lambda i: 0.0))
    if own["profile"] > 0:
        out |= {
            "cycles": same["cycles"],
            "mean_cycles": mean["cycles"],
            "own_cycles": own["cycles"],
            "free_cycles": free["cycles"],
            "profile_cycles": own["profile"],
            "moved_bytes": mean["bytes"],
            "without_figure": own["without"],
        }
    return out


def step_of(spec: Spec, full: dict, ep: int, rows: int) -> dict:
    """Milliseconds and launches of a step at full depth; None where the profiler gave up."""
    target, drawn = load_target(spec.build.chip), experts_of(spec, ep, rows)
    keys = {
        "ms": "cycles",
        "mean_ms": "mean_cycles",
        "own_ms": "own_cycles",
        "free_exchanges_ms": "free_cycles",
        "profile_ms": "profile_cycles",
    }
    ms = {name: 1e3 * full[key] / target.clock_hz if key in full else None for name, key in keys.items()}
    for name in ("ms", "mean_ms"):  # on the simulator's terms; the others stay as they are, for a bound
        ms[name] = ms[name] and ms[name] + 1e3 * target.host_dispatch_s
    return ms | {
        "launches": full["launches_fixed"] + drawn["mean"] * full["launches_per_expert"],
        "busiest_experts": drawn["busiest"],
        "mean_experts": drawn["mean"],
    }


def died(said: str) -> str:
    """The line that tells why the compiler died, out of its noise."""
    why = re.search(r"^F\d{4} .*?\] (.*)$", said, re.MULTILINE)
    return f"the compiler aborted: {why[1][:300]}" if why else f"the compiler ended: {said.strip()[-300:]}"


def as_dict(program: Program) -> dict:
    return asdict(program)


def line(got: dict) -> str:
    text = f"compiled in {got['compile_seconds']:.1f} s ({got['cpu_seconds']:.1f} s of CPU)"
    return text + (f", {got['cycles']:,.0f} cycles" if "cycles" in got else "")
