"""Measures one model on one number of rows: each program in a process of its own, one after another; a line of log for each."""
from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mkgen.spec.load import load_spec
from mkgen.spec.model import Moe, Spec
from mkgen.targets import load_target
from rival import exchange
from rival.chance import busiest, mean_distinct
from rival.hlo import Module
from rival.model import Rival
from rival.timing import step

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 900
# without the first, XLA relays out whole weight stacks on every step; the others keep exchanges on the core that the profile is of
LAYOUT = "--xla_tpu_impure_enable_large_2nd_minor_layout=false"
ON_CORE = " ".join(f"--xla_tpu_enable_sparse_core_collective_offload_{c}=false" for c in ("all_reduce", "all_gather", "reduce_scatter"))
# the profiler aborts on some programs: tried in turn (caches written by a select instead of in place; another check of types)
WAYS = ((False, ""), (True, ""), (False, "--xla_tpu_check_llo_types=false"), (True, "--xla_tpu_check_llo_types=false"))


class Failed(Exception):
    """A program that did not compile; the text says which, and the compiler's words."""


@dataclass(frozen=True)
class Case:
    """A model as both sides build it. full_depth: the unrolled form is also compiled as deep as the model is."""
    spec: str
    context: int
    rows: tuple[int, ...]
    sets: tuple[str, ...] = ()
    full_depth: bool = False

    @property
    def path(self) -> str:
        return str(ROOT / "model_specs" / f"{self.spec}.yaml")

    def load(self) -> Spec:
        return load_spec(self.path, sets=self.all_sets)

    @property
    def all_sets(self) -> tuple[str, ...]:
        return (f"build.context={self.context}", *self.sets)


