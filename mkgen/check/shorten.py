"""A short schedule with every layer kind of the real one, and every kind behind every kind that it ever follows."""

from __future__ import annotations

from dataclasses import dataclass

from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Branch, Loop, Start, Step, Wait, walk


@dataclass(frozen=True)
class Short:
    """regions: (layer, index, region) in order; the ends have neither. chunks, facts: the tables of this schedule."""

    regions: tuple[tuple[int | None, int | None, Region], ...]
    chunks: list[int]
    facts: list[int]
    tape_rows: int

    @property
    def layers(self) -> int:
        return 1 + max((n for n, _, _ in self.regions if n is not None), default=-1)


def control_texts(plan: Plan) -> str:
    """All source text that decides what is copied and how often."""
    out: list[str] = []
    for region in plan.regions.values():
        for n in walk(region.body):
            if isinstance(n, (Start, Wait)):
                out += [*n.args, n.when or ""]
            elif isinstance(n, Loop):
                out.append(n.trips)
            elif isinstance(n, Branch):
                out.append(n.selector)
            elif isinstance(n, Step) and isinstance(n.args.get("when"), str):
                out.append(n.args["when"])
    for t in plan.transfers.values():
        out += [*t.setup, t.source, t.target, t.semaphore]
    return " ".join(out)


def short_layers(kinds: list) -> list[int]:
    """Layer numbers: a walk that takes every step from one kind to another that the whole list takes."""
    if not kinds:
        return []
    first: dict = {}
    follows: dict = {}
    for n, kind in enumerate(kinds):
        first.setdefault(kind, n)
    for n, (a, b) in enumerate(zip(kinds, kinds[1:])):
        follows.setdefault(a, {}).setdefault(b, n + 1)
    out = [0]
    seen: set = set()

    def go(a, b) -> None:
        """From the end of the walk to kind a, then the step to b."""
        trail, back = [kinds[out[-1]]], {kinds[out[-1]]: None}
        for k in trail:
            for nxt in follows.get(k, {}):
                if nxt not in back:
                    back[nxt] = k
                    trail.append(nxt)
        way = []
        while a is not None and back.get(a) is not None:
            way.append(first[a])
            a = back[a]
        out.extend(reversed(way))
        out.append(follows[kinds[out[-1]]].get(b, first[b]))

    for a, b in zip(kinds, kinds[1:]):
        if (a, b) not in seen:
            before = len(out)
            go(a, b)
            seen.update(zip((kinds[n] for n in out[before - 1 :]), (kinds[n] for n in out[before:])))
    if kinds[out[-1]] != kinds[-1]:
        go(kinds[-2], kinds[-1])
    return out


def shorten(plan: Plan) -> Short:
    """The short schedule as a schedule of its own: layers are numbered anew, a kind's indices end at its real last."""
    names, texts = plan.fact_names, control_texts(plan)
    columns = plan.fact_table().reshape(-1, len(names)).tolist()
    used = [i for i, name in enumerate(names[4:], 4) if name.upper() in texts]
    layers = short_layers([(*pair, *(row[i] for i in used)) for pair, row in zip(plan.graph.layers, columns)])
    total: dict = {}
    for pair in plan.graph.layers:
        for slot, kind in enumerate(pair):
            total[slot, kind] = total.get((slot, kind), 0) + 1
    chosen: dict = {}
    for n in layers:
        for slot, kind in enumerate(plan.graph.layers[n]):
            chosen[slot, kind] = chosen.get((slot, kind), 0) + 1
    index = {key: max(0, total[key] - n) for key, n in chosen.items()}
    regions: list = [(None, None, plan.regions["begin"])]
    facts: list[int] = []
    for number, n in enumerate(layers):
        row = list(columns[n])
        for slot, kind in enumerate(plan.graph.layers[n]):
            row[2 * slot + 1] = index[slot, kind] % max(1, total[slot, kind])
            index[slot, kind] += 1
            if kind:
                regions.append((number, row[2 * slot + 1], plan.regions[kind]))
        facts += row
    regions.append((None, None, plan.regions["end"]))
    chunks, at = [], 0
    for _, _, region in regions:
        for c in region.chunks:
            chunks += [at, c.rows]
            at += c.rows
    return Short(tuple(regions), chunks, facts, at)


def whole(plan: Plan) -> Short:
    """The real schedule, in the same form."""
    regions: list = [(None, None, plan.regions["begin"])]
    for n, (pair, indices) in enumerate(zip(plan.graph.layers, plan.graph.kind_index())):
        regions += [(n, index, plan.regions[kind]) for kind, index in zip(pair, indices) if kind]
    regions.append((None, None, plan.regions["end"]))
    return Short(tuple(regions), plan.chunk_table().tolist(), plan.fact_table().tolist(), plan.tape_rows)
