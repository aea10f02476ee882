"""Checks of how the model is to be built: whether it can be split, stored and scheduled as asked."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from mkgen.errors import did_you_mean
from mkgen.spec.bad import BAD
from mkgen.spec.formats import FORMATS
from mkgen.spec.checks_roles import is_unsure, known_tensors
from mkgen.spec.model import MOST_UNROLL, Linear, Mla, Mlp, Moe

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker

FACTORS = ("host", "chip", "core")  # outermost first: the order of the ranks
MAX_ROWS = 8  # what one pass of the matrix unit takes for free
TILE_ROWS = 16  # rows of a bf16 tile in memory


def mesh(c: Checker) -> None:
    """The mesh is one that the chip comes in; if not, nothing that depends on its ranks is judged."""
    before = len(c.problems)
    c.run(_mesh)
    if len(c.problems) > before:
        c.ranks = BAD


def _mesh(c: Checker) -> None:
    factors, path = c.build.mesh, ("build", "mesh")
    if not factors:
        c.say(
            path,
            "build.mesh is empty",
            "a program runs on at least one core",
            "write, for instance, `mesh: {core: 1}`",
        )
        return
    known = [name for name in factors if name in FACTORS]
    for name in factors:
        if name not in FACTORS:
            c.say(
                (*path, name),
                f"unknown mesh factor {name!r}",
                "a factor is a level of the machine",
                did_you_mean(name, FACTORS),
            )
    if known != sorted(known, key=FACTORS.index):
        c.say(
            path,
            f"mesh factors in the order {', '.join(known)}",
            "ranks are numbered with the outermost factor first",
            f"write them as {', '.join(sorted(known, key=FACTORS.index))}",
        )
    most = {"host": c.target.max_hosts, "chip": c.target.chips_per_host, "core": c.target.cores_per_chip}
    noun = {
        "host": "the largest known topology has {} host(s)",
        "chip": "a host has {} chip(s)",
        "core": "a chip has {} core(s)",
    }
    for name in known:
        if most[name] is BAD or factors[name] is BAD:
            continue
        if factors[name] > most[name]:
            c.say(
                (*path, name),
                f"mesh factor {name}: {factors[name]} is more than a {c.build.chip} has",
                noun[name].format(most[name]),
                f"make it at most {most[name]}",
            )
        elif name == "host" and factors[name] > 1:
            c.run(_whole_hosts)
    if len(known) == len(factors) and all(factors[name] <= most[name] for name in known):
        if c.build.ranks > c.target.max_ranks:
            c.say(
                path,
                f"a mesh of {c.build.ranks} ranks",
                f"the largest known topology has {c.target.max_ranks} devices",
                "make the mesh smaller",
            )


def _whole_hosts(c: Checker) -> None:
    want = {"chip": c.target.chips_per_host, "core": c.target.cores_per_chip}
    if any(c.build.mesh.get(name, 1) < size for name, size in want.items()):
        c.say(
            ("build", "mesh"),
            "a mesh of several hosts that uses only part of each",
            "a topology of several hosts consists of whole hosts",
            f"write chip: {want['chip']}, core: {want['core']}, or use one host",
        )


def parallel(c: Checker) -> None:
    product = c.build.expert_parallel * c.build.tensor_parallel
    routed = any(isinstance(f, Moe) for f in c.model.ffns.values())
    if product == 1 and not routed:
        return  # nothing to share out
    if product != c.ranks:
        c.say(
            ("build", "expert_parallel"),
            f"expert_parallel {c.build.expert_parallel} x tensor_parallel {c.build.tensor_parallel}"
            f" is {product}, the mesh has {c.ranks} ranks",
            "every rank holds one share of the experts" if routed else "they share out experts, and this model has none",
            f"choose two factors of {c.ranks}" if routed else "leave both out",
        )


def formats(c: Checker) -> None:
    families = _families(c)
    has_experts = any(isinstance(kind, Moe) for _, kind in c.each("ffns"))
    for family, fmt in c.build.formats.items():
        path = ("build", "formats", family)
        if family == "experts":
            if (
                not has_experts
                and c.model.ffns is not BAD
                and all(isinstance(k, Mlp) for k in c.model.ffns.values())
            ):
                c.say(
                    path,
                    "a format for experts, of which there are none",
                    "no ffn of this model is a moe",
                    "delete it",
                )
        elif family != "rest":
            c.run(_family, path, family, families, ["experts", "rest", "head"])
            c.run(_matrix, path, family, fmt)
        if fmt is BAD:
            continue
        if fmt not in FORMATS:
            c.say(
                path,
                f"unknown format {fmt!r} of {family}",
                "there is no packing of that name",
                did_you_mean(fmt, FORMATS),
            )


def _matrix(c: Checker, path: tuple[str, ...], family: str, fmt: str) -> None:
    """Only matrices that are streamed can be stored otherwise."""
    known = known_tensors(c)[0].get(family)
    if known is None or fmt is BAD or fmt == "bf16":
        return
    if family == "embed":
        c.say(
            path,
            f"{fmt} for the embedding",
            "its rows are looked up, not multiplied",
            "write `head`, if the head is meant (a tied head, too)" if c.model.tied_head else "delete it",
        )
    elif len(known.shape) != 2 or 1 in known.shape:
        c.say(
            path,
            f"{fmt} for {family}, which is {list(known.shape)} in a checkpoint",
            "vectors and filters are a small part of the bytes, and are kept as they are",
            "delete it",
        )


def replicate(c: Checker) -> None:
    families = _families(c)
    if c.build.replicate is BAD:
        return
    for i, family in enumerate(c.build.replicate):
        if family is not BAD:
            c.run(_family, ("build", "replicate", str(i)), family, families, [])
            c.run(_gathered, ("build", "replicate", str(i)), family)


def over(c: Checker) -> None:
    """A family is cut over a group of neighbours only where its product is gathered, and other groups then hold copies."""
    if c.build.over is BAD or c.build.mesh is BAD:
        return
    groups = neighbours(c.build.mesh)
    for family, group in c.build.over.items():
        path = ("build", "over", family)
        c.run(_family, path, family, _families(c), [])
        c.run(_gathered, path, family, "cut over some ranks and copied to the others")
        if group is not BAD and group not in groups:
            c.say(path, f"{group!r} is no group of neighbouring ranks", "a family is cut over ranks whose numbers follow each other, and copied to the others",
                  f"one of {', '.join(groups)}" if groups else "leave it out: the mesh has one factor")
        if c.build.replicate is not BAD and family in c.build.replicate:
            c.say(path, f"{family} is in build.replicate too", "it is whole on every rank, or cut", "take it out of one of the two")


def neighbours(mesh: dict[str, int]) -> list[str]:
    """Groups of innermost factors of the mesh, but the whole of it: they can exchange in one round, and their ranks are numbered in a row."""
    names = [name for name, size in mesh.items() if size is not BAD and size > 1]
    return ["_".join(names[i:]) for i in range(len(names) - 1, 0, -1)]


GATHERED = {Linear: ("f_a", "g_a"), Mla: ("q_a", "kv_a"), Moe: ("router", "latent_down", "latent_up")}


def _gathered(c: Checker, path: tuple[str, ...], family: str, how: str = "kept whole on every rank") -> None:
    """Only a product that is gathered anyway may be made whole on every rank instead, or by fewer ranks."""
    kinds = {**c.model.mixers, **c.model.ffns}
    able = [f"{name}.{part}" for name, kind in kinds.items() for part in GATHERED.get(type(kind), ())]
    known = _families(c)
    if family in known and known[family] in ("model", "layer") and family not in able:
        c.say(
            path,
            f"{family} cannot be {how}",
            "its product is split by heads, columns or rows, and what follows works on the rank's share",
            f"choose among {', '.join(able)}" if able else "leave it out: no family of this model can be",
        )


def _families(c: Checker) -> dict[str, str]:
    """Weight family (a checkpoint role) -> how often it occurs, or 'unsure' if its owner is BAD."""
    known, unsure = known_tensors(c)
    return {**{role: t.per for role, t in known.items()}, **{f"{owner}.?": "unsure" for owner in unsure}}


def _family(
    c: Checker, path: tuple[str, ...], family: str, families: dict[str, str], extra: list[str]
) -> None:
    unsure = {name.partition(".")[0] for name, per in families.items() if per == "unsure"}
    whole = [name for name, per in families.items() if per in ("model", "layer")]
    whole += ["head"] * ("head" in extra)
    extra = [name for name in extra if name != "head"]
    if families.get(family) == "expert":
        c.say(
            path,
            f"{family} cannot be chosen by itself",
            "the matrices of an expert are stored and split together",
            "write `experts` under formats; experts are split with expert_parallel and tensor_parallel",
        )
    elif family not in whole and not is_unsure(family, unsure):
        same = [name for name in whole if name.partition(".")[0] == family.partition(".")[0]]
        c.say(
            path,
            f"unknown weight family {family!r}",
            "families go by their checkpoint role, and no kind has this one",
            did_you_mean(family, (same or whole) + extra),
        )


def rows(c: Checker) -> None:
    path = ("build", "rows")
    if not c.build.rows:
        c.say(
            path,
            "build.rows is empty",
            "each entry is one variant of the program",
            "write, for instance, `rows: [1, 8]`",
        )
    for value, times in Counter(r for r in c.build.rows if r is not BAD).items():
        if times > 1:
            c.say(
                path,
                f"build.rows has {value} more than once",
                "each entry is one variant of the program",
                "write it once",
            )
        if value > MAX_ROWS:
            c.say(
                path,
                f"build.rows has {value}",
                f"a variant decodes 1 to {MAX_ROWS} rows",
                f"choose from 1 to {MAX_ROWS}",
            )


def tokens(c: Checker) -> None:
    if c.build.tokens > 1:
        c.say(
            ("build", "tokens"),
            f"build.tokens is {c.build.tokens}",
            "several tokens a row are not built yet",
            "write 1",
        )


def context(c: Checker) -> None:
    tile = c.build.kv_tile
    if tile % TILE_ROWS:
        c.say(
            ("build", "kv_tile"),
            f"kv_tile {tile} is not a multiple of {TILE_ROWS}",
            "a tile of the cache is copied in whole memory tiles of bf16",
            f"choose a multiple of {TILE_ROWS}, such as 256",
        )
    elif c.build.context % tile:
        c.say(
            ("build", "context"),
            f"context {c.build.context} is not a multiple of kv_tile {tile}",
            "caches are streamed in whole tiles",
            f"write {-(-c.build.context // tile) * tile}",
        )


def depths(c: Checker) -> None:
    for key, noun in (
        ("ring_depth", "ring"),
        ("expert_slots", "expert buffer"),
        ("kv_slots", "cache buffer"),
    ):
        c.run(_depth, key, noun)


def _depth(c: Checker, key: str, noun: str) -> None:
    if getattr(c.build, key) == 1:
        c.say(
            ("build", key),
            f"{key} is 1",
            f"one slot of the {noun} is read while the next one is being filled",
            "write 2 or more",
        )


def expert_batch(c: Checker) -> None:
    """Where there are no routed experts no more is asked of it than of expert_slots."""
    batch, slots = c.build.expert_batch, c.build.expert_slots
    if batch > slots:
        c.say(
            ("build", "expert_batch"),
            f"expert_batch {batch} is more than expert_slots {slots}",
            "the experts of a batch are multiplied together, each from a slot of its own",
            f"write expert_batch: {slots} or less, or expert_slots: {2 * batch}, so that a batch comes while another is multiplied",
        )


def unroll(c: Checker) -> None:
    if c.build.unroll > MOST_UNROLL:
        c.say(
            ("build", "unroll"),
            f"unroll is {c.build.unroll}",
            "longer code has to be fetched more often than its fewer drains give back",
            f"write {MOST_UNROLL} or less",
        )


def memory(c: Checker) -> None:
    """A first look only: the plan knows what else lies in VMEM."""
    asked = (c.build.ring_depth * c.build.block_kib + c.build.spill_kib) * 1024
    if asked > c.target.vmem_usable_bytes:
        c.say(
            ("build", "ring_depth"),
            f"the ring alone ({c.build.ring_depth} x {c.build.block_kib} KiB) and spill_kib exceed VMEM",
            f"that is {asked / 2**20:.1f} MiB of {c.target.vmem_usable_bytes / 2**20:.1f}",
            "make ring_depth or block_kib smaller",
        )


CHECKS = (mesh, parallel, formats, replicate, over, rows, tokens, context, depths, expert_batch, unroll, memory)
