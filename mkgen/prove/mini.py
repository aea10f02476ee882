"""A small model out of the same spec, by rules on sizes alone: every kind, at least two turns of the loop nest,
every factor of the mesh that is one, narrow and padded widths, blocks, tiles and experts in small numbers.
For interpret mode only."""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace

from mkgen.errors import MkgenError, SpecErrors
from mkgen.graph.build import build_graph
from mkgen.graph.formats import format_of
from mkgen.graph.ir import Weight
from mkgen.graph.ops.gqa_attention import KvGroups
from mkgen.plan.exchange import is_rows
from mkgen.plan.experts import ExpertImage
from mkgen.plan.memory import expert_images
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, walk
from mkgen.plan.shard import apart, local_units, round_up, sharers
from mkgen.prove.coverage import pieces
from mkgen.prove.mini_experts import depth, expert_kib, fetched, small_experts
from mkgen.spec import schedule
from mkgen.spec.model import Activation, Build, Gqa, Linear, Mla, Mlp, Model, Moe, QueryTemperature, Rope, Run, Spec
from mkgen.spec.roles import tensors
from mkgen.spec.schedule import Item, Name, Repeat
from mkgen.spec.validate import validate
from mkgen.spec.yaml_lines import Where
from mkgen.targets import load_target

HIDDEN = 256, 384, 512  # not counting what is over the last whole 128
HEAD = 32  # features of a head
STEP = 0.1, 0.5  # bounds of a recurrence's step
HEADS = 3  # of a rank: odd, as a padded count has to be
GROUP = 2, 8  # of query heads that a rank has: with one KV head, q, k and v fill one block; or `o` is cut along K
LATENT = 144, 16  # cached latent and shared key: they meet inside a block of 128
RANK = 20  # a rank's columns of a low-rank projection
WIDE = 128  # a rank's columns of a wide projection, not counting what is over 128
NARROW = 64, 192  # of a dense ffn: gate and up fill one block's columns; or several blocks, and the last in part
LIMIT = 0.8  # of an activation, of q, k and v: random ones go well beyond it
SOFTCAP = 2.0  # of logits, before their scale; of scores; of what a saturating activation is given
VOCAB = 296  # a rank's: more blocks of the head than the ring is deep
GROUPED = 16  # KV heads of a rank that are more than one group of them
TILE, TILES = 16, 4  # a window or a chunk is shorter than a tile: whole tiles are left out
BLOCK_KIB = 48, 64, 40, 32, 80, 96, 24, 128  # the first that cuts matrices in most of the ways that the full plan does


def mini_spec(spec: Spec, whole_mesh: bool = False) -> Spec:
    """The mini of a valid spec; whole_mesh: on as many ranks as the spec's. Raises `SpecErrors` if no valid spec comes of it."""
    wanted, ways = _full(spec)
    build = _build(replace(spec.build, **ways), whole_mesh)
    best, least = None, math.inf
    for sizes in itertools.product(_hidden(spec), GROUP, NARROW):
        mini = _sized(spec, build, *sizes)
        graph, target = build_graph(mini), load_target(build.chip)
        best = best or mini
        for kib in BLOCK_KIB:
            tried = replace(mini, build=replace(mini.build, block_kib=kib))
            with contextlib.suppress(MkgenError, ValueError):
                plan = make_plan(tried, graph, target)
                missing = len(wanted - pieces(plan)) + (len(plan.regions["end"].chunks) <= plan.ring_depth)
                if missing < least:
                    best, least = tried, missing
        if least == 0:
            break
    return best


def _sized(spec: Spec, build: Build, hidden: int, group: int, narrow: int) -> Spec:
    """The mini with these sizes, one of HIDDEN, of GROUP and of NARROW, and any block."""
    mini = Spec(_model(spec, build, hidden, group, narrow), build, spec.path, Where())
    build = replace(build, formats=_formats(spec, mini))
    mini = replace(mini, build=build)
    problems = validate(replace(mini, build=replace(build, mesh=_real_mesh(build), over={})))
    if problems:
        raise SpecErrors(problems)
    return replace(mini, build=replace(build, expert_kib=expert_kib(spec, mini)))


def _hidden(spec: Spec) -> tuple[int, ...]:
    """HIDDEN, or the one that is deep enough for experts whose input it is."""
    images = expert_images(build_graph(spec), spec.build)
    deep = max((depth(image) for name, image in images.items() if not spec.model.ffns[name].latent), default=0)
    return (deep,) if deep > HIDDEN[-1] else HIDDEN