@dataclass
class Program:
    """One form of the rival at full depth. Seconds without tracing; cycles at the busiest and the mean rank's experts."""
    form: str
    depths: list[dict]                                # what was compiled: layers, compile_seconds, cpu_seconds, launches, cycles, …
    full: dict = field(default_factory=dict)          # the same at full depth: compiled, or extrapolated
    extrapolated: bool = False
    worst_residual: dict = field(default_factory=dict)     # relative, of the fit, by quantity


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
            "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false",
            "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "LIBTPU_INIT_ARGS": flags.format(where=where)}
        began = time.perf_counter()
        with (where / "said").open("w") as said:
            try:
                subprocess.run([sys.executable, "-m", "rival.worker", str(where / "job.json"), str(where / "out.json")], env=env,
                               stdin=subprocess.DEVNULL, stdout=said, stderr=said, timeout=TIMEOUT_SECONDS, cwd=where)
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
        return self.job(LAYOUT, kind="xla", spec=case.path, sets=case.all_sets, rows=rows, form=form, layers=layers, expert_parallel=ep,
                        masked_write=False)

    def profiled(self, case: Case, rows: int, form: str, layers: int, ep: int) -> dict:
        """The same program once more, with its text and the static profile of every operation."""
        key, errors = f"{case.spec} {form} {rows}", []
        first = self.way.get(key, 0)
        for n in [first, *(n for n in range(len(WAYS)) if n != first)] if first < len(WAYS) else []:
            masked, more = WAYS[n]
            try:
                got = self.job(f"{LAYOUT} {ON_CORE} --xla_jf_dump_static_llo_profile_to={{where}} {more}", kind="xla", spec=case.path, sets=case.all_sets,
                               rows=rows, form=form, layers=layers, expert_parallel=ep, masked_write=masked, keep=True)
            except Failed as error:
                errors.append(str(error))
                continue
            self.way[key] = n
            return read(Path(got["where"]), case, rows, layers, form, ep) | {"masked_write": masked, "profiler": None}
        errors = errors or ["as for another depth"]
        self.say(f"  {form}, {layers} layers: the profiler aborts; no step time. {errors[0][:160]}")
        self.way[key] = len(WAYS)                     # it will not be asked again
        got = self.job(f"{LAYOUT} {ON_CORE}", kind="xla", spec=case.path, sets=case.all_sets, rows=rows, form=form, layers=layers, expert_parallel=ep,
                       masked_write=False, keep=True)
        return read(Path(got["where"]), case, rows, layers, form, ep) | {"masked_write": False, "profiler": errors[0]}

    def best_layout(self, case: Case, rows: int, tried: list[int]) -> tuple[int, list[dict]]:
        """Expert parallelism with the least estimated time of two layers, each waiting for its busiest group."""
        spec, found = case.load(), []
        moe = routed(spec)
        for ep in tried if moe else []:
            got = self.profiled(case, rows, "unrolled", 2, ep)
            if "cycles" not in got:
                raise Failed(f"{case.spec}: the profiler aborts on two layers: {got['profiler']}")
            found.append({"expert_parallel": ep, "busiest_experts": experts_of(spec, ep, rows)["busiest"], "cycles": got["cycles"]})
            self.say(f"  experts over {ep} groups: {got['cycles']:,.0f} cycles for two layers and the ends, {found[-1]['busiest_experts']:.1f} experts on the busiest")
        return min(found, key=lambda f: f["cycles"])["expert_parallel"] if found else 1, found

    def unrolled(self, case: Case, rows: int, ep: int, depths: list[int]) -> Program:
        spec, seen = case.load(), []
        for layers in depths:
            seen.append(self.compiled(case, rows, "unrolled", layers, ep) | self.profiled(case, rows, "unrolled", layers, ep) | {"layers": layers})
            self.say(f"  unrolled, {layers} layers: {line(seen[-1])}")
        made = Program("unrolled", seen)
        made.full, made.worst_residual = extrapolate(spec, seen)
        made.extrapolated = True
        if case.full_depth:                           # and how far off that was
            whole = self.compiled(case, rows, "unrolled", spec.model.layers, ep) | self.profiled(case, rows, "unrolled", spec.model.layers, ep)
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
        """The generated module through the same worker and the same counters; bytes, floor and prediction from its own commands."""
        sets = (*case.all_sets, f"build.rows=[{rows}]")
        got = self.job("", kind="mkgen", spec=case.path, sets=sets, rows=rows, keep=True)
        module = Module.parse(text_of(Path(got["where"])))
        planned = command(case, rows, "plan")
        said = planned["variants"][str(rows)]
        simulated = command(case, rows, "simulate", optional=True)
        got |= module.counts() | in_flight(case, rows)
        got |= {"verdict": said["verdict"], "streamed_bytes": said["streamed_bytes_per_step"], "hbm_bytes": said["bytes_per_core"],
                "predicted_ms": find(simulated, "predicted_ms", rows), "floor_ms": find(simulated, "floor_ms", rows)}
        self.say(f"  mkgen: {line(got)}, {got['launches']:.0f} launches")
        return got


FITTED = ("cpu_seconds", "compile_seconds", "launches_fixed", "launches_per_expert", "collectives", "cycles", "mean_cycles", "own_cycles",
          "free_cycles", "profile_cycles", "moved_bytes", "code_bytes")


def line(got: dict) -> str:
    text = f"compiled in {got['compile_seconds']:.1f} s ({got['cpu_seconds']:.1f} s of CPU)"
    return text + (f", {got['cycles']:,.0f} cycles" if "cycles" in got else "")


def routed(spec: Spec) -> Moe | None:
    return next((f for f in spec.model.ffns.values() if isinstance(f, Moe)), None)


MOST_GROUPS = 8                                       # beyond, the busiest group reads more bytes the more groups there are, and a compile takes minutes


