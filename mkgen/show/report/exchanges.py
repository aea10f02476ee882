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
    """The phases that bring some values together. `after`: the ops whose outputs travel; `group` of a
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
    going: dict[tuple, int] = {}         # what is brought -> its place in out, from round to round
    writer: dict[str, str] = {}          # buffer -> the op that wrote it last
    for node in walk(region.body):
        if isinstance(node, Step):
            writer.update((b, node.op) for b in node.writes)
        elif isinstance(node, Collective):
            key, sources = (node.told, node.sources, node.targets), [writer[b] for b in named(node.sources) if b in writer]
            if node.part == "finish":    # what it brings is still the value of the ops that it came from
                writer.update((b, op) for b, op in zip(named(node.targets), sources))
            elif node.round == 0:
                going[key] = len(out)
                out.append(Exchange(region.name, tuple(dict.fromkeys(sources)), node.told, (one_phase(plan, node, rows),), runs))
            else:
                at = going[key]
                out[at] = replace(out[at], phases=(*out[at].phases, one_phase(plan, node, rows)))
    return out


def one_phase(plan: Plan, node: Collective, rows: int) -> Phase:
    size = node.message_bytes(rows)
    return Phase(node.stage, node.peers, size, phase_seconds(plan.target, node.peers, size, factors=node.factors))
