"""Cycles of each piece of a generated kernel, from the TPU compiler's static schedule; no TPU is needed.

`profile_plan(plan, rows)` cuts the plan's regions into pieces (`pieces`), has those that the cache does not know compiled one by one in
a subprocess (`compiling`), and replays their listings (`listing`, `scoreboard`).
"""
from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import version

from mkgen.emit.printer import Printer
from mkgen.emit.render import kernel_environment, kernel_text
from mkgen.plan.plan import Plan
from mkgen.profile import cache
from mkgen.profile.compiling import Asked, Job, measure
from mkgen.profile.pieces import SCALARS, Item, Piece, complete, cut_plan
from mkgen.profile.pytext import Definitions
from mkgen.profile.scoreboard import Cycles

RING, SLOTS = 5, 3                       # the depth of ring and expert slots in a piece: no power of two; code does not depend on more
HBM_ROWS, TABLE = 1 << 20, 1024          # leading sizes of HBM operands and tables: likewise
PROLOGUE = "prologue"
UNTIL = "with the cycles until its last wait"      # in the key of what finishes an exchange: files without them are of before
BEGINS = "loops from where they begin"             # likewise, of what has a loop that does not begin at 0
LAUNCH = "begin("                        # the statement of decode_kernel where the first region begins


@dataclass(frozen=True)
class Profile:
    """Of one rows variant. items: the cut tree of each region; prologue: pieces in front of the first region."""
    rows: int
    items: dict[str, tuple[Item, ...]]
    prologue: tuple[Piece, ...]
    pieces: tuple[Piece, ...]
    cycles: dict[int, Cycles]            # by id of the piece
    new: int                             # pieces that had to be compiled

    def of(self, piece: Piece) -> Cycles:
        return self.cycles[id(piece)]


@dataclass(frozen=True)
class Questions:
    """What has to be known of a plan and rows variant, and for what: a profile without its cycles."""
    job: Job
    asked: list[Asked]
    items: dict[str, tuple[Item, ...]]
    prologue: tuple[Piece, ...]
    pieces: tuple[Piece, ...]
    new: int

    def profile(self, found: dict[str, Cycles]) -> Profile:
        """found: what `measure` says of `job` and `asked`."""
        cycles = {id(p): found[a.key] for p, a in zip(self.pieces, self.asked)}
        return Profile(self.job.rows, self.items, self.prologue, self.pieces, cycles, self.new)


def profile_plan(plan: Plan, rows: int) -> Profile:
    """Raises `NotProfiled` if the compiler refuses a piece."""
    asked = questions(plan, rows)
    return asked.profile(measure(asked.job, asked.asked))


def questions(plan: Plan, rows: int) -> Questions:
    small = canonical(plan)
    source = kernel_text(small)
    kernel = Definitions(source)
    items, pieces = cut_plan(Printer(kernel_environment(small), small), small, kernel)
    prologue = before_regions(kernel)
    every = [*prologue, *pieces]
    places = all_places(small, rows)
    topology, _ = plan.target.topology(plan.mesh.ranks)
    job = Job(source, rows, plan.mesh.ranks, topology, plan.target.vmem_bytes, places)
    asked = [ask(p, kernel, job, plan.target.name) for p in every]
    unknown = {a.key for a in asked if cache.load(a.key) is None}
    return Questions(job, asked, items, tuple(prologue), tuple(every), len(unknown))


def canonical(plan: Plan) -> Plan:
    """The plan with a ring and expert slots of a fixed depth, so that a piece is the same piece whatever the depth is."""
    depth = {"ring": RING, "ring_sem": RING, "expert_slot": SLOTS, "expert_sem": SLOTS}
    buffers = {n: replace(b, shape=(depth[n], *b.shape[1:])) if n in depth else b for n, b in plan.buffers.items()}
    build = replace(plan.spec.build, expert_slots=SLOTS, ring_depth=RING)
    return replace(plan, spec=replace(plan.spec, build=build), buffers=buffers, ring_depth=RING)


def all_places(plan: Plan, rows: int) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Everything that a piece may name, as (space, dims, dtype); space table: an operand in SMEM."""
    out = {b.name: ("vmem" if b.space == "out" else b.space, b.dims(rows), b.dtype) for b in plan.buffers.values()}
    out |= {n: ("hbm", (HBM_ROWS, 128), "u32") for n in ("tape", "embedding")}
    out |= {image.name: ("hbm", (TABLE, *image.shape[1:]), "u32") for image in plan.experts}
    out |= {n: ("table", (rows,), "i32") for n in ("tokens", "positions")}
    return out | {n: ("table", (TABLE,), "i32") for n in ("chunks", "facts")}


def before_regions(kernel: Definitions) -> list[Piece]:
    """The kernel's own first statements, one piece each."""
    out = []
    for text in kernel.body("decode_kernel"):
        if LAUNCH in text:
            break
        out.append(Piece(PROLOGUE, text.split("(")[0], text, SCALARS))
    complete(out, kernel)
    return out


def ask(piece: Piece, kernel: Definitions, job: Job, chip: str) -> Asked:
    """The piece with its key: the text, what it rests on, the places that it uses, versions and chip."""
    behind = kernel.behind(piece.function)
    used = places_in([piece.function, *behind], job.places)
    text = "\n".join((piece.function, *behind))
    size = [number for word, number in (("m.rows", job.rows), ("axis_index", job.ranks)) if word in text]
    facts = [piece.function, behind, [[n, *job.places[n]] for n in used], size, chip, versions()]
    facts += [UNTIL] * ("_finish(" in piece.text) + [BEGINS] * bool(re.search(r"fori_loop\((?!0,)", text))
    barrier = any("get_barrier_semaphore" in text for text in behind) and any(f"{name}(m)" in piece.function for name in ("open_exchanges", "await_peers"))
    return Asked(cache.key(facts), piece.function, tuple(used), barrier, "axis_index" not in text, f"{piece.region}/{piece.op}")


def places_in(texts: list[str], places: dict) -> list[str]:
    """Places named `m.x`; where one is looked up by a name that is put together, all that begin with a quoted word."""
    text = "\n".join(texts)
    named = set(re.findall(r"\bm\.(\w+)", text))
    if "getattr(m," in text:
        words = set(re.findall(r"['\"](\w+)['\"]", texts[0]))
        named |= {n for n in places if any(n.startswith(f"{w}_") for w in words)}
    return sorted(n for n in named if n in places)


@lru_cache(maxsize=1)
def versions() -> tuple[str, ...]:
    return tuple(f"{name} {version(name)}" for name in ("jax", "jaxlib", "libtpu"))
