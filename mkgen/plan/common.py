"""What every sub-layer shares: the ring and its copy, the tables, the exchange buffers."""
from __future__ import annotations

from mkgen.plan.memory import Memory, ROWS_PADDED
from mkgen.plan.regions import Buffer, Transfer
from mkgen.plan.section import DEPTH
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
    if not memory.inboxes:
        return
    for stage, (words, apart) in memory.inboxes.items():
        size, _, _ = memory.mesh.groups[stage]
        add(Buffer(f"inbox_{stage}", (2, size, "rows", words), "u32", "vmem", "by half, member; peers write here", True))
        if apart:
            add(Buffer(f"outbox_{stage}", (size, "rows", apart), "u32", "vmem", "words that differ by peer, on their way out"))
    add(Buffer("phase", (len(memory.inboxes),), "i32", "smem", "uses of each stage so far"))
    add(Buffer("sent", (), "dma", "dma_sem", "messages on their way out"))
    add(Buffer("arrived", (2, len(memory.inboxes)), "dma", "dma_sem", "messages that came in: half, stage"))
