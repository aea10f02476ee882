"""The generated code is proven as well as its plan: what the kernel does, move for move, is what the plan says.

The module is traced by JAX as for the chip, at its real size; its control slice (`control`) runs with the numbers of a
scenario (`machine`) over the whole schedule. The trace is held against the plan's expansion (`agree`), against itself
(`hazards`: what the code reads and writes while copies are on their way), and the ranks' traces against each other (`ranks`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from types import ModuleType

from mkgen.check.findings import Finding, Report, Stop
from mkgen.check.model import Model, Text
from mkgen.check.refs import BadExpression
from mkgen.check.scenario import Scenario, scenarios
from mkgen.check.shorten import Short, shorten, whole
from mkgen.plan.experts import ExpertImage
from mkgen.plan.plan import Plan
from mkgen.prove.agree import check_agreement
from mkgen.prove.control import Unfollowable
from mkgen.prove.expansion import Expansion
from mkgen.prove.hazards import Hazards
from mkgen.prove.machine import Spot, Stuck, run_program
from mkgen.prove.program import Program, trace_program
from mkgen.prove.ranks import Ranks, shared_events
from mkgen.prove.rung import Rung, answer

MEETING = 1  # the scenario in which ranks meet: exchanges are the same in all of them
ITEM = {"bf16": 2}  # bytes of an element; all other types have four


@dataclass
class CodeCheck:
    """runs: (scenario, moves of the plan compared, accesses watched). ranks: how many met, by how many messages."""

    findings: list[Finding] = field(default_factory=list)
    runs: list[tuple[str, int, int]] = field(default_factory=list)
    ranks: int = 0
    messages: int = 0
    seconds: float = 0.0

    @property
    def told(self) -> str:
        """What was compared, in a line."""
        met = f"; {self.messages:,} messages of {self.ranks} ranks" if self.ranks else ""
        moves = f"{self.moves:,} starts, waits and stages of the plan, {self.accesses:,} accesses of what copies move"
        return f"{moves}, {len(self.runs)} runs{met}"

    @property
    def moves(self) -> int:
        return sum(n for _, n, _ in self.runs)

    @property
    def accesses(self) -> int:
        return sum(n for _, _, n in self.runs)


def check_code(plan: Plan, module: ModuleType | None = None, *, few: bool = False, meet: bool = True) -> CodeCheck:
    """Traces the generated module and says where it differs from its plan, or is unsafe. Never raises for a module that is wrong.

    module: what `load_kernel` gives; printed from the plan if not given. few: for full-size plans, only two scenarios of
    the largest variant, and the ranks meet in a short schedule (`check.shorten`). meet: whether all ranks' exchanges are
    held against each other."""
    from mkgen.prove.drive import load_kernel

    began, done, report = time.perf_counter(), CodeCheck(), Report()
    try:
        module = module or load_kernel(plan)
        for rows in (max(plan.spec.build.rows),) if few else plan.spec.build.rows:
            schedule = whole(plan)
            given = scenarios(plan, rows, schedule)
            variant = Variant(plan, module, rows, schedule, report, done)
            for scenario in [given[0], replace(given[MEETING], rank=plan.mesh.ranks - 1)] if few else given:
                variant.alone(scenario)
            if meet and plan.mesh.ranks > 1:
                (Variant(plan, module, rows, shorten(plan), report, done) if few else variant).together(given[MEETING])
    except Stop:
        pass
    except Exception as e:  # what a broken module raises when it is traced is its finding
        report.seen.setdefault(
            ("code", "module", str(e)),
            Finding("code", "module", f"{type(e).__name__}: {e}", "the module can be traced for the chip"),
        )
    done.findings, done.seconds = report.findings, time.perf_counter() - began
    return done


def code_rung(plan: Plan, module: ModuleType) -> Rung:
    """A rung of the proof: the module's trace against its plan."""
    done = check_code(plan, module)
    return answer("code = plan", done.told, [str(f) for f in done.findings])


