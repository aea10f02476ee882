"""What a build is worth: validated, planned, checked, then predicted; or why it is refused. None is tried twice.

Two are tried at a time. Only the compilers work side by side: the rest is Python, and `ast` of Python 3.11 is not safe in threads.
"""
from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace

from mkgen import profile
from mkgen.check import check_plan
from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.planner import DoesNotFit, make_plan
from mkgen.simulate.predict import predict
from mkgen.spec.model import Build, Spec
from mkgen.spec.validate import validate
from mkgen.targets import load_target

WORKERS = 2                              # trials at a time: the profile of each runs a compiler
LEAST_RING = 4                           # chunks: a ring is not made shorter than that to let something else in
FEW, MANY = 1, 1000                      # draws of routing while searching (one step at the least), and to confirm


@dataclass(frozen=True)
class Trial:
    """A build and what came of it. ms: rows -> predicted; refused: why it is no candidate; layout: hash of its packed weights;
    plan: equal for builds that come to the same plan."""
    build: Build
    ms: dict[int, float] = field(default_factory=dict)
    layout: str = ""
    refused: str | None = None
    plan: str = ""

    @property
    def good(self) -> bool:
        return self.refused is None


class Clock:
    """A time limit. Nothing is begun after it; what has been begun is finished."""

    def __init__(self, seconds: float, now=time.monotonic):
        self.now, self.seconds = now, seconds
        self.began = now()

    @property
    def spent(self) -> float:
        return self.now() - self.began

    def over(self, share: float = 1.0) -> bool:
        """Has that share of the time gone?"""
        return self.spent >= share * self.seconds


