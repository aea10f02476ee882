"""What may change in a `build:`: one dimension a knob, with the values that are worth a trial, taken from the spec and its plan.

A dimension says nothing about what is good. Numerics stay as the spec has them: weight formats are no dimension, and activations and
what travels on the wire only where the user allows it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from mkgen.plan.by_rows import shareable
from mkgen.plan.exchange import ROWS
from mkgen.plan.plan import Plan
from mkgen.plan.section import LANES
from mkgen.spec.checks_build import GATHERED, neighbours
from mkgen.spec.model import Build, Mla, Model, Moe

NUMERICS = {"activations": ("bf16", "f32"), "wire": ("f32", "bf16")}        # knobs that change what is computed: only if allowed by name
NOT_SEARCHED = {                         # what a schedule could vary and no key of a build says
    "loop nest against unrolling": "of the loop over the layers there is one; those over a matrix's blocks are unrolled as far as build.unroll says",
    "points of the ring's top-ups": "a slot is filled again as soon as it has been read, or behind a layer's experts: build.late_refills",
}
DEPTHS = (0.5, 0.75, 0.875, 1.125, 1.25, 1.5, 2)     # times the spec's own
SIZES = (0.25, 0.5, 0.75, 1.5, 2)                    # likewise, of blocks and pieces
UNROLL = (1, 2, 4, 8)
SLOTS = (2, 3, 4, 5, 6, 8, 12, 16)
BATCHES = (1, 2, 4, 8)
FIRST = (1, 2, 3, 4, 6, 8)
BATCH_COLUMNS = 256                      # of experts narrower than a panel, so many together are worth a basic block: the width of the MXU
TILES = (64, 128, 256, 512, 1024)
KV_SLOTS = (4, 8, 16, 20, 32, 40)
KV_BATCHES = (2, 4, 8, 10, 16)


@dataclass(frozen=True)
class Dimension:
    """One knob. keys: of the build that it writes; of: build -> value; to: (build, value) -> build; values: those to try."""
    name: str
    keys: tuple[str, ...]
    values: tuple[Any, ...]
    of: Callable[[Build], Any]
    to: Callable[[Build, Any], Build]
    text: Callable[[Any], str] = str

    def neighbours(self, build: Build) -> list[tuple[Any, Build]]:
        """(value, the build with it), for each other value."""
        own = self.of(build)
        return [(value, self.to(build, value)) for value in self.values if value != own]


def dimensions(model: Model, build: Build, plan: Plan, rows: tuple[int, ...], allow: tuple[str, ...] = ()) -> list[Dimension]:
    """Of a spec's own build and plan, those that cost nothing to try and those that move most first. rows: what the search is for."""
    moe = any(isinstance(f, Moe) for f in model.ffns.values())
    cached = any(op.kind == "attention" or s.positional for sub in plan.graph.sublayers() for op in sub.ops for s in op.states())
    out = [variants(build, rows), number("ring_depth", build, {max(2, round(build.ring_depth * times)) for times in DEPTHS})]
    together = moe and in_batches(plan)
    out += [number("expert_slots", build, SLOTS), number("first_experts", build, FIRST), late_refills(build), choice("lone_experts", (True, False))] * moe
    out += [batches(build)] * together
    out += [split(build, min(image.whole_width for image in plan.experts) if together else 0)] * (moe and build.ranks > 1)
    out += [*exchanges(plan), *families(model, neighbours(build.mesh))] * (build.ranks > 1)
    out += [blocks(build), number("unroll", build, UNROLL)]
    out += [number("expert_kib", build, scaled(build.expert_kib))] * moe
    out += [number("kv_tile", build, (n for n in TILES if build.context % n == 0)), number("kv_slots", build, KV_SLOTS)] * cached
    out += [tiles(build)] * cached
    out += [choice("mla_cache", ("latent", "expanded"))] * any(isinstance(m, Mla) for m in model.mixers.values())
    out += [choice(key, values) for key, values in NUMERICS.items() if key in allow]
    return [d for d in out if len({*d.values, d.of(build)}) > 1]


# -- plain keys ---------------------------------------------------------------------------------------------------------

def number(key: str, build: Build, values) -> Dimension:
    return choice(key, tuple(sorted({*values, getattr(build, key)})))


