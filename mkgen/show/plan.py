"""A plan for a person: what lies where, what moves in a step, in which order, and what that costs at the least."""
from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from mkgen import show
from mkgen.plan.figures import Bytes, embedded, entries, families, routed, side_by_side
from mkgen.plan.padding import paddings
from mkgen.plan.plan import Plan
from mkgen.show.nest import collectives, nest

KEYS = ("padding_fraction", "replicated_bytes", "streamed_bytes_per_step", "planned_vmem_bytes", "bytes_per_core")


def plan(made: Plan, figures: dict[int, dict], findings: list, as_json: bool) -> None:
    """figures: rows -> the figures of that variant. findings: what the checker says, nothing if the plan is legal."""
    word = show.verdict(not findings)
    if as_json:
        show.put_json(as_dict(figures, word))
        return
    out, build = show.console(), made.spec.build
    factors = " x ".join(f"{name} {size}" for name, size in build.mesh.items())
    cores = show.several(made.mesh.ranks, "core")
    out.print(f"{made.spec.model.name} on {made.target.name}: {cores} ({factors}), context {build.context}")
    for section in (totals(made, figures, word), vmem_map(made), hbm(made), tape(made), streamed(made)):
        out.print()
        out.print(section)
    padded(out, made)
    out.print()
    nest(out, made)
    exchanges(out, made)
    choices(out, made)
    for finding in findings:
        out.print(f"finding: {finding}")
    out.print("verdict:", show.coloured(word))


def as_dict(figures: dict[int, dict], word: str) -> dict[str, Any]:
    """The figures of the first variant, and of each under `variants` by its rows."""
    each = {rows: {**{key: f[key] for key in KEYS}, "verdict": word} for rows, f in figures.items()}
    return {**next(iter(each.values())), "variants": {str(rows): f for rows, f in each.items()}}


def bytes_of(variants: Iterable[int]) -> list[str]:
    """Column names, one a row variant."""
    return [f">bytes, {show.several(rows, 'row')}" for rows in variants]


def totals(made: Plan, figures: dict[int, dict], word: str):
    """One column a row variant."""
    t = show.table("Figures, of one core", "", *(f">{show.several(rows, 'row')}" for rows in figures))
    budget = made.target.vmem_usable_bytes - made.spec.build.spill_kib * 1024
    rate = made.target.hbm_bytes_per_s
    lines = {
        "verdict of the checker": lambda f: show.coloured(word),
        "bytes streamed a step": lambda f: show.number(f["streamed_bytes_per_step"]),
        "padding, % of the true bytes": lambda f: f"{100 * f['padding_fraction']:.2f}",
        "replicated bytes among the true": lambda f: show.number(f["replicated_bytes"]),
        f"floor: weights at {rate / 1e12:.2f} TB/s, us": lambda f: f"{f['floor_seconds'] * 1e6:,.1f}",
        "VMEM planned": lambda f: show.number(f["planned_vmem_bytes"]),
        f"VMEM left of {show.mib(budget)} MiB, MiB": lambda f: show.mib(budget - f["planned_vmem_bytes"]),
        "HBM held": lambda f: show.number(f["bytes_per_core"]),
    }
    for name, cell in lines.items():
        t.add_row(name, *(cell(f) for f in figures.values()))
    return t


def vmem_map(made: Plan):
    """Buffers by size, in tile-padded bytes, then the sum, the reserve and what the chip gives."""
    variants = made.spec.build.rows
    t = show.table("VMEM map", "buffer", "type", *bytes_of(variants), "purpose")
    sizes = {rows: made.vmem(rows) for rows in variants}
    for name in sorted(sizes[variants[0]], key=lambda n: (-max(s[n] for s in sizes.values()), n)):
        b = made.buffers[name]
        shape = ", ".join(map(str, b.shape))
        t.add_row(name, f"{b.dtype} [{shape}]", *(show.number(s[name]) for s in sizes.values()),
                  b.purpose)
    spill, usable = made.spec.build.spill_kib * 1024, made.target.vmem_usable_bytes
    t.add_section()
    t.add_row("total", "", *(show.number(sum(s.values())) for s in sizes.values()), "")
    t.add_row("budget", "", *(show.number(usable - spill) for _ in variants),
              f"{usable:,} usable, less {spill:,} for spills")
    return t


