"""The numbers that an abstract run is made with: who runs, which rows are active where, which experts are wanted."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mkgen.check.shorten import Short
from mkgen.plan.experts import ExpertImage
from mkgen.plan.plan import Plan


@dataclass(frozen=True)
class Scenario:
    """positions, tokens: one a row, position -1: inactive. experts: how many the rank runs, a layer that routes each, repeated."""

    name: str
    rank: int
    rows: int
    positions: tuple[int, ...]
    tokens: tuple[int, ...]
    experts: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name}, {self.rows} rows, rank {self.rank}"


def scenarios(plan: Plan, rows: int, schedule: Short) -> list[Scenario]:
    """Few, but with every edge: position 0, a tile's edge, the context's end, idle rows, and each of `edge_counts` in some layer of
    each kind that routes."""
    build = plan.spec.build
    tile, last = build.kv_tile, build.context - 1
    edges = [0, last, tile - 1, tile, 1, tile + 1, 2 * tile - 1, last - tile]
    near = [tile, 2, 2 * tile, tile - 1, 0, tile + 2, 3, 1]
    most = max((most_experts(plan, image, rows) for image in plan.experts), default=0)

    def spread(pool: list[int], idle: int | None) -> tuple[int, ...]:
        return tuple(-1 if r == idle else max(0, min(pool[r % len(pool)], last)) for r in range(rows))

    counts = Counts(plan, rows, schedule)
    none = tuple([-1] * rows)
    plans = [
        ("rows at edges", spread(edges, None), None),
        ("one row idle", spread(near, 0 if rows > 1 else None), None),
        ("all rows idle", none, (0,)),
        ("all rows at the end", tuple([last] * rows), None),
        ("last row idle, many experts", spread(edges[1:], rows - 1 if rows > 1 else None), (most,)),
        *([("one row, a batch of tiles part full", (part_full(plan), *none[1:]), (1,))] if sights(plan) and build.tiles_at_once > 1 else []),
    ]
    out = [
        Scenario(name, rank, rows, positions, tokens(plan, rank, rows, len(name) % 2), experts or counts.deal())
        for rank in sorted({0, plan.mesh.ranks - 1})
        for name, positions, experts in plans
    ]
    while counts.left > 0:
        out.append(replace(out[0], name=f"other numbers of experts, {counts.left} left", experts=counts.deal()))
    return out


class Counts:
    """Deals numbers of experts to the layers that route, each kind's in turn. left: how many some kind has not had yet."""

    def __init__(self, plan: Plan, rows: int, schedule: Short):
        self.edges = {image.kind: edge_counts(plan, most_experts(plan, image, rows)) for image in plan.experts}
        self.turns = [region.name for _, _, region in schedule.regions if region.name in self.edges]
        self.dealt = dict.fromkeys(self.turns, 0)

    @property
    def left(self) -> int:
        return max((len(self.edges[kind]) - n for kind, n in self.dealt.items()), default=0)

    def deal(self) -> tuple[int, ...]:
        """Of one run of the schedule."""
        out = []
        for kind in self.turns:
            out.append(self.edges[kind][self.dealt[kind] % len(self.edges[kind])])
            self.dealt[kind] += 1
        return tuple(out) or (0,)


def edge_counts(plan: Plan, most: int) -> list[int]:
    """Numbers of experts at, below and above which a layer's control changes: none, those that are fetched first, a batch, two, the
    slots, the refills of one batch and of two, and `most`, of which there are no more. Those that reach much come first."""
    build = plan.spec.build
    first, batch, ahead = build.experts_at_once, build.expert_batch, build.experts_ahead
    edges = (ahead + batch + 1, 1, 0, ahead + 1, ahead, ahead - 1, batch + 1, batch, batch - 1, 2 * batch, first, first + 1, first - 1,
             ahead + batch, 2 * ahead + batch + 1, most, most - 1)
    return list(dict.fromkeys(n for n in edges if 0 <= n <= most))


