"""The exchanges of a plan: where each stands, who takes part, what it sends and what its phases take on the chip."""
from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Collective, Step, walk
from mkgen.show.report.places import NAMED
from mkgen.targets.exchange import phase_seconds


@dataclass(frozen=True)
class Phase:
    """Messages of one phase: to how many peers, of how many bytes, and its time if nothing else delays it."""
    factor: str
    peers: int
    message_bytes: int
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """Neighbouring phases that bring one value together. `after`: the op whose output travels."""
    region: str
    after: str
    kind: str
    phases: tuple[Phase, ...]
    runs: int                            # a step

    @property
    def seconds(self) -> float:
        return sum(p.seconds for p in self.phases)

    @property
    def sent(self) -> int:
        """Bytes that a core sends."""
        return sum(p.peers * p.message_bytes for p in self.phases)


def exchanges(plan: Plan, rows: int) -> list[Exchange]:
    """In program order, sub-layer by sub-layer in the order in which layers first run them."""
    times: dict[str, int] = {}
    for _, region in plan.sequence():
        times[region.name] = times.get(region.name, 0) + 1
    return [x for name, n in times.items() for x in of_region(plan, plan.regions[name], rows, n)]


def of_region(plan: Plan, region: Region, rows: int, runs: int) -> list[Exchange]:
    out: list[Exchange] = []
    writer: dict[str, str] = {}          # buffer -> the op that wrote it last
    after, open_ = "", None              # the op whose value travels; (kind, args) of the exchange that goes on
    ops = {op.name for sub in plan.graph.sublayers() if sub.name == region.name for op in sub.ops}
    for node in walk(region.body):
        if isinstance(node, Step):
            after = next((writer[b] for b in node.reads if b in writer), after) if node.op not in ops else node.op
            open_ = None
            writer.update((b, node.op) for b in node.writes if node.op in ops)
        elif isinstance(node, Collective) and node.part == "start":
            phase = one_phase(plan, node, rows)
            named = [writer[b] for arg in node.args for b in NAMED.findall(arg) if b in writer]
            key = (node.kind, node.args)
            if open_ == key:
                out[-1] = Exchange(*(getattr(out[-1], f) for f in ("region", "after", "kind")), (*out[-1].phases, phase), runs)
            else:
                out.append(Exchange(region.name, named[0] if named else after, node.kind, (phase,), runs))
            open_ = key
    return out


def one_phase(plan: Plan, node: Collective, rows: int) -> Phase:
    size = node.message_bytes(rows)
    return Phase(str(node.factor), node.peers, size, phase_seconds(plan.target, node.peers, size, factors=spanned(plan, node)))


def spanned(plan: Plan, node: Collective) -> tuple[str, ...]:
    """The mesh factors in which the ranks of a phase differ: the one it is named for, or all of them."""
    sizes = dict(plan.mesh.factors)
    return (node.factor,) if node.factor in sizes else tuple(n for n, size in sizes.items() if size > 1)