def hbm(made: Plan):
    """What stays in a core's HBM."""
    variants = made.spec.build.rows
    t = show.table("HBM held by a core", "what", *bytes_of(variants), "")
    slots = f"{show.several(made.ring_depth, 'slot')} of {made.slot_rows * 512:,} bytes"
    fixed = [("tape", made.tape_rows * 512, f"{show.several(made.chunks, 'chunk')} through {slots}")]
    for image in made.experts:
        each = f"{image.local_experts} in {image.format}, {image.expert_bytes:,} bytes each" + (f", in {image.pieces} pieces" if image.pieces > 1 else "")
        fixed.append((image.name, image.bytes, f"{show.several(image.layers, 'layer')} of {each}{side_by_side(image)}"))
    fixed.append(("embedding", made.embed_rows * 512, "this core's part of the vocabulary"))
    for name, size, note in fixed:
        t.add_row(name, *(show.number(size) for _ in variants), note)
    t.add_row("states", *(show.number(made.state_bytes(rows)) for rows in variants), ", ".join(made.states.values()))
    t.add_section()
    t.add_row("total", *(show.number(made.bytes_per_core(rows)) for rows in variants),
              f"of {made.target.hbm_bytes:,.0f}")
    return t


def tape(made: Plan):
    """Each family of the tape over a whole step: true bytes, stored bytes, and what is stored in vain."""
    t = show.table("Tape, bytes a step", "matrix or vectors", "shape on a core", "stored as", ">layers",
                   ">true", ">stored", ">waste", ">%")
    uses, rest, named = entries(made), Bytes(), families(made)
    for name, b in sorted(named.items(), key=lambda item: -item[1].copied):
        m = made.matrices.get(name)
        if m is None or uses[name][0][0].block is None:
            rest += b
            continue
        layers = sum(n for entry, n in uses[name] if entry.block in (None, 0))
        blocks = f"{show.several(m.blocks, 'block')} [{m.block_k}, {m.block_n}], {m.layout}"
        t.add_row(name, f"[{m.k}, {m.n}]" + " whole" * m.whole, blocks, str(layers), *waste(b))
    t.add_row("vectors", "", "rows of 128 lanes", "", *waste(rest))
    t.add_section()
    t.add_row("total", "", "", "", *waste(sum(named.values(), Bytes())))
    return t


def waste(b: Bytes) -> tuple[str, str, str, str]:
    lost = b.copied - b.true
    return show.number(b.true), show.number(b.copied), show.number(lost), show.percent(lost, b.true)


def padded(out: Console, made: Plan) -> None:
    """Shares that are not full, by family; nothing where all of them are."""
    found = paddings(made)
    if not found:
        return
    t = show.table(f"Padding of shares that do not divide, {show.several(made.mesh.ranks, 'core')} together", "family", "what",
                   ">true units", ">room for", ">bytes of padding", ">% of what is held")
    for name, p in sorted(found.items(), key=lambda item: -item[1].bytes):
        t.add_row(name, p.what, show.number(p.units), show.number(p.room), show.number(p.bytes), show.percent(p.bytes, p.held))
    out.print()
    out.print(t)


def streamed(made: Plan):
    """Where the bytes that a step copies come from."""
    variants = made.spec.build.rows
    t = show.table("Copied from HBM by a core in a step", "what", *bytes_of(variants), "")
    tape_bytes = sum(families(made).values(), Bytes())
    parts = [("tape", lambda rows: tape_bytes, "each weight once, whatever the rows")]
    if made.experts:
        parts.append(("routed experts", lambda rows: routed(made, rows), "expected number of distinct ones"))
    parts.append(("embedding rows", lambda rows: embedded(made, rows), "the mean over the cores"))
    for name, part, note in parts:
        t.add_row(name, *(show.number(part(rows).copied) for rows in variants), note)
    t.add_section()
    t.add_row("total", *(show.number(sum(part(rows).copied for _, part, _ in parts)) for rows in variants),
              "caches and states come on top")
    return t


def exchanges(out: Console, made: Plan) -> None:
    """Collectives of each sub-layer, by kind and group of ranks; nothing where there is one core."""
    found = collectives(made)
    if not found:
        return
    t = show.table("Collectives", "sub-layer", ">layers", "kind", "ranks", ">a layer", ">a step",
                   ">bytes of a message, a row")
    sizes = {name: size for name, size, _ in made.stages}
    for (region, kind, factor, size), (count, layers) in found.items():
        t.add_row(region, str(layers), kind, f"{factor} ({sizes[factor]})", str(count), str(count * layers),
                  show.number(math.ceil(size / max(1, sizes[factor] - 1))))
    t.add_section()
    t.add_row("all", "", "", "", "", str(sum(count * layers for count, layers in found.values())), "")
    out.print()
    out.print(t)


def choices(out: Console, made: Plan) -> None:
    """Why the plan is as it is, one line a choice."""
    lines: Iterable[tuple[str, ...]] = made.why
    if not lines:
        return
    t = show.table("Choices", "what", "why")
    for line in lines:
        what, *why = line
        t.add_row(what, "; ".join(why))
    out.print()
    out.print(t)
    out.print()