class Bench:
    """Tries builds of one spec. rows: the variants that count, with their weights; free: the layout of packed weights may change."""

    def __init__(self, spec: Spec, rows: tuple[int, ...], clock: Clock, *, weights: dict[int, float] | None = None, free: bool = True,
                 context: int | None = None, seed: int = 0, host_latency: float = 1.0, tell=lambda bench: None):
        self.spec, self.rows, self.clock, self.free, self.tell = spec, rows, clock, free, tell
        self.weights = {r: (weights or {}).get(r, 1.0) for r in rows}
        self.terms = {"context": context, "seed": seed, "host_latency": host_latency}
        self.known: dict[str, Trial] = {}            # by build
        self.plans: dict[str, Trial] = {}            # by plan: two ways to write one plan are tried once
        self.refusals: Counter[str] = Counter()
        self.predicted = 0
        self.lock = threading.Lock()                  # held by whatever is not a compiler
        self.layout, self.base = "", None
        self.base = self.try_one(spec.build)
        if not self.base.good:
            raise MkgenError(f"{spec.path}: there is nothing to begin with: the spec's own build is refused\n  why: {self.base.refused}")
        self.layout = self.base.layout

    def score(self, trial: Trial) -> float:
        """Weighted mean over the rows variants of log(predicted / the spec's own): below 0 is faster; infinite if it is refused."""
        if not trial.good:
            return math.inf
        total = sum(self.weights.values())
        return sum(w * math.log(trial.ms[r] / self.base.ms[r]) for r, w in self.weights.items()) / total

    def try_many(self, builds: list[Build], share: float = 1.0) -> list[Trial | None]:
        """In the order of `builds`; None for what was not begun in that share of the time."""
        def one(build: Build) -> Trial | None:
            known = self.known.get(key_of(build))
            return known or (None if self.clock.over(share) else self.try_one(build))

        with ThreadPoolExecutor(WORKERS) as pool:
            return list(pool.map(one, builds))

    def try_one(self, build: Build) -> Trial:
        name = key_of(build)
        with self.lock:
            if name not in self.known:
                trial = self.tried(build)
                if name not in self.known:           # another thread may have tried it while a compiler ran
                    self.known[name] = trial
                    if trial.refused:
                        self.refusals[trial.refused] += 1
                if self.base is not None:
                    self.tell(self)
            return self.known[name]

    def tried(self, build: Build) -> Trial:
        try:
            plan = self.plan(build)
        except MkgenError as error:
            return Trial(build, refused=first_line(error, self.spec.path))
        except ValueError as error:                  # a defect of the planner: the build is not taken, and the user is told
            return Trial(build, refused=f"the planner fails: {first_line(error)}")
        made = plan.spec.build
        if made.ring_depth != self.spec.build.ring_depth:         # no deeper than the ring that the plan has; the spec's own depth stays as written
            made = replace(made, ring_depth=max(2, plan.ring_depth))
        return self.judged(made, plan)

    def plan(self, build: Build) -> Plan:
        """The plan of a build; where VMEM is too small, with the longest ring that fits."""
        target = load_target(build.chip)
        room = (target.vmem_usable_bytes // 1024 - build.spill_kib) // build.block_kib
        build = replace(build, ring_depth=max(2, min(build.ring_depth, room)))
        while True:
            spec = replace(self.spec, build=build)
            problems = validate(spec)
            if problems:
                raise MkgenError(f"{problems[0].what}: {problems[0].why}")
            try:
                return make_plan(spec, build_graph(spec), target)
            except DoesNotFit:
                if build.ring_depth <= LEAST_RING:
                    raise MkgenError("does not fit VMEM, with however short a ring") from None
                build = replace(build, ring_depth=build.ring_depth - 1)

    def judged(self, build: Build, plan: Plan) -> Trial:
        layout = layout_hash(plan)
        if not self.free and self.layout and layout != self.layout:
            return Trial(build, layout=layout, refused="weights would have to be packed again, and --no-layout forbids that")
        name = fingerprint(plan)
        same = self.plans.get(name)
        if same:
            return replace(same, build=build)
        findings = check_plan(plan)
        if findings:
            return Trial(build, layout=layout, refused=f"the checker: {findings[0].rule}")
        try:
            ms = self.milliseconds(plan, FEW, self.rows)
        except MkgenError as error:                  # the compiler refuses a piece
            return Trial(build, layout=layout, refused=first_line(error, self.spec.path))
        self.predicted += 1
        self.plans[name] = Trial(build, ms, layout, plan=name)
        return self.plans[name]

    def predict(self, plan: Plan, draws: int, rows: tuple[int, ...] | None = None) -> dict[int, float]:
        """Rows -> milliseconds."""
        with self.lock:
            return self.milliseconds(plan, draws, rows or self.rows)

    def milliseconds(self, plan: Plan, draws: int, rows: tuple[int, ...]) -> dict[int, float]:
        """The same for who holds the lock."""
        return {r: predict(plan, r, draws=draws, profile=self.profiled(plan, r), **self.terms).predicted_ms for r in rows}

    def profiled(self, plan: Plan, rows: int) -> profile.Profile:
        """The lock is let go while a compiler runs."""
        asked = profile.questions(plan, rows)
        self.lock.release()
        try:
            found = profile.measure(asked.job, asked.asked)
        finally:
            self.lock.acquire()
        return asked.profile(found)

    def confirmed(self, trial: Trial) -> Trial:
        """The same with many draws."""
        return replace(trial, ms=self.predict(self.plan(trial.build), MANY))


def key_of(build: Build) -> str:
    return json.dumps(asdict(build), sort_keys=True)


def fingerprint(plan: Plan) -> str:
    """Equal for two plans that differ in nothing but the words of their build that lead to them."""
    build = replace(plan.spec.build, reduce={}, gather="", scatter="", add="auto", ring_depth=plan.ring_depth)
    facts = key_of(build), plan.regions, plan.buffers, plan.transfers, plan.stages, plan.experts
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def first_line(error: Exception, path: str = "") -> str:
    return str(error).split("\n")[0].removeprefix(f"{path}: ")
