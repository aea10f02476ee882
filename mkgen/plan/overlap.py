"""In which order a sub-layer's ops and exchanges run: few rounds, and between a round's start and its finish whatever can.

`arrange` takes the trace of a plain lowering (ops in order, each exchange in front of the op that needs it) and gives the same
work in a better order. Exchanges of one kind that can meet become one. An op keeps its place among those that read or write the
same values and states.
"""
from __future__ import annotations

from dataclasses import dataclass

import networkx as nx

from mkgen.graph.ir import Op, Value
from mkgen.plan.exchange import Exchange


@dataclass(frozen=True)
class Begin:
    exchange: Exchange


@dataclass(frozen=True)
class Finish:
    exchange: Exchange


def arrange(trace: list[Op | Exchange], talks: set[str]) -> list[Op | Begin | Finish]:
    """talks: ops that exchange something in their middle; they are not put between another exchange's start and finish."""
    graph, out, done = dependences(trace), [], set()
    rounds = meetings(graph, trace)

    def emit(i: int) -> None:
        for before in sorted(graph.predecessors(i)):
            if before not in done:
                emit(before)
        if i not in done:
            done.add(i)
            out.append(trace[i])

    for members in rounds:
        for i in members:
            for before in sorted(nx.ancestors(graph, i) - done):
                emit(before)
        exchange = trace[members[0]].joined(tuple(trace[i] for i in members[1:]))
        out.append(Begin(exchange))
        for i, entry in enumerate(trace):
            ready = i not in done and isinstance(entry, Op) and not set(graph.predecessors(i)) - done
            if ready and entry.name not in talks:
                emit(i)
        out.append(Finish(exchange))
        done.update(members)
    for i in range(len(trace)):
        if i not in done:
            emit(i)
    return out


def dependences(trace: list[Op | Exchange]) -> nx.DiGraph:
    """i -> j: entry j reads or overwrites what entry i makes, or changes what i reads; or both use one state."""
    graph, made, readers, used = nx.DiGraph(), {}, {}, {}
    for j, entry in enumerate(trace):
        graph.add_node(j)
        reads, writes = touched(entry)
        if isinstance(entry, Op) and entry.ahead:                          # behind this sub-layer's own weights
            graph.add_edges_from((i, j) for i, e in enumerate(trace[:j]) if isinstance(e, Op) and e.weights())
        for name in reads:
            if name in made:
                graph.add_edge(made[name], j)
        for name in writes:
            graph.add_edges_from((i, j) for i in (*readers.pop(name, ()), *((made[name],) if name in made else ())) if i != j)
            made[name] = j
        for name in reads:
            readers.setdefault(name, []).append(j)
        for s in entry.states() if isinstance(entry, Op) else ():
            if s.name in used:
                graph.add_edge(used[s.name], j)
            used[s.name] = j
    return graph


def touched(entry: Op | Exchange) -> tuple[list[str], list[str]]:
    if isinstance(entry, Exchange):
        return list(entry.values), list(entry.values)
    carried = [v.name for v in vars(entry).values() if isinstance(v, Value) and v.carried]       # perhaps written: none overtakes another
    return [v.name for v in entry.inputs()], [*(v.name for v in entry.outputs()), *carried]


def meetings(graph: nx.DiGraph, trace: list[Op | Exchange]) -> list[tuple[int, ...]]:
    """The exchanges, those that go together in one tuple, in order. One that can wait goes with a later one of its kind."""
    exchanges = [i for i, e in enumerate(trace) if isinstance(e, Exchange)]
    before = {j: {i for i in exchanges if i != j and nx.has_path(graph, i, j)} for j in exchanges}
    fixed: dict[int, int] = {}

    def earliest(j: int) -> int:
        return max([fixed.get(j, 0), *(earliest(i) + 1 for i in before[j])])

    depth = max((earliest(j) for j in exchanges), default=0)

    def latest(i: int) -> int:
        return min([fixed.get(i, depth), *(latest(j) - 1 for j in exchanges if i in before[j])])

    for j in sorted(exchanges, key=lambda j: (latest(j) - earliest(j), j)):       # the critical ones first
        same = [fixed[i] for i in fixed if trace[i].meets(trace[j]) and earliest(j) <= fixed[i] <= latest(j)]
        fixed[j] = max(same, default=earliest(j))
    together: list[list[int]] = []
    for j in exchanges:
        for members in together:
            if fixed[members[0]] == fixed[j] and all(trace[i].meets(trace[j]) for i in members):
                members.append(j)
                break
        else:
            together.append([j])
    return [tuple(members) for members in sorted(together, key=lambda m: (fixed[m[0]], m[0]))]

