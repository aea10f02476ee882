"""What a mini has of routed experts: few and narrow ones, that lie and are fetched as the full model's are."""

from __future__ import annotations

from dataclasses import replace

from mkgen.graph.build import build_graph
from mkgen.plan.experts import ExpertImage
from mkgen.plan.exchange import is_rows
from mkgen.plan.memory import expert_images
from mkgen.plan.section import DEPTH, LANES
from mkgen.plan.shard import round_up
from mkgen.spec.model import Build, Moe, Router, Spec

INPUT = 384  # one whole 256-deep product and a rest
WIDTH = 96  # a rank's
LOCAL = {1: 16, 2: 8}  # experts of a rank by expert parallelism: many enough for idle ranks
CHOSEN = 4  # by a row
SLOTS, BATCH = 3, 3  # few enough that a slot is used again, and that a layer has batches that are full and one that is not


def fetched(old: Build) -> dict[str, int]:
    """Slots, batches, and what comes first: slots beyond a batch, and experts that wait for the whole list, if there were."""
    if old.expert_batch == 1:
        return {"expert_slots": min(old.expert_slots, SLOTS)}
    batch = min(old.expert_batch, BATCH)
    slots = batch + (old.expert_slots > old.expert_batch)
    first = min(old.first_experts, slots - (old.experts_ahead > old.experts_at_once))
    return {"expert_slots": slots, "expert_batch": batch, "first_experts": max(1, first)}


def small_experts(f: Moe, image: ExpertImage, old: Build, new: Build) -> Moe:
    """The same kind with few experts, of which a row chooses more than there are slots for; image: the full model's."""
    local = min(-(-f.experts // old.expert_parallel), LOCAL.get(new.expert_parallel, 4))
    experts = local * new.expert_parallel - (f.experts % old.expert_parallel > 0)
    width = new.tensor_parallel * _width(f, image, old)
    if f.width % old.tensor_parallel:  # the last rank's share is short, by whole groups if it was
        width -= 32 if f.width % 32 == 0 and width % 32 == 0 else 1
    router = _groups(f.router, experts)
    most = new.ranks if any(map(is_rows, new.reduce.values())) else _chosen(new)
    top_k = min(f.top_k, most, experts // router.groups * router.group_top_k)
    return replace(f, experts=experts, top_k=top_k, router=router, width=width, latent=min(f.latent, max(INPUT, depth(image))))


def depth(image: ExpertImage) -> int:
    """Of a mini's input, for parts of K side by side: two dots of each, where one is no deeper than the MXU; 0: there are none."""
    return image.fold * (2 * DEPTH if image.joint else LANES) if image.fold > 1 else 0


def _width(f: Moe, image: ExpertImage, old: Build) -> int:
    """Of a rank's share; as far over whole panels as the old one, if that is why gate and up share panels."""
    local = -(-f.width // old.tensor_parallel)
    return local % LANES if image.joint else min(local, WIDTH)


def _chosen(build: Build) -> int:
    """Enough for a slot to be used again, and for a batch that is not full."""
    least = max(CHOSEN, build.expert_slots + 1)
    return least + (build.expert_batch > 1 and least % build.expert_batch == 0)


def _groups(r: Router, experts: int) -> Router:
    """Groups of two or more of the mini's experts, as many of which are open as in the full model, in proportion."""
    groups = max(n for n in range(1, r.groups + 1) if experts % n == 0 and (n == 1 or experts // n > 1))
    return replace(r, groups=groups, group_top_k=max(1, r.group_top_k * groups // r.groups))


def expert_kib(spec: Spec, mini: Spec) -> int:
    """Small enough to cut an expert of the mini as well, where one of the spec is cut."""

    def cut(s: Spec, kib: int) -> bool:
        images = expert_images(build_graph(s), replace(s.build, expert_kib=kib)).values()
        return any(image.pieces > 1 for image in images)

    if not cut(spec, spec.build.expert_kib):
        return spec.build.expert_kib
    return next(kib for kib in range(256, 0, -8) if cut(mini, kib))