def layouts(spec: Spec) -> list[int]:
    """Ways to lay experts over the ranks that divide."""
    moe, ranks = routed(spec), spec.build.ranks
    return [ep for ep in range(1, min(ranks, MOST_GROUPS) + 1) if moe and ranks % ep == 0 and moe.experts % ep == 0 and moe.width % (ranks // ep) == 0]


def text_of(where: Path) -> str:
    """The text of the largest module that was compiled."""
    return max(where.glob("*after_codegen.txt"), key=lambda p: p.stat().st_size).read_text()


def read(where: Path, case: Case, rows: int, layers: int, form: str, ep: int) -> dict:
    """What the text says. Launches for no expert, and what one more of each layer adds. Cycles with exchanges at the simulator's prices, for the busiest
    group's experts and the mean one's; for the busiest with exchanges as profiled, and free."""
    spec, rival = case.load(), Rival(case.load(), rows, case.context, form)
    target, text, drawn = load_target(spec.build.chip), text_of(where), experts_of(spec, ep, rows)
    rate = target.hbm_bytes_per_s / target.clock_hz
    module = Module.parse(text)

    def with_experts(n: float) -> Module:
        module.trips = lambda scope: n if scope.endswith("experts/while") else rival.nest.turns if scope.endswith("layers/while") else None
        return module

    none, one = (with_experts(n).counts() for n in (0.0, 1.0))
    out = module.prefetch(layers) | {
        "launches_fixed": none["launches"], "launches_per_expert": one["launches"] - none["launches"], "collectives": none["collectives"],
        "instructions": none["instructions"], "copied_bytes": none["copied_bytes"], "untold_loops": sorted(module.untold)}
    priced = lambda i: exchange.cycles(target, spec.build.mesh, i)
    same, mean = (step(with_experts(drawn[k]), rate, priced) for k in ("busiest", "mean"))
    own, free = (step(with_experts(drawn["busiest"]), rate, price) for price in (None, lambda i: 0.0))
    if own["profile"] > 0:
        out |= {"cycles": same["cycles"], "mean_cycles": mean["cycles"], "own_cycles": own["cycles"], "free_cycles": free["cycles"],
                "profile_cycles": own["profile"], "moved_bytes": mean["bytes"], "without_figure": own["without"]}
    return out


def experts_of(spec: Spec, ep: int, rows: int) -> dict[str, float]:
    """Distinct experts of a layer on the busiest group of ranks and on the mean one."""
    moe = routed(spec)
    return {"busiest": float(busiest(moe.experts, moe.top_k, ep, rows)) if moe else 0.0,
            "mean": mean_distinct(moe.experts, moe.top_k, ep, rows) if moe else 0.0}


def kinds(spec: Spec, layers: int) -> Counter:
    """Layers of each kind among the first so many."""
    return Counter((run.mixer, run.ffn) for run in spec.model.schedule[:layers])


def extrapolate(spec: Spec, seen: list[dict]) -> tuple[dict, dict]:
    """Full depth from some depths: what the ends cost, plus so much a layer of each kind (least squares, none below zero). A kind that
    stands in each depth alike is counted with the ends. Returns the figures and the worst relative residual of each."""
    counts = [kinds(spec, s["layers"]) for s in seen]
    whole = kinds(spec, spec.model.layers)
    varying = [k for k in whole if len({c[k] for c in counts}) > 1]
    if any(whole[k] != counts[0][k] for k in whole if k not in varying):
        raise ValueError(f"depths {[s['layers'] for s in seen]} do not tell all kinds of layers apart")
    a = np.array([[1.0, *(c[k] for k in varying)] for c in counts])
    full, worst = {}, {}
    for name in (n for n in FITTED if all(n in s for s in seen)):
        y = np.array([s[name] for s in seen], float)
        x = nonnegative(a, y)
        full[name] = float(np.array([1.0, *(whole[k] for k in varying)]) @ x)
        worst[name] = float(np.max(np.abs(a @ x - y) / np.maximum(y, 1e-9))) if y.any() else 0.0
    return {k: v for k, v in seen[-1].items() if k not in FITTED} | full, worst


def nonnegative(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares with x >= 0, by dropping columns whose share is below zero: a handful of columns, so all subsets are tried."""
    best = None
    for mask in range(1, 1 << a.shape[1]):
        on = [j for j in range(a.shape[1]) if mask >> j & 1]
        part, *_ = np.linalg.lstsq(a[:, on], y, rcond=None)
        if (part >= -1e-9).all():
            x = np.zeros(a.shape[1])
            x[on] = part
            error = float(np.sum((a @ x - y) ** 2))
            if best is None or error < best[0] * (1 - 1e-9) - 1e-12:
                best = error, x
    return best[1] if best else np.zeros(a.shape[1])


def weight_bytes(case: Case, rows: int, ep: int, experts: float) -> dict[str, float]:
    """A rank's weights: bytes that it holds, and bytes that a step has to read of them."""
    rival, held, read_ = Rival(case.load(), rows, case.context, "unrolled", ep), 0.0, 0.0
    from rival.arrays import dtype_of

    def one(leaf, _):
        nonlocal held, read_
        size = float(np.prod(leaf.shape)) * np.dtype(dtype_of(leaf.dtype, False)).itemsize
        for axis in leaf.spec:
            for name in (axis,) if isinstance(axis, str) else axis or ():
                size /= {"ep": rival.setup.ep, "tp": rival.setup.tp}[name]
        held += size
        share = {"all": 1.0, "rows": rows / leaf.shape[0], "experts": experts * rival.setup.ep / leaf.shape[0]}[leaf.reads]
        read_ += size * share

    rival.weights(one)
    return {"held_bytes": held, "streamed_bytes": read_}


def step_of(spec: Spec, full: dict, ep: int, rows: int) -> dict:
    """Milliseconds and launches of a step at full depth; None where the profiler gave up."""
    target, drawn = load_target(spec.build.chip), experts_of(spec, ep, rows)
    keys = {"ms": "cycles", "mean_ms": "mean_cycles", "own_ms": "own_cycles", "free_exchanges_ms": "free_cycles", "profile_ms": "profile_cycles"}
    ms = {name: 1e3 * full[key] / target.clock_hz if key in full else None for name, key in keys.items()}
    for name in ("ms", "mean_ms"):                     # on the simulator's terms; the others stay as they are, for a bound
        ms[name] = ms[name] and ms[name] + 1e3 * target.host_dispatch_s
    return ms | {"launches": full["launches_fixed"] + drawn["mean"] * full["launches_per_expert"],
                 "busiest_experts": drawn["busiest"], "mean_experts": drawn["mean"]}


def in_flight(case: Case, rows: int) -> dict:
    """mkgen: bytes of the tape that stand in the ring, or are on their way there, when a layer ends; mean and most over the layers."""
    from mkgen.graph.build import build_graph
    from mkgen.plan.planner import make_plan
    from mkgen.plan.tape import ROW_BYTES

    spec = load_spec(case.path, sets=(*case.all_sets, f"build.rows=[{rows}]"))
    plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
    sizes, consumed, last, ends = plan.chunk_table()[1::2], 0, None, []
    for layer, region in plan.sequence():
        if last is not None and layer != last:
            ends.append(int(sizes[consumed:consumed + plan.ring_depth].sum()) * ROW_BYTES)
        last, consumed = layer, consumed + len(region.chunks)
    return {"in_flight_mean_bytes": sum(ends) / len(ends), "in_flight_most_bytes": max(ends)}


def command(case: Case, rows: int, name: str, optional: bool = False) -> dict:
    """A command of mkgen, its JSON; an optional one that this build does not have gives nothing."""
    sets = [word for s in case.all_sets for word in ("--set", s)]
    ran = subprocess.run([sys.executable, "-m", "mkgen", name, case.path, *sets, "--rows", str(rows), "--json"], capture_output=True, text=True, cwd=ROOT,
                         stdin=subprocess.DEVNULL)
    if optional and "No such command" in ran.stderr:
        return {}
    if ran.returncode not in (0, 1) or not ran.stdout.strip():
        raise Failed(f"mkgen {name} {case.spec}: {ran.stderr.strip()[-400:]}")
    return json.loads(ran.stdout)


def find(said: dict, key: str, rows: int) -> float | None:
    """A figure of the variant of that many rows, or of the whole answer."""
    return said.get("variants", {}).get(str(rows), {}).get(key, said.get(key))


def died(said: str) -> str:
    """The line that tells why the compiler died, out of its noise."""
    why = re.search(r"^F\d{4} .*?\] (.*)$", said, re.MULTILINE)
    return f"the compiler aborted: {why[1][:300]}" if why else f"the compiler ended: {said.strip()[-300:]}"


def as_dict(program: Program) -> dict:
    return asdict(program)
