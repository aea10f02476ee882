"""The exchanges of a plan: where each stands, who takes part, what it sends and what its phases take on the chip."""
from __future__ import annotations

from dataclasses import dataclass, replace

from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Collective, Step, walk
from mkgen.show.report.places import named
from mkgen.targets.exchange import phase_seconds


@dataclass(frozen=True)
class Phase:
    """Messages of one phase: to how many peers, of how many bytes, and its time if nothing else delays it."""
    group: str
    peers: int
    message_bytes: int
    seconds: float


@dataclass(frozen=True)
class Exchange:
    """Neighbouring phases that bring one value together. `after`: the ops whose outputs travel; `group` of a
    phase names the ranks that take part."""
    region: str
    after: tuple[str, ...]
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
    after, going = "", False             # the last op; does an exchange go on?
    ops = {op.name for sub in plan.graph.sublayers() if sub.name == region.name for op in sub.ops}
    last: tuple = ()
    for node in walk(region.body):
        if isinstance(node, Step):
            after = node.op if node.op in ops else next((writer[b] for b in node.reads if b in writer), after)
            going = False
            writer.update((b, node.op) for b in node.writes if node.op in ops)
        elif isinstance(node, Collective) and node.part == "start":
            phase, key = one_phase(plan, node, rows), (node.kind, *named(node))
            if key == last and (going or getattr(node, "round", 0)):
                out[-1] = replace(out[-1], phases=(*out[-1].phases, phase))
            else:
                sources = dict.fromkeys(writer[b] for b in named(getattr(node, "sources", node)) if b in writer)
                out.append(Exchange(region.name, tuple(sources) or (after,), node.kind, (phase,), runs))
            last, going = key, True
    return out


def one_phase(plan: Plan, node: Collective, rows: int) -> Phase:
    size = node.message_bytes(rows)
    return Phase(node.stage, node.peers, size, phase_seconds(plan.target, node.peers, size, factors=node.factors))