class Variant:
    """One row variant of a module: its program, and the rules that its traces are held against."""

    def __init__(self, plan: Plan, module: ModuleType, rows: int, schedule: Short, report: Report, done: CodeCheck):
        self.plan, self.rows, self.report, self.done = plan, rows, report, done
        self.model = Model(plan, rows, Text(plan), schedule)
        layers, module.LAYERS = module.LAYERS, schedule.layers  # how often the loop over the layers turns
        try:
            self.program: Program = trace_program(plan, module, rows)
        finally:
            module.LAYERS = layers
        self.limits()
        self.item = {b.name: ITEM.get(b.dtype, 4) for b in plan.buffers.values()}
        self.chunks = dict(zip(schedule.chunks[::2], entry_rows(schedule)))
        self.images = {image.name: expert_rows(image) for image in plan.experts}
        self.hbm = {"tape", "embedding", *(image.name for image in plan.experts), *plan.states.values()}

    def limits(self) -> None:
        """What the compiler is told: a collective id if ranks exchange and none if they do not, the chip's VMEM, no elimination."""
        told, exchanges = self.program.params, self.plan.mesh.ranks > 1
        found = {name: getattr(told, name, None) for name in ("collective_id", "vmem_limit_bytes", "has_side_effects")}
        good = {
            "collective_id": isinstance(found["collective_id"], int) and found["collective_id"] >= 0
            if exchanges
            else found["collective_id"] is None,
            "vmem_limit_bytes": found["vmem_limit_bytes"] == self.plan.target.vmem_bytes,
            "has_side_effects": bool(found["has_side_effects"]),
        }
        for name in (n for n, right in good.items() if not right):
            self.report.add(
                "code",
                "compiler parameters",
                f"{name} is {found[name]}",
                f"{self.plan.mesh.ranks} ranks, {self.plan.target.name}",
            )

    def alone(self, scenario: Scenario) -> None:
        """One rank's trace against the plan, and by itself."""
        try:
            trace = run_program(self.program, self.model, scenario)
            said = Expansion(self.model, scenario).expand()
        except (Stuck, BadExpression, Unfollowable, TypeError) as e:
            return self.report.add(
                "code",
                str(scenario),
                f"{type(e).__name__}: {e}",
                "the kernel can be followed with a scenario's numbers",
            )
        check_agreement(said, trace, self.item, self.report)
        Hazards(self.program.control.shapes, self.item, self.report, self.parts).run(trace, self.hbm)
        self.done.runs.append((str(scenario), len(said), sum(e.what in ("read", "write") for e in trace)))

    def parts(self, source: Spot) -> list[tuple[int, int]]:
        """Rows of what a copy brings that have to be read each: the entries of a chunk, the matrices and biases of an expert."""
        name, ((first, _), *_) = source
        return self.chunks.get(first, []) if name == "tape" else self.images.get(name, [])

    def together(self, scenario: Scenario) -> None:
        """All ranks' exchanges."""
        try:
            traces = [
                shared_events(run_program(self.program, self.model, replace(scenario, rank=r)))
                for r in range(self.plan.mesh.ranks)
            ]
        except (Stuck, TypeError) as e:
            return self.report.add(
                "code", "all ranks", f"{type(e).__name__}: {e}", "the kernel can be followed with a scenario's numbers"
            )
        met = Ranks(traces, self.item, self.report)
        met.run()
        self.done.ranks, self.done.messages = len(traces), self.done.messages + sum(map(len, met.messages))


def entry_rows(schedule: Short) -> list[list[tuple[int, int]]]:
    """Of each chunk, the rows of each entry."""
    return [[(e.row, e.row + e.rows) for e in c.entries] for _, _, region in schedule.regions for c in region.chunks]


def expert_rows(image: ExpertImage) -> list[tuple[int, int]]:
    """Of an expert's image: the codes of each panel, what scales them, a row for each panel's bias."""
    out = []
    for s in (image.up, image.down):
        out += [(s.at + n * s.panel_rows, s.at + (n + 1) * s.panel_rows) for n in range(s.panels)]
        for at, rows in ((s.scales_at, s.scale_rows), (s.zeros_at, s.zero_rows), (s.columns_at, s.column_rows)):
            out += [(at + n * rows, at + (n + 1) * rows) for n in range(s.panels) if rows]
    return out + [(at, at + 1) for at in range(image.bias_at, image.bias_at + (image.up.panels + image.down.panels if image.biases else 0))]