def part_full(plan: Plan) -> int:
    """A position whose tiles, of each kind of cache, do not fill their last batch."""
    build = plan.spec.build
    last = build.context - 1

    def odd(position: int) -> bool:
        return all(sight.tiles(position, build.kv_tile) % build.tiles_at_once for sight in sights(plan).values())

    return next(p for p in (min(build.kv_tile * build.tiles_at_once + 1, last), min(build.kv_tile + 1, last), 1) if odd(p))


def most_experts(plan: Plan, image: ExpertImage, rows: int) -> int:
    """Distinct experts of a kind that a rank can be asked for in a layer."""
    return min(image.local_experts, rows * plan.spec.model.ffns[image.kind].top_k)


def tokens(plan: Plan, rank: int, rows: int, first_row: int = 0) -> tuple[int, ...]:
    """Every second row's token, from `first_row` on, lies in the rank's part of the vocabulary: its first, its last, others."""
    vocab, ranks = plan.spec.model.vocab, plan.mesh.ranks
    run = -(-vocab // ranks)
    first, after = rank * run, min((rank + 1) * run, vocab)
    mine = [first, after - 1, (first + after) // 2, first + 1]
    other = [(after + 3) % vocab, (first - 1) % vocab]
    return tuple(
        max(0, min(mine[r // 2 % 4] if r % 2 == first_row else other[r // 2 % 2], vocab - 1)) for r in range(rows)
    )


@dataclass(frozen=True)
class Sight:
    """Which tokens a kind's token sees, and the tables that list their tiles."""

    window: int
    chunk: int

    @property
    def tables(self) -> tuple[str, str]:
        tail = f"_window_{self.window}" if self.window else f"_chunk_{self.chunk}" if self.chunk else ""
        return f"kv_items{tail}", f"kv_count{tail}"

    def oldest(self, position: int) -> int:
        """The first token that the one at `position` sees."""
        if self.chunk:
            return position // self.chunk * self.chunk
        return max(0, position - self.window + 1) if self.window else 0

    def tiles(self, position: int, tile: int) -> int:
        """Of a row whose new token is at `position`: those with an older one that it sees."""
        return (position - 1) // tile + 1 - self.oldest(position) // tile if position > 0 else 0

    def most_tiles(self, context: int, tile: int) -> int:
        """Of one row: the most unfortunate place of a window or a chunk, or the whole context."""
        if self.chunk and self.chunk % tile == 0:
            return min(context, self.chunk) // tile
        span = self.window or self.chunk
        return min(-(-context // tile), (span + 2 * tile - 2) // tile) if span else -(-context // tile)


def sights(plan: Plan) -> dict[str, Sight]:
    """Of the kinds that have a positional cache, by name."""
    out = {}
    for name, sub in plan.graph.mixers.items():
        kind = plan.spec.model.mixers[name]
        if any(s.positional for op in sub.ops for s in op.states()):
            out[name] = Sight(getattr(kind, "window", 0), getattr(kind, "chunk", 0))
    return out


def kv_items(scenario: Scenario, tile: int, sight: Sight) -> list[int]:
    """row << 16 | tile of every tile with a token, older than its new one, that an active row sees, as the kernel lists them."""
    return [
        row << 16 | t
        for row, position in enumerate(scenario.positions)
        if position > 0
        for t in range(sight.oldest(position) // tile, sight.oldest(position) // tile + sight.tiles(position, tile))
    ]


SEVERAL = -7  # rows that chose an expert, as the kernel lists them


def lone_row(n: int, rows: int) -> int:
    """The row that alone chose the n-th expert of a list: one after another; several chose every other expert."""
    return n // 2 % rows if n % 2 == 0 else SEVERAL


def expert_ids(count: int, local: int) -> list[int]:
    """`count` distinct local ids, ascending, the last one among them."""
    return sorted(local - 1 - i * local // count for i in range(count))