def _full(spec: Spec) -> tuple[set[str], dict]:
    """What the full plan's code is printed from, and how its ranks exchange; nothing where it has none."""
    with contextlib.suppress(MkgenError, ValueError):
        plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
        found = (n for r in plan.regions.values() for n in walk(r.body) if isinstance(n, Collective) and n.kind != "reduce" and not n.rows)
        paths = {n.kind: n.path for n in found if plan.mesh.reach(n.path) == plan.mesh.ranks}
        ways = {kind: " ".join(sorted(path, key=list(plan.mesh.groups).index)) for kind, path in paths.items()}
        return pieces(plan), ways | {"reduce": dict(plan.ways), "add": (*plan.added, "auto")[0]}
    return set(), {}


def _build(old: Build, whole_mesh: bool) -> Build:
    mesh = old.mesh if whole_mesh else {name: min(size, 2) for name, size in old.mesh.items()}
    both = old.expert_parallel > 1 and old.tensor_parallel > 1
    ranks = _product(mesh)
    if both and ranks == 2:  # one factor must carry both kinds of parallelism
        mesh = {name: 4 if size == 2 else size for name, size in mesh.items()}
        ranks = 4
    tensor = 1 if old.tensor_parallel == 1 else 2 if both else ranks
    return replace(
        old,
        mesh=mesh,
        expert_parallel=ranks // tensor,
        tensor_parallel=tensor,
        block_kib=BLOCK_KIB[0],
        rows=(ranks,) if any(map(is_rows, old.reduce.values())) else tuple(sorted({1, min(max(old.rows), 4)})),
        context=TILES * TILE,
        kv_tile=TILE,
        ring_depth=min(old.ring_depth, 3),
        late_refills=min(old.late_refills, 2, old.ring_depth - 1),
        **fetched(old),
        kv_slots=min(old.kv_slots, 4),
    )


def _formats(spec: Spec, mini: Spec) -> dict[str, str]:
    """Those of the spec, and by name what has too few rows or columns in the mini to be of its `rest`."""

    def stored(s: Spec) -> dict[str, tuple[Weight, str]]:
        ops = [op for sub in build_graph(s).sublayers() for op in sub.ops]
        return {w.name: (w, format_of(s.build, w)) for op in ops for w in op.weights() if len(w.shape) == 2}

    full, named = stored(spec), {}
    for name, (weight, fmt) in stored(mini).items():
        if name in full and full[name][1] != fmt:
            named.update(dict.fromkeys(weight.roles, full[name][1]))
    return {**spec.build.formats, **named}


def _real_mesh(build: Build) -> dict[str, int]:
    """As many ranks as the mini has, on a mesh that the chip comes in: the mini's own need not exist, its ranks count."""
    target, left, mesh = load_target(build.chip), build.ranks, {}
    for name, most in (("core", target.cores_per_chip), ("chip", target.chips_per_host), ("host", target.max_hosts)):
        mesh[name] = max(n for n in range(1, most + 1) if left % n == 0)
        left //= mesh[name]
    return build.mesh if left > 1 else dict(reversed([f for f in mesh.items() if f[1] > 1] or [("core", 1)]))


