"""What a step touches that its `reads` and `writes` do not say: the slot, the row, the batch, and the tables that it fills.

Slots are stated here once more, independent of the copies that fill them: the library templates index the buffers so.
"""
from __future__ import annotations

import re
from dataclasses import dataclass

from mkgen.check.refs import Box, Ref
from mkgen.plan.regions import Step
from mkgen.plan.tape import LANES, Matrix

TAPE_TEXT = re.compile(r"\b(tape_rows|panels|columns)\(m, g, (\d+), (\d+)(?:, (\d+))?\)")


@dataclass(frozen=True)
class Touch:
    """The scopes that a step works in: for each `var` in `over`, with `bind` on top. data: where what it reads must be valid."""
    var: str | None = None
    over: str = ""
    bind: tuple[tuple[str, str], ...] = ()
    data: str | None = None


TOUCHES = {                              # (template, macro): all others work in the scope that they stand in
    ("attention", "append"): Touch(bind=(("row", "kv_item(m, i)[0]"),)),
    ("attention", "attend"): Touch("i", "range(batch * KV_BATCH, (batch + 1) * KV_BATCH)", data="i < m.kv_count[0]"),
    ("ends", "embed"): Touch("row", "range(m.rows)", data="embed_here(m, row)"),
}
BINDS = {("attention", "item"): ("i", "batch * KV_BATCH + j")}       # names that a step leaves to the nodes behind it
SLOTS = (("ring", "g"), ("expert_slot", "i"), ("_tiles", "i"))       # buffer or suffix: slot = this name mod the slots
SCRATCH = {("experts", "expert"): ("expert_gate_up", "expert_h")}    # what a step makes for itself
PLAIN = Touch()


def box_of(ref: Ref, name: str, symbolic: tuple, scope: dict) -> Box:
    """The part of a buffer that a step touches in `scope`. symbolic: the buffer's shape with 'rows' in it."""
    box = ref.whole.box
    for known, var in SLOTS:
        if (name == known or known[0] == "_" and name.endswith(known)) and var in scope:
            slot = scope[var] % ref.dims[0]
            return ((slot, slot + 1), *box[1:])
    if "row" in scope and symbolic and symbolic[0] == "rows":
        return ((scope["row"], scope["row"] + 1), *box[1:])
    return box


def tape_reads(step: Step) -> list[tuple[str | None, int, int, int | None]]:
    """(name, row, rows, block) of each piece of the chunk that a step reads; name None: any; block counts from the loop's first."""
    out: list[tuple[str | None, int, int, int | None]] = []
    for text in (a for a in step.args.values() if isinstance(a, str)):
        for kind, at, a, b in TAPE_TEXT.findall(text):
            out.append((None, int(at), int(a) if kind == "tape_rows" else int(a) * int(b or 0) // (2 * LANES), None))
    m = step.args.get("matrix")
    if isinstance(m, Matrix):
        out.append((m.name, int(step.args.get("at", 0)), m.block_rows, step.args.get("first")))
    return out
