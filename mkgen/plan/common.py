"""What every sub-layer shares: the ring and its copy, the tables, the exchange buffers."""
from __future__ import annotations

from mkgen.plan.memory import Memory, ROWS_PADDED
from mkgen.plan.regions import Buffer, Transfer
from mkgen.plan.section import DEPTH
from mkgen.plan.shard import round_up
from mkgen.plan.tape import LANES


def declare_shared(memory: Memory) -> None:
    add = memory.declare
    add(Buffer("ring", (memory.ring_depth, memory.slot_rows, LANES), "u32", "vmem", "chunks of the tape, one a slot"))
    add(Buffer("ring_sem", (memory.ring_depth,), "dma", "dma_sem", "one a ring slot"))
    add(Buffer("position_column", (ROWS_PADDED, 1), "i32", "vmem", "positions as a column; padding rows are inactive"))
    memory.transfers["tape_copy"] = Transfer(
        "tape_copy", ("m", "g"), "m.tape.at[pl.ds(first, rows)]", "m.ring.at[slot, pl.ds(0, rows)]", "m.ring_sem.at[slot]",
        memory.slot_rows * LANES * 4, "Chunk g of the tape into its ring slot.",
        setup=("slot = lax.rem(g, RING_DEPTH)", "first = pl.multiple_of(m.chunks[2 * g], 8)", "rows = pl.multiple_of(m.chunks[2 * g + 1], 8)"),
        reads=("tape",), writes=("ring",))
    for name, (chunks, rows) in memory.left.items():
        sums = name == "spread_sums"
        add(Buffer(name, (chunks, rows, LANES if sums else DEPTH), "f32" if sums else "bf16", "vmem",
                   "sums of its groups, on every lane" if sums else "left operand, block-diagonal by groups"))
    stages = memory.mesh.stages
    if not stages:
        return
    reduce_words = max(round_up(memory.payload["reduce"], LANES), 2 * LANES)
    slots = sum(size for _, size, _ in stages)
    add(Buffer("inbox", (2, slots, "rows", reduce_words), "u32", "vmem", "by half, member; peers write here", True))
    if memory.payload["gather"]:
        gather_words = round_up(memory.payload["gather"], LANES)
        add(Buffer("gather", (2, memory.mesh.ranks, "rows", gather_words), "u32", "vmem", "by half, rank; peers write here", True))
    add(Buffer("phase", (len(stages) + 1,), "i32", "smem", "uses of each stage so far; gathers so far"))
    add(Buffer("sent", (), "dma", "dma_sem", "messages on their way out"))
    add(Buffer("arrived", (2, len(stages)), "dma", "dma_sem", "messages that came in: half, stage"))
