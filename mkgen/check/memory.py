"""What the chip holds: VMEM map, SMEM tables, semaphores."""

from __future__ import annotations

from mkgen.check.scenario import sights
from mkgen.check.findings import Report
from mkgen.plan.plan import Plan
from mkgen.check.exchange import named
from mkgen.plan.regions import Collective, Start, Step, Wait, walk

SMEM_ALIGN = 512  # assumed: a 1-D table in SMEM is padded to this
SMEM_KEPT = 2048  # measured with libtpu 0.0.52: a small kernel's largest table is 2 KiB short of SMEM
SEMAPHORES_KEPT = (
    64  # for what the compiler takes itself: the barrier, and more than in the small kernel of the target's number
)
OPERANDS = ("tokens", "positions", "chunks", "facts", "tape", "embedding")


def check_memory(plan: Plan, rows: int, report: Report) -> None:
    check_names(plan, report)
    check_vmem(plan, rows, report)
    check_smem(plan, rows, report)
    count = 0
    for b in plan.buffers.values():
        if b.space == "dma_sem":
            n = 1
            for d in b.dims(rows):
                n *= d
            count += n
    most = plan.target.dma_semaphores - SEMAPHORES_KEPT
    if count > most:
        report.add(
            "memory",
            f"semaphores, {rows} rows",
            f"{count} DMA semaphores",
            f"at most {most} ({plan.target.mark('dma_semaphores')})",
        )


def check_names(plan: Plan, report: Report) -> None:
    """Everything that a step, a copy or an exchange touches is declared."""
    known = {*plan.buffers, *OPERANDS, *(image.name for image in plan.experts)}
    for region in plan.regions.values():
        for n in walk(region.body):
            if isinstance(n, Step):
                names, where = {*n.reads, *n.writes}, n.op
            elif isinstance(n, Collective):
                names, where = {name for text in (*n.sources, *n.targets) for name in named(text)}, n.kind
            elif isinstance(n, (Start, Wait)):
                names, where = (set() if n.transfer in plan.transfers else {n.transfer}), n.transfer
            else:
                continue
            for name in names - known:
                report.add("memory", f"{region.name}/{where}", f"names {name}", "it is not declared")
    for t in plan.transfers.values():
        for name in {*t.reads, *t.writes} - known:
            report.add("memory", t.name, f"names {name}", "it is not declared")


def offsets(plan: Plan, rows: int, sizes: dict[str, int]) -> dict[str, int]:
    """The plan's own addresses (`vmem_offsets`: a dict or a function of rows), or else one behind another."""
    own = getattr(plan, "vmem_offsets", None)
    if own is not None:
        return own(rows) if callable(own) else own
    out, at = {}, 0
    for name, size in sizes.items():
        out[name] = at
        at += size
    return out


def check_vmem(plan: Plan, rows: int, report: Report) -> None:
    """Tile-padded buffers fit beside the spill reserve, and none shares a byte with another."""
    sizes = plan.vmem(rows)
    budget = plan.target.vmem_usable_bytes - plan.spec.build.spill_kib * 1024
    total = sum(sizes.values())
    if total > budget:
        name = max(sizes, key=sizes.get)
        report.add(
            "memory",
            f"VMEM, {rows} rows",
            f"{total:,} bytes, the largest buffer is {name} with {sizes[name]:,}",
            f"the budget is {budget:,} bytes",
        )
    for key, b in plan.buffers.items():
        if (
            b.name != key
            or b.space not in ("vmem", "out", "smem", "hbm", "dma_sem", "barrier")
            or any(d < 1 for d in b.dims(rows))
        ):
            report.add(
                "memory",
                key,
                f"{b.name} {b.shape} in {b.space}",
                "a buffer has its own name, a known space and no empty dimension",
            )
    placed = sorted((at, at + sizes.get(name, 0), name) for name, at in offsets(plan, rows, sizes).items())
    for (_, end, left), (at, _, right) in zip(placed, placed[1:]):
        if at < end:
            report.add(
                "memory",
                f"VMEM, {rows} rows",
                f"{right} at {at:,} begins before {left} ends at {end:,}",
                "two buffers share bytes",
            )
    missing = sizes.keys() - {name for _, _, name in placed}
    if missing:
        report.add("memory", f"VMEM, {rows} rows", f"{', '.join(sorted(missing))}", "has no address")
    if placed and placed[-1][1] > plan.target.vmem_bytes:
        report.add(
            "memory",
            f"VMEM, {rows} rows",
            f"{placed[-1][2]} ends at {placed[-1][1]:,}",
            f"the chip has {plan.target.vmem_bytes:,} bytes",
        )


def check_smem(plan: Plan, rows: int, report: Report) -> None:
    """Tables are flat and fit together."""
    words = {
        "tokens": rows,
        "positions": rows,
        "chunks": 2 * plan.chunks,
        "facts": len(plan.graph.layers) * len(plan.fact_names),
    }
    for b in plan.buffers.values():
        if b.space == "smem":
            if len(b.shape) != 1 or b.dtype != "i32":
                report.add(
                    "memory",
                    f"SMEM, {b.name}",
                    f"{b.dtype} {b.shape}",
                    "a table in SMEM has one dimension of 32-bit words: more are padded to tiles",
                )
            n = 1
            for d in b.dims(rows):
                n *= d
            words[b.name] = n
    tile = plan.spec.build.kv_tile
    for sight in set(sights(plan).values()):
        items, (name, _) = rows * sight.most_tiles(plan.spec.build.context, tile), sight.tables
        if words.get(name, items) < items:
            report.add(
                "memory",
                f"SMEM, {name}, {rows} rows",
                f"{words[name]} entries",
                f"rows that see the most list {items}",
            )
    total = sum(-(-4 * n // SMEM_ALIGN) * SMEM_ALIGN for n in words.values())
    if total > plan.target.smem_bytes - SMEM_KEPT:
        name = max(words, key=words.get)
        report.add(
            "memory",
            f"SMEM, {rows} rows",
            f"{total:,} bytes, most of it {name}",
            f"the chip has {plan.target.smem_bytes:,} bytes, {SMEM_KEPT:,} of them the compiler's",
        )
