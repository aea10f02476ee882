"""The tape against the region tree: counts, sizes, and what lies in each chunk. No run is needed."""

from __future__ import annotations

from mkgen.check.findings import Report
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Advance, Branch, Collective, Loop, Node, Seq, Step, walk

ALIGN = 8  # u32 rows of a tile: copies start and end at one


def check_tape(plan: Plan, report: Report) -> None:
    for region in plan.regions.values():
        count = advances(region.body, region.name, report)
        if count != len(region.chunks):
            report.add("tape", region.name, f"advances {count} chunks", f"it has {len(region.chunks)} on the tape")
        check_chunks(plan, region, report)
        check_weights(plan, region, report)
        check_heads(region, report)
        check_loops(region.body, region.name, report, False)
    check_table(plan, report)


def advances(n: Node, where: str, report: Report) -> int:
    """Chunks that a node consumes, on every path."""
    if isinstance(n, Advance):
        return 1
    if isinstance(n, Seq):
        return sum(advances(x, where, report) for x in n.nodes)
    if isinstance(n, Branch):
        counts = [advances(case, where, report) for _, case in n.cases]
        if len(set(counts)) > 1:
            report.add("tape", f"{where}/branch", f"its cases advance {counts} chunks", "the same number on every path")
        return counts[0] if counts else 0
    if isinstance(n, Loop):
        inside = sum(advances(x, where, report) for x in n.body)
        if inside and not n.trips.isdigit():
            report.add(
                "tape",
                f"{where}/{n.name}",
                f"{n.trips} trips that advance {inside}",
                "a loop that advances has a literal trip count",
            )
            return 0
        return inside * int(n.trips) if inside else 0
    return 0


def check_loops(n: Node, where: str, report: Report, varies: bool) -> None:
    """Data-dependent loops have a bound, and no exchange in them: every rank makes the same sequence."""
    if isinstance(n, Seq):
        for x in n.nodes:
            check_loops(x, where, report, varies)
    elif isinstance(n, Branch):
        for _, case in n.cases:
            check_loops(case, where, report, varies or "m.facts" not in n.selector)
    elif isinstance(n, Loop):
        own = "m." in n.trips.replace("m.rows", "")
        if own and n.bound is None:
            report.add("loop", f"{where}/{n.name}", f"{n.trips} trips", "a loop that depends on data has a bound")
        for x in n.body:
            check_loops(x, where, report, varies or own)
    elif isinstance(n, Collective) and varies:
        report.add(
            "exchange",
            f"{where}/{n.kind} {n.part}",
            "stands where ranks may differ",
            "every rank makes the same sequence of exchanges",
        )


def check_chunks(plan: Plan, region: Region, report: Report) -> None:
    """Entries lie one behind another; a vector is there once, a matrix with all its blocks in order."""
    blocks: dict[str, list[int | None]] = {}
    for k, chunk in enumerate(region.chunks):
        where, at = f"{region.name}/chunk {k}", 0
        for e in chunk.entries:
            blocks.setdefault(e.name, []).append(e.block)
            known = plan.vectors.get(e.name) if e.block is None else plan.matrices.get(e.name)
            rows = None if known is None else known.rows if e.block is None else known.block_rows
            if e.rows != rows:
                report.add("tape", where, f"{e.name} has {e.rows} rows", f"it takes {rows}")
            if e.row != at or e.row % ALIGN:
                report.add(
                    "tape",
                    where,
                    f"{e.name} lies at row {e.row}",
                    f"the entry before ends at {at}; entries are packed and aligned to {ALIGN}",
                )
            at = e.row + e.rows
        if not 0 < at <= plan.slot_rows or at % ALIGN:
            report.add("tape", where, f"has {at} rows", f"a slot takes {plan.slot_rows}, in multiples of {ALIGN}")
    for name, found in blocks.items():
        want = list(range(plan.matrices[name].blocks)) if name in plan.matrices else [None]
        if found != want:
            report.add(
                "tape", region.name, f"{name} lies there as blocks {found[:8]}", f"{len(want)} blocks in order, once"
            )


def check_weights(plan: Plan, region: Region, report: Report) -> None:
    """What lies on the tape for a region are weights of its own ops."""
    own = {w.name for sub in plan.graph.sublayers() if sub.name == region.name for op in sub.ops for w in op.weights()}
    for name in {e.name for c in region.chunks for e in c.entries}:
        m, v = plan.matrices.get(name), plan.vectors.get(name)
        weights = [p.weight for p in m.parts] if m else v.weights if v else ()
        foreign = [w for w in weights if w not in own]
        if foreign:
            report.add("tape", region.name, f"{name} holds {', '.join(foreign)}", "no op of the sub-layer has it")


def check_heads(region: Region, report: Report) -> None:
    """Blocks that are read head by head: each step takes the heads that its block holds, one block after another."""
    seen: dict[str, list[Step]] = {}
    for n in walk(region.body):
        if isinstance(n, Step) and {"matrix", "first", "begin", "end", "dim"} <= n.args.keys():
            seen.setdefault(n.args["matrix"].name, []).append(n)
    for name, steps in seen.items():
        m, dim = steps[0].args["matrix"], steps[0].args["dim"]
        heads, even = m.n // dim, steps[0].args["end"]
        for i, n in enumerate(steps):
            found = tuple(n.args[k] for k in ("first", "begin", "end"))
            want = (i, i * even, min((i + 1) * even, heads))
            if found != want or n.args["end"] * dim - n.args["begin"] * dim > m.block_n:
                report.add(
                    "tape",
                    f"{region.name}/{n.op}",
                    f"block {found[0]} of {name} as heads {found[1]} to {found[2]}",
                    f"step {i} of it is block {want[0]}, heads {want[1]} to {want[2]}",
                )
        if steps[-1].args["end"] != heads or len(steps) != m.blocks:
            report.add(
                "tape",
                f"{region.name}/{steps[-1].op}",
                f"{name} ends with head {steps[-1].args['end']}",
                f"it has {heads} in {m.blocks} blocks",
            )


def check_table(plan: Plan, report: Report) -> None:
    """The chunk table covers the tape from its first row to its last, in order."""
    table = plan.chunk_table()
    first, rows = table[0::2].astype("int64"), table[1::2].astype("int64")
    if len(first) != plan.chunks or plan.chunks < plan.ring_depth:
        report.add(
            "tape", "chunk table", f"{len(first)} chunks", f"the sequence has {plan.chunks}, the ring {plan.ring_depth}"
        )
    elif plan.chunks and (
        first[0] != 0 or (first[1:] != (first + rows)[:-1]).any() or int(first[-1] + rows[-1]) != plan.tape_rows
    ):
        report.add(
            "tape", "chunk table", "chunks do not follow one another", f"they cover {plan.tape_rows} rows exactly"
        )
    if plan.tape_rows >= 2**31:
        report.add("tape", "chunk table", f"{plan.tape_rows} rows", "row numbers are int32")
