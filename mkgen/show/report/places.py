"""The step as a line of places: what each sub-layer does, op by op, in program order, and which buffers that touches."""
from __future__ import annotations

import re
from dataclasses import dataclass, field

from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Advance, Collective, Node, Start, Step, Wait, walk

NAMED = re.compile(r"\bm\.(\w+)")        # a buffer, in the source text of an argument
EXCHANGE = "exchange"


@dataclass(frozen=True)
class Touch:
    """One access of a buffer. defines: it may begin a new value (a step's or a copy's write)."""
    buffer: str
    reads: bool
    writes: bool
    waits: bool = False                  # only the wait of a copy that was started before


@dataclass
class Place:
    """A run of neighbouring nodes that serve one op of a sub-layer."""
    region: str
    op: str
    touches: list[Touch] = field(default_factory=list)


def short(op: str, region: str) -> str:
    """An op's name without its sub-layer's."""
    return op.removeprefix(f"{region}.")


def touched(plan: Plan, node: Node) -> list[Touch]:
    """The buffers of one node. A start reads its source and writes its target; so does its wait, which ends that. An exchange
    reads when it starts and writes when it is finished."""
    if isinstance(node, Step):
        names = dict.fromkeys((*node.reads, *node.writes))
        return [Touch(n, n in node.reads, n in node.writes) for n in names]
    if isinstance(node, (Start, Wait)) and node.transfer in plan.transfers:
        t, waits = plan.transfers[node.transfer], isinstance(node, Wait)
        return [Touch(n, n in t.reads, n in t.writes, waits) for n in dict.fromkeys((*t.reads, *t.writes))]
    if isinstance(node, Collective):
        finish = node.part == "finish"
        return [Touch(n, not finish, finish) for n in named(node.targets if finish else node.sources) if n in plan.buffers]
    return []


def named(texts: tuple[str, ...]) -> list[str]:
    """The buffers that an exchange's texts name, each once."""
    return list(dict.fromkeys(n for t in texts for n in NAMED.findall(t)))


def places(plan: Plan, region: Region) -> list[Place]:
    """The sub-layer's places in program order. A wait belongs to the op behind it in the region tree, a start to the one
    before it (at the ends to the only neighbour); an exchange is a place of its own."""
    out: list[Place] = []
    held: list[Touch] = []
    for node in walk(region.body):
        if isinstance(node, Advance):
            continue
        found = touched(plan, node)
        if isinstance(node, (Step, Collective)):
            op = node.op if isinstance(node, Step) else EXCHANGE
            if not out or out[-1].op != op:
                out.append(Place(region.name, op))
            out[-1].touches += held + found
            held = []
        elif isinstance(node, Start) and out and not held:
            out[-1].touches += found
        else:
            held += found
    if held:
        if not out:
            out.append(Place(region.name, region.name))
        out[-1].touches += held
    return out


def all_places(plan: Plan) -> dict[str, list[Place]]:
    """By sub-layer, in the order in which the layers first run them: begin, mixers and ffns, end."""
    order = dict.fromkeys(r.name for _, r in plan.sequence())
    return {name: places(plan, plan.regions[name]) for name in order}
