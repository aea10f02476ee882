"""What a step touches that its `reads` and `writes` do not say: the slot, the row, the batch, the tables that it fills.

Slots and addresses are stated here once more, independent of the plan's transfers: the library templates index slots
so, and the tables mean these rows of HBM. A transfer that is wrong in its start and in its wait alike is found by that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mkgen.check.refs import Box, Ref
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Step
from mkgen.plan.tape import LANES, Matrix

TAPE_TEXT = re.compile(r"\b(tape_rows|vector|panels|columns)\(m, g, (\d+), (\d+)(?:, (\d+))?(?:, bf16)?\)")


@dataclass(frozen=True)
class Touch:
    """The scopes that a step works in: for each `var` in `over`, and `bind` on top. data: where it needs valid data. some: it has no
    step where there is nothing: what it reads beside its items is theirs."""

    var: str | None = None
    over: str = ""
    bind: tuple[tuple[str, str], ...] = ()
    data: str | None = None
    some: bool = False


TOUCHES = {  # (template, macro): all others work in the scope that they stand in
    ("attention", "attend"): Touch(
        "i", "range(batch * KV_BATCH, min((batch + 1) * KV_BATCH, kv.count[0]))", (("row", "kv_row(kv, i)"),), some=True
    ),
    ("experts", "batch"): Touch("i", "range(batch * EXPERT_BATCH, min((batch + 1) * EXPERT_BATCH, m.expert_count[0]))", some=True),
    ("attention", "words"): Touch("row", "active_rows(m)"),
    ("ends", "embed"): Touch("row", "range(m.rows)", data="embed_here(m, row)"),
}
RUN_EXPERTS = (("experts", "expert"), ("experts", "batch"))
SLOTS = (("ring", "g"), ("expert_slot", "i"), ("_tiles", "i"))  # buffer or suffix: slot = this name mod the slots
OWN = ("expert_x", "expert_up", "expert_h", "expert_out")  # of an expert; with the kind behind, where kinds differ
PLAIN = Touch()


def scratch(step: Step, name: str) -> bool:
    """Is it the step's own affair, made and read within it?"""
    if (step.template, step.macro) not in RUN_EXPERTS:
        return False
    return name.removesuffix("_sums") in {own + suffix for own in OWN for suffix in ("", step.args["image"].suffix)}


def box_of(ref: Ref, name: str, symbolic: tuple, scope: dict) -> Box:
    """The part of a buffer that a step touches in `scope`. symbolic: the buffer's shape with 'rows' in it."""
    box = ref.whole.box
    if "row" in scope and "rows" in symbolic:
        at = symbolic.index("rows")
        return (*box[:at], (scope["row"], scope["row"] + 1), *box[at + 1 :])
    for known, var in SLOTS:
        if (name == known or known[0] == "_" and name.endswith(known)) and var in scope:
            slot = scope[var] % ref.dims[0]
            return ((slot, slot + 1), *box[1:])
    return box


def origin_text(plan: Plan, buffer: str, source: str, shape: tuple) -> str:
    """The part of `source` (a state's shape: `shape`) that a step finds in `buffer`, as text over the step's scope."""
    if source == "tape":
        return "m.tape.at[pl.ds(m.chunks[2 * g], m.chunks[2 * g + 1])]"
    if image := next((image for image in plan.experts if image.name == source), None):
        return f"m.{source}.at[(index * {image.local_experts} + m.expert_ids[i // {image.pieces}]) * {image.pieces} + i % {image.pieces}]"
    if source == "embedding":
        return "m.embedding.at[pl.ds(vocab_index(m, row) * EMBED_WORDS, EMBED_WORDS)]"
    if buffer.endswith("_tiles"):
        return f"m.{source}.at[index, kv_row(kv, i), :, pl.ds(kv_item(kv.items, i)[1] * (KV_TILE // 2), KV_TILE // 2)]"
    return state_text(source, shape)


def home_text(buffer: str, target: str, shape: tuple) -> str:
    """The part of the state `target` that what a step makes in `buffer` is written back to."""
    if buffer.endswith("_word"):
        return f"m.{target}.at[index, row, :, pl.ds(m.positions[row] >> 1, 1)]"
    return state_text(target, shape)


def state_text(name: str, shape: tuple) -> str:
    return f"m.{name}.at[index, row]" if "rows" in shape else f"m.{name}.at[index]"


def tape_reads(step: Step) -> list[tuple[str, str | None, int, int, int | None]]:
    """(argument, name, row, rows, block) of each piece of the chunk that a step reads. No name: any; block: the loop's first."""
    out: list[tuple[str, str | None, int, int, int | None]] = []
    for arg, text in ((k, a) for k, a in step.args.items() if isinstance(a, str)):
        for kind, at, a, b in TAPE_TEXT.findall(text):
            rows = int(a) if kind in ("tape_rows", "vector") else int(a) * int(b or 0) // (2 * LANES)
            out.append((arg, None, int(at), rows, None))
    m = step.args.get("matrix")
    if isinstance(m, Matrix):
        first = (
            0 if step.macro == "block" else step.args.get("first")
        )  # of a loop over all blocks: its trip is the block
        out.append(("matrix", m.name, int(step.args.get("at", 0)), m.block_rows, first))
    return out


def accumulates(step: Step) -> str | None:
    """The buffer that a step adds to: someone has to clear it before."""
    m = step.args.get("matrix")
    if (
        step.macro == "block"
        and isinstance(m, Matrix)
        and m.k_blocks > 1
        or (step.template, step.macro) in RUN_EXPERTS
    ):
        return step.args["y"][2:]
    return None


def own_weights(op, arg: str) -> set[str]:
    """Weights that the argument of one of the op's steps may stand for: those in the op's field of that name, or any of its."""
    all_ = op.weights()
    for name in (arg, f"{arg}s", f"{arg}es"):
        found = getattr(op, name, None)
        given = [w for w in (found if isinstance(found, tuple) else (found,)) if w in all_]
        if given:
            return {w.name for w in given}
    return {w.name for w in all_}