def late_refills(build: Build) -> Dimension:
    """Refills that wait for a layer's experts: as the plan has it, or eighths of the ring."""
    return number("late_refills", build, {*(build.ring_depth * n // 8 for n in range(8)), build.ring_depth - 1})


def scaled(kib: int) -> set[int]:
    """Sizes around a size, whole tiles of the tape's rows."""
    return {max(4, round(kib * times) // 4 * 4) for times in SIZES}


def choice(key: str, values: tuple) -> Dimension:
    return Dimension(key, (key,), values, lambda build: getattr(build, key), lambda build, value: replace(build, **{key: value}))


def variants(build: Build, rows: tuple[int, ...]) -> Dimension:
    """A module for the rows that are asked about alone, or one for all that the spec has: exchanges are chosen for all of them."""
    values = tuple(dict.fromkeys(v for v in (build.rows, rows) if set(rows) <= set(v)))
    return replace(choice("rows", values), text=lambda v: "[" + ", ".join(map(str, v)) + "]")


def blocks(build: Build) -> Dimension:
    """The largest block, with a ring that keeps its bytes."""
    def to(b: Build, kib: int) -> Build:
        return replace(b, block_kib=kib, ring_depth=max(2, b.ring_depth * b.block_kib // kib))

    return Dimension("block_kib", ("block_kib", "ring_depth"), tuple(sorted({*scaled(build.block_kib), build.block_kib})), lambda b: b.block_kib, to)


# -- who holds what -----------------------------------------------------------------------------------------------------

def split(build: Build, width: int = 0) -> Dimension:
    """How many groups hold different experts, how many ranks share each, and how many are multiplied together.

    width: of the narrowest experts that may be; 0: one by one. A share below a panel is slow by itself, and its copy short: it is also
    tried in batches, with as many bytes of slots as before."""
    def to(b: Build, v: tuple[int, int, int]) -> Build:
        groups, shares, batch = v
        slots = b.expert_slots if batch == b.expert_batch else min(SLOTS[-1], max(2, 2 * batch * (batch > 1), b.expert_slots * shares // b.tensor_parallel))
        return replace(b, expert_parallel=groups, tensor_parallel=shares, expert_batch=batch, expert_slots=slots)

    pairs = [(n, build.ranks // n) for n in range(1, build.ranks + 1) if build.ranks % n == 0]
    values = dict.fromkeys((*pair, batch) for pair in pairs for batch in (build.expert_batch, enough(width, pair[1]) if width else build.expert_batch))
    return Dimension("expert split", ("expert_parallel", "tensor_parallel", "expert_batch", "expert_slots"), tuple(values),
                     lambda b: (b.expert_parallel, b.tensor_parallel, b.expert_batch), to,
                     lambda v: f"{v[0]} x {v[1]}" + f", {v[2]} multiplied together" * (v[2] > 1))


def enough(width: int, shares: int) -> int:
    """Experts of a batch that make BATCH_COLUMNS of such shares; 1 where a share is a panel."""
    share = -(-width // shares)
    return 1 if share >= LANES else next(n for n in BATCHES if n * share >= BATCH_COLUMNS or n == BATCHES[-1])


def in_batches(plan: Plan) -> bool:
    """May its experts be multiplied together? What is cut into pieces may be whole in another build."""
    images = {image.kind: replace(image, pieces=1) for image in plan.experts}
    return not any(op.alone(images[sub.name]) for sub in plan.graph.sublayers() for op in sub.ops if op.kind == "routed_experts")


def batches(build: Build) -> Dimension:
    """Experts that are multiplied together, with slots for as many that come meanwhile."""
    def to(b: Build, n: int) -> Build:
        return replace(b, expert_batch=n, expert_slots=max(b.expert_slots, 2 * n) if n > 1 else b.expert_slots)

    return Dimension("expert_batch", ("expert_batch", "expert_slots"), tuple(sorted({*BATCHES, build.expert_batch})), lambda b: b.expert_batch, to)


def tiles(build: Build) -> Dimension:
    """Cache tiles that are computed together, with slots for as many that come meanwhile."""
    def to(b: Build, n: int) -> Build:
        return replace(b, kv_batch=n, kv_slots=max(b.kv_slots, 2 * n))

    return Dimension("kv_batch", ("kv_batch", "kv_slots"), tuple(sorted({*KV_BATCHES, build.kv_batch})), lambda b: b.kv_batch, to)


CUT, WHOLE = "cut over all ranks", "whole"


def families(model: Model, groups: list[str]) -> list[Dimension]:
    """Each family of matrices that more ranks than one may hold: whole on every rank, cut over a group of neighbours, or over all."""
    kinds = {**model.mixers, **model.ffns}
    used = {name for run in model.schedule for name in (run.mixer, run.ffn)}
    able = [f"{name}.{part}" for name, kind in kinds.items() if name in used for part in GATHERED.get(type(kind), ())]
    return [held(family, groups) for family in able if family in model.checkpoint]


def held(family: str, groups: list[str]) -> Dimension:
    def of(build: Build) -> str:
        return WHOLE if family in build.replicate else build.over.get(family, CUT)

    def to(build: Build, how: str) -> Build:
        others = tuple(f for f in build.replicate if f != family)
        over = {f: group for f, group in build.over.items() if f != family} | ({family: how} if how in groups else {})
        return replace(build, replicate=(*others, family) if how == WHOLE else others, over=over)

    return Dimension(f"hold {family}", ("replicate", "over"), (CUT, *groups, WHOLE), of, to,
                     lambda how: f"cut over {how}" if how in groups else how)


# -- exchanges ----------------------------------------------------------------------------------------------------------

def exchanges(plan: Plan) -> list[Dimension]:
    """The way of all gathers and of all scatters, what sums are added to, and each sum by itself, those that are made most often first."""
    paths = tuple(" ".join(path) for path in plan.mesh.paths)
    runs: dict[str, int] = {}
    for _, region in plan.sequence():
        runs[region.name] = runs.get(region.name, 0) + 1
    names = sorted((name for name, _ in plan.ways), key=lambda name: -runs.get(name.partition(".")[0], 1))
    ways = ("auto", "scatter", *paths)
    all_alike = [choice("add", ("auto", "runs", "whole")), *(choice(key, ("auto", *paths)) for key in ("gather", "scatter"))]
    by_rows = {name for sub in plan.graph.sublayers() for name in shareable(sub, plan.spec.build)}
    return all_alike + [summed(name, (*ways, *(f"{ROWS} {path}" for path in paths)) if name in by_rows else ways) for name in names]


def summed(name: str, ways: tuple[str, ...]) -> Dimension:
    """The way of one sum; what `rest` would say anyway is not written."""
    def rest(build: Build) -> str:
        return build.reduce.get("rest", "auto")

    def to(build: Build, way: str) -> Build:
        others = {n: w for n, w in build.reduce.items() if n != name}
        return replace(build, reduce=others if way == rest(build) else {**others, name: way})

    return Dimension(f"reduce {name}", ("reduce",), ways, lambda build: build.reduce.get(name, rest(build)), to)