def _model(spec: Spec, build: Build, hidden: int, group: int, narrow: int) -> Model:
    old = spec.model
    mixer, ffn = _columns(old)
    runs = tuple(Run(*run) for run in zip(schedule.expand(mixer), schedule.expand(ffn)))
    ranks, images = (spec.build.ranks, build.ranks), expert_images(build_graph(spec), spec.build)
    mixers = {
        name: _gqa(kind, *ranks, group) if isinstance(kind, Gqa) else _MIXERS[type(kind)](kind, *ranks)
        for name, kind in old.mixers.items()
    }
    ffns = {
        name: _mlp(kind, spec.build, build, narrow) if isinstance(kind, Mlp) else _moe(kind, images[name], spec.build, build)
        for name, kind in old.ffns.items()
    }
    residual = replace(old.residual, block=_block(runs)) if old.residual.kind == "block_softmax" else old.residual
    vocab = min(old.vocab, build.ranks * VOCAB - 3)
    mini = replace(
        old,
        hidden=like(old.hidden, hidden),
        vocab=vocab,
        usable_vocab=old.usable_vocab and min(old.usable_vocab, 2 * vocab // 3),  # some row's best id is not usable
        logit_softcap=min(old.logit_softcap, abs(old.logit_scale) * SOFTCAP),  # it bends
        layers=len(runs),
        mixer=schedule.to_text(mixer),
        ffn=schedule.to_text(ffn),
        mixers=mixers,
        ffns=ffns,
        schedule=runs,
        residual=residual,
        parameters=None,
        ignore=(),
    )
    return replace(mini, checkpoint={t.role: t.role + _FIELDS[t.per] for t in tensors(mini).values()})


def like(width: int, small: int) -> int:
    """A small width that is as far over a multiple of 128 as `width` is."""
    return width if width <= small else small + width % 128


def sharded(width: int, old_ranks: int, ranks: int, small: int) -> int:
    """A width for `ranks` ranks whose share is the old share, or no more than `small` (and what is over 128); the last
    rank's share is one short where the old shares are not all full."""
    local = -(-width // old_ranks)
    whole = ranks * (local if local <= small else small + (local % 128 if small % 128 == 0 else 0))
    return whole - (width % old_ranks > 0 and whole > 1)


def few(width: int, small: int) -> int:
    """A small width of a head, that is as far over a multiple of 16 as `width` is."""
    return width if width <= small else small + width % 16


def early(t: QueryTemperature | None) -> QueryTemperature | None:
    """The same with steps so short that the mini's context has several."""
    return t and replace(t, length=min(t.length, TILE // 2), shift=t.shift % (TILE // 2))


def few_heads(heads: int, groups: int, old_ranks: int, ranks: int, most_groups: int, most_each: int) -> tuple[int, int]:
    """(heads, groups): at most so many groups on a rank, so many heads of a group; ranks share groups if they did, and
    some rank holds padding if one did."""
    each, more = heads // groups, ranks > 1
    if groups >= old_ranks:
        local = min(-(-groups // old_ranks), most_groups)
        few = ranks * local - (groups % old_ranks > 0 and more)
        return few * min(each, most_each), few
    share, rest = divmod(old_ranks, groups)
    halves = next(n for n in range(max(1, ranks // 2), 0, -1) if ranks % n == 0)
    few = halves if share > 1 else max(1, ranks - 1)
    local, share_now = min(-(-each // share), most_each), sharers(ranks, few)
    padded = share_now > 1 and (each % share > 0 or rest > 0)
    return few * (share_now * local - padded), few


# -- the schedule ----------------------------------------------------------------------------------------------


def _columns(model: Model) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """Both columns with every count cut to two, then brought to one length and at least two layers."""
    columns = [tuple(_shrink(item) for item in schedule.parse(text)) for text in (model.mixer, model.ffn)]
    layers = max(*map(schedule.length, columns), min(model.layers, 2))
    columns = [_lengthen(column, layers) for column in columns]
    runs = [(run.mixer, run.ffn) for run in model.schedule]
    if set(zip(*map(schedule.expand, columns))) != set(runs):  # they fell out of step: each pair of the model twice
        pairs = 2 * list(dict.fromkeys(runs))
        pairs += [runs[-1]] * (pairs[-1] != runs[-1])
        columns = [tuple(map(Name, column)) for column in zip(*pairs)]
    return tuple(columns)


def _shrink(item: Item) -> Item:
    return item if isinstance(item, Name) else Repeat(tuple(map(_shrink, item.body)), min(item.times, 2))


def _lengthen(items: tuple[Item, ...], layers: int) -> tuple[Item, ...]:
    """More turns of the last item, the last of them cut short if need be."""
    more = layers - schedule.length(items)
    if more == 0:
        return items
    last = items[-1]
    body, times = (last.body, last.times) if isinstance(last, Repeat) else ((last,), 1)
    turns, rest = divmod(more, schedule.length(body))
    tail = tuple(map(Name, schedule.expand(body)[:rest]))
    return (*items[:-1], Repeat(body, times + turns), *tail)


def _block(runs: tuple[Run, ...]) -> int:
    """A block of the residual that opens at least twice, if there are layers for it, and only where a mixer
    stands.
    """
    sizes = range(max(1, len(runs) // 2), 0, -1)
    return next((b for b in sizes if all(run.mixer for run in runs[::b])), 1)


# -- kinds -----------------------------------------------------------------------------------------------------


def _gqa(a: Gqa, old_ranks: int, ranks: int, group: int) -> Gqa:
    head, value = min(a.head_dim, HEAD), a.value_dim
    old = [local_units(n, old_ranks, a.kv_heads) for n in (a.heads, a.kv_heads)]
    grouped = KvGroups(*old, a.head_dim, value or a.head_dim).lanes().groups > 1
    heads, kv_heads = few_heads(a.heads, a.kv_heads, old_ranks, ranks, GROUPED if grouped else 2, group)
    if value is not None and value != a.head_dim:  # wider or narrower, as it was
        value = min(value, head + 8 if value > a.head_dim else head - 8)
    rope = a.rope
    if rope is not None and rope.width is not None:
        rope = replace(rope, width=round_up(rope.width * head // a.head_dim, 2))
    chunk = min(a.chunk, TILE if a.chunk % TILE == 0 else TILE - 5)
    return replace(
        a,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head,
        value_dim=value,
        rope=rope,
        query_temperature=early(a.query_temperature),  # it changes between the positions of the proof
        clip=min(a.clip, LIMIT),
        softcap=min(a.softcap, SOFTCAP),  # it bends
        chunk=chunk,
        window=min(a.window, TILE - 3),
    )


def _mla(a: Mla, old_ranks: int, ranks: int) -> Mla:
    nope, rope_dim = few(a.nope_dim, HEAD), min(a.rope_dim, LATENT[1])
    v_dim = nope if a.v_dim == a.nope_dim else few(a.v_dim, HEAD)
    if v_dim == nope and a.v_dim != a.nope_dim:
        v_dim += 8 if a.v_dim > a.nope_dim else -8
    rope: Rope | None = a.rope
    if rope is not None and rope.width is not None:
        rope = replace(rope, width=round_up(rope.width * rope_dim // a.rope_dim, 2))
    shorter = math.sqrt((a.nope_dim + a.rope_dim) / (nope + rope_dim))  # scores keep their size
    return replace(
        a,
        scale=a.scale and a.scale * shorter,
        query_temperature=early(a.query_temperature),
        heads=few_heads(a.heads, a.heads, old_ranks, ranks, HEADS, 1)[0],
        q_rank=sharded(a.q_rank, old_ranks, ranks, RANK),
        kv_rank=min(a.kv_rank, LATENT[0] + a.kv_rank % 16),  # what is over a multiple of 16 stays
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=v_dim,
        rope=rope,
    )


def _linear(a: Linear, old_ranks: int, ranks: int) -> Linear:
    heads, key_heads = few_heads(a.heads, a.key_heads or a.heads, old_ranks, ranks, HEADS, HEADS)
    key_heads = a.key_heads and key_heads
    value_dim = min(a.value_dim, HEAD)
    unequal = 0 if a.key_dim == a.value_dim else -8 if a.key_dim < a.value_dim else 8
    norm = a.norm
    if norm is not None and norm.scope == "groups":
        old = a.heads, a.key_heads or a.heads, a.value_dim, old_ranks
        norm = replace(norm, groups=_norm_groups(norm.groups, old, (heads, key_heads or heads, value_dim, ranks)))
    return replace(
        a,
        heads=heads,
        key_heads=key_heads,
        key_dim=min(a.key_dim, value_dim + unequal),
        value_dim=value_dim,
        decay=replace(a.decay, rank=min(a.decay.rank, HEAD)),
        gate=a.gate and replace(a.gate, rank=min(a.gate.rank, HEAD)),
        norm=norm,
        step_min=STEP[0] if a.step_min else 0.0,  # bounds that bind
        step_max=STEP[1] if a.step_max else 0.0,
    )


def _norm_groups(groups: int, old: tuple[int, int, int, int], new: tuple[int, int, int, int]) -> int:
    """A number near `groups` whose runs of channels lie on one rank each, or not, as the old ones do. old, new: heads, key
    heads, features of a head, ranks.
    """

    def lie_apart(n: int, heads: int, key_heads: int, dim: int, ranks: int) -> bool:
        return apart(heads * dim, heads, key_heads, ranks, heads * dim // n)

    channels = new[0] * new[2]
    divisors = [n for n in range(1, channels + 1) if channels % n == 0]
    alike = [n for n in divisors if lie_apart(n, *new) == lie_apart(groups, *old)]
    return min(alike or divisors, key=lambda n: abs(n - groups))


def _mlp(f: Mlp, old: Build, new: Build, narrow: int) -> Mlp:
    return replace(f, width=sharded(f.width, old.ranks, new.ranks, narrow), activation=_activation(f.activation))


def _activation(a: Activation) -> Activation:
    """Its limits where random weights reach them."""
    return replace(a, limit=min(a.limit, LIMIT), beta=min(a.beta, SOFTCAP), linear_beta=min(a.linear_beta, SOFTCAP))


def _moe(f: Moe, image: ExpertImage, old: Build, new: Build) -> Moe:
    shared = sharded(f.shared_width, old.ranks, new.ranks, WIDE) if f.shared_width else 0
    return replace(small_experts(f, image, old, new), activation=_activation(f.activation), shared_width=shared)


_FIELDS = {"model": "", "layer": ".{layer}", "expert": ".{layer}.{expert}"}  # a tensor a role: cuts are of the full widths
_MIXERS = {Mla: _mla, Linear: _linear}


def _product(mesh: dict[str, int]) -> int:
    n = 1
    for size in mesh.values():
        n *= size
    return n
