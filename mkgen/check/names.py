"""What the plan's source text has in scope, on plain ints: the generated kernel's constants and helpers, a little jax.

The helpers repeat the library templates' (attention, basics) on purpose: the checker is a second reading of the kernel.
"""

from __future__ import annotations

from types import SimpleNamespace

from mkgen.check.refs import BadExpression, Run
from mkgen.plan.plan import Plan


def div(a: int, b: int) -> int:
    """Rounds towards zero, as lax.div does."""
    q = abs(a) // abs(b)
    return q if (a < 0) == (b < 0) else -q


def rem(a: int, b: int) -> int:
    return a - b * div(a, b)


def multiple_of(x: int, n: int) -> int:
    if x % n:
        raise BadExpression(f"{x} is promised to be a multiple of {n}")
    return x


def constants(plan: Plan) -> dict[str, int]:
    """Module-level constants of the generated kernel that control text may name."""
    build, model = plan.spec.build, plan.spec.model
    out = {
        "LANES": 128,
        "ROWS_PADDED": 8,
        "RING_DEPTH": plan.ring_depth,
        "FACTS": len(plan.fact_names),
        "EMBED_WORDS": -(-model.hidden // 256),
        "VOCAB_RUN": -(-model.vocab // plan.mesh.ranks),
        "KV_TILE": build.kv_tile,
        "KV_SLOTS": build.kv_slots,
        "KV_BATCH": max(1, min(build.kv_batch, build.kv_slots // 2, max(build.rows) * (build.context // build.kv_tile))),
        "EXPERT_SLOTS": build.expert_slots,
        "EXPERT_BATCH": build.expert_batch,
        "FIRST_EXPERTS": build.experts_at_once,
        "EXPERTS_AHEAD": build.experts_ahead,
    }
    out |= {f"LOCAL_EXPERTS{image.suffix.upper()}": image.local_experts for image in plan.experts}
    out |= {f"PIECES{image.suffix.upper()}": image.pieces for image in plan.experts}
    return out | {name.upper(): i for i, name in enumerate(plan.fact_names)}


def namespace(plan: Plan, here: SimpleNamespace) -> dict:
    """Globals for the plan's source text. `here`: the rank that runs it, and how many layers there are, read at every use."""
    known = constants(plan)
    run = known["VOCAB_RUN"]

    def kv_item(items, i):
        item = items[i]
        return item >> 16, item & 0xFFFF

    def vocab_index(m, row):
        return m.tokens[row] - here.rank * run

    def embed_here(m, row):
        return m.positions[row] >= 0 and 0 <= vocab_index(m, row) < run

    def comes_next(m, layer, kind):
        return layer + 1 < here.layers and m.facts[(layer + 1) * known["FACTS"] + known["MIXER"]] == kind

    return known | {
        "lax": SimpleNamespace(div=div, rem=rem, axis_index=lambda _: here.rank, min=min, max=max),
        "jnp": SimpleNamespace(
            minimum=min,
            maximum=max,
            where=lambda c, a, b: a if c else b,
            clip=lambda x, a, b: min(max(x, a), b),
            logical_not=lambda x: not x,
            logical_and=lambda a, b: a and b,
            logical_or=lambda a, b: a or b,
        ),
        "pl": SimpleNamespace(ds=Run, multiple_of=multiple_of),
        "comes_next": comes_next,
        "kv_item": kv_item,
        "active_rows": lambda m: [row for row in range(m.rows) if m.positions[row] >= 0],
        "vocab_index": vocab_index,
        "embed_here": embed_here,
        "kv_row": lambda kv, i: kv_item(kv.items, i)[0],
        "slice": slice,
        "min": min,
        "max": max,
        "range": range,
        "__builtins__": {},
    }
