"""qwen3_30b_a3b: one decode step as one Pallas program, for 8 tpu7x cores.

Written by `mkgen build`; change the spec or the templates, not this file. Read it from the bottom:
`decode_kernel` runs all 48 layers in one loop; a layer calls one function a sub-layer.

Conventions. `m` holds every place: HBM arrays, VMEM buffers, SMEM tables, semaphores; `places` says
what each is for. Weights lie on one tape of u32 rows in the order of their use; `g` counts the
chunks of it that have been read. Chunk g waits in ring slot g mod RING_DEPTH; when it has been read
for the last time, chunk g + RING_DEPTH is started into its slot. Activations are [8, width]: decode
rows, padded to a sublane tile. `layer` counts layers, `index` earlier layers of the same kind.
bf16 values, f32 sums; a value is rounded where `.astype(bf16)` or `round_bf16` says so.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

f32, bf16, i32, u32 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.uint32
bitcast, async_copy = pltpu.bitcast, pltpu.make_async_copy

LANES, ROWS_PADDED = 128, 8
LAYERS, RING_DEPTH = 48, 18
EMBED_WORDS = 8  # u32 rows of one token's embedding
VOCAB_RUN = 18992  # tokens of the vocabulary on one rank
FACTS = 4  # words a layer in the table m.facts:
MIXER, MIXER_INDEX, FFN, FFN_INDEX = range(4)

# ---- arithmetic ----------------------------------------------------------------------------------

def lanes(start, width):
    """A run of lanes that starts at a multiple of 128."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), width)

def dot(x, w):
    """[8, k] x [k, n] -> [8, n], summed in f32."""
    return jnp.dot(x, w, preferred_element_type=f32)

def dot_t(x, w):
    """[8, k] x [n, k] -> [8, n], summed in f32."""
    return lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=f32)

def pad_lanes(x, width):
    """Zero columns up to `width`."""
    missing = width - x.shape[1]
    return jnp.pad(x, ((0, 0), (0, missing))) if missing else x

def pad_rows(x):
    """Zero rows up to ROWS_PADDED."""
    missing = ROWS_PADDED - x.shape[0]
    return jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)]) if missing else x

def round_bf16(x):
    """Rounded to bf16, kept as f32."""
    return x.astype(bf16).astype(f32)

def line(w, n):
    """Rows of 128 lanes -> one lane vector [1, n]."""
    rows = -(-n // LANES)
    return jnp.concatenate(jnp.split(w[:rows], rows), axis=1)[:, :n]

def sum_lanes(x):
    """[8, n] -> [8, 1]: blocks of 128 lanes are added up first, as four sums side by side."""
    blocks = heads_of(pad_lanes(x, -(-x.shape[1] // LANES) * LANES), LANES)
    return jnp.sum(sum(sum(blocks[i::4]) for i in range(4)), axis=1, keepdims=True)

def rms_norm(x, w, eps):
    """x * rsqrt(mean(x^2) + eps) * w; x [8, n] f32, w in rows of 128 lanes."""
    return x * lax.rsqrt(sum_lanes(x * x) / x.shape[1] + eps) * line(w, x.shape[1])

def heads_of(x, head_dim):
    return jnp.split(x, list(range(head_dim, x.shape[1], head_dim)), axis=1)

def norm_heads(x, w, eps):
    """RMS norm of each head; w [1, head_dim] serves them all."""
    heads = heads_of(x, w.shape[1])
    scales = [lax.rsqrt(jnp.mean(h * h, axis=1, keepdims=True) + eps) for h in heads]
    return jnp.concatenate([h * s * w for h, s in zip(heads, scales)], axis=1)

def silu(x):
    return x * jax.nn.sigmoid(x)

# ---- rows, tokens --------------------------------------------------------------------------------

def fill_positions(m):
    """Positions as a column [8, 1], for selects by row; padding rows are inactive."""
    row = lax.broadcasted_iota(i32, (ROWS_PADDED, 1), 0)
    column = jnp.full((ROWS_PADDED, 1), -1, i32)
    for r in range(m.rows):
        column = jnp.where(row == r, m.positions[r], column)
    m.position_column[...] = column

def each_active_row(m, body):
    """body(row) for every row that holds a token."""
    lax.fori_loop(0, m.rows, lambda row, _: pl.when(m.positions[row] >= 0)(lambda: body(row)), None)

def vocab_index(m, row):
    """The row's token as an index into this rank's run of the vocabulary."""
    return m.tokens[row] - lax.axis_index("tp") * VOCAB_RUN

def embed_here(m, row):
    """Is the row active, and its token in this rank's run?"""
    local = vocab_index(m, row)
    return (m.positions[row] >= 0) & (local >= 0) & (local < VOCAB_RUN)

def embedded_rows(m, hidden):
    """[8, hidden] f32: rows whose token is here, else zeros by select: memory may be NaN.
    Word i, lane l of a token holds features 256 i + l (low half) and 256 i + 128 + l (high)."""
    row = lax.broadcasted_iota(i32, (ROWS_PADDED, LANES), 0)
    here = jnp.zeros((ROWS_PADDED, LANES), i32)
    for r in range(m.rows):
        here = jnp.where(row == r, embed_here(m, r).astype(i32), here)
    words, blocks = m.embed_words[...], []
    for i in range(EMBED_WORDS):
        word = jnp.where(here > 0, pad_rows(words[i]), u32(0))
        blocks += [bitcast(word << 16, f32), bitcast(word & u32(0xFFFF0000), f32)]
    return jnp.concatenate(blocks, axis=1)[:, :hidden]

NO_TOKEN = 2.0**30  # loses every tie

def greedy_local(logits, first, valid):
    """logits [8, n], of which `valid` count -> (max, lowest id), f32 [8, 1] each, exact."""
    column = lax.broadcasted_iota(i32, logits.shape, 1)
    logits = jnp.where(column < valid, logits, -jnp.inf)
    top = jnp.max(logits, axis=1, keepdims=True)
    best = (logits == top) & (column < valid)
    token = jnp.where(best, (first + column).astype(f32), NO_TOKEN)
    return top, jnp.min(token, axis=1, keepdims=True)

# ---- the tape ------------------------------------------------------------------------------------

def tape_rows(m, g, at, rows):
    """u32 [rows, 128]: rows `at`.. of chunk g, in its ring slot."""
    return m.ring[lax.rem(g, RING_DEPTH), pl.ds(at, rows), :]

def vector(m, g, at, rows, dtype=f32):
    """f32, in rows of 128 lanes: those that u32 rows `at`.. of chunk g hold as `dtype`."""
    return bitcast(tape_rows(m, g, at, rows), dtype).astype(f32)

def side_by_side(w, count):
    """u32 [count * rows, 128] -> bf16 [2 * rows, count * 128]: no data moves."""
    return jnp.concatenate(jnp.split(bitcast(w, bf16), count), axis=1)

def panels(m, g, at, k, n):
    """bf16 [k, n]: n / 128 panels, each 128 columns wide and k / 2 words deep."""
    return side_by_side(tape_rows(m, g, at, k * n // (2 * LANES)), n // LANES)

def stream(m, g, blocks, use, turn=1, refills=None):
    """use(i, g) for i in blocks, on the next chunks, `turn` of them in straight-line code: their
    products overlap. Behind each use, or the first `refills` of a turn, its slot is refilled."""
    def one(i, g):
        for chunk in range(turn):
            tape_copy(m, g + chunk).wait()
        for chunk in range(turn):
            use(blocks.start + i * turn + chunk, g + chunk)
            if refills is None or chunk < refills:
                tape_copy(m, g + chunk + RING_DEPTH).start()
        return g + turn
    return lax.fori_loop(0, len(blocks) // turn, one, g)

# ---- exchanges between ranks ---------------------------------------------------------------------
#
# A stage: every rank of a group sends one message to each of the others. It lies in the sender's
# place of the group's inbox; what differs by peer leaves from the outbox. On the wire everything
# is u32. Each use of a stage takes the other half of its inbox: a peer starts use k + 2 after it
# has my message of use k + 1, sent when I had read all of use k. An exchange is a path of stages.
# All ranks make the same ones in one order, one at a time; work may run between start and finish.

class Stage(NamedTuple):
    number: int
    size: int  # ranks that exchange
    stride: int  # between neighbours

CORE = Stage(0, 2, 1)
CHIP = Stage(1, 4, 2)
ALL = Stage(2, 8, 1)
STAGES = (CORE, CHIP, ALL)

def member(stage):
    """My place among the ranks of this stage."""
    return lax.rem(lax.div(lax.axis_index("tp"), stage.stride), stage.size)

def peer(stage, step):
    """Another rank of the stage for each step."""
    return lax.axis_index("tp") ^ (step * stage.stride)

def inbox(m, stage):
    return (m.inbox_core, m.inbox_chip, m.inbox_all)[stage.number]

def half(m, stage):
    """Which of the two halves of its inbox this use of the stage has."""
    return lax.rem(m.phase[stage.number], 2)

def on_wire(m, xs):
    """f32 [8, n] each -> u32 [rows, all of them side by side]."""
    return jnp.concatenate([bitcast(x[: m.rows], u32) for x in xs], axis=1)

def message(m, stage, width, step, apart=False):
    """My message to the peer of a step. apart: the words for that rank alone."""
    here, wide = half(m, stage), -(-width // LANES) * LANES
    mine = source = inbox(m, stage).at[here, member(stage), :, :wide]
    arrived, to = m.arrived.at[here, stage.number], (peer(stage, step),)
    return pltpu.make_async_remote_copy(source, mine, m.sent, arrived, to, pl.DeviceIdType.MESH)

def send(m, stage, words):
    """u32 [rows, n] to all members."""
    inbox(m, stage)[half(m, stage), member(stage), :, : words.shape[1]] = words
    for step in range(1, stage.size):  # no loop: in one, each message waits for its peer's address
        message(m, stage, words.shape[1], step).start()

def receive(m, stage, width, apart=False):
    """Waits until all messages are here, and mine away; what all members sent, in order."""
    here = half(m, stage)
    lax.fori_loop(1, stage.size, lambda step, _: message(m, stage, width, step, apart).wait(), None)
    m.phase[stage.number] += 1
    return [bitcast(inbox(m, stage)[here, i, :, :width], f32) for i in range(stage.size)]

def columns_of(pieces, ys):
    """For each (width, y): its columns of every piece, and y."""
    at = 0
    for width, y in ys:
        yield [x[:, at : at + width] for x in pieces], y
        at += width

def gather_start(m, path, *xs):
    """Each x [8, n] f32 is this rank's piece, on its way to the members of the first stage."""
    send(m, path[0], on_wire(m, xs))

def gather_finish(m, path, *ys):
    """y [8, ranks * width] = the pieces of all ranks, for each (width, y)."""
    width = sum(n for n, _ in ys)
    found = receive(m, path[0], width)
    for stage in path[1:]:
        send(m, stage, on_wire(m, found))
        runs = receive(m, stage, width * len(found))
        found = [x for run in runs for x in heads_of(run, width)]
    for pieces, y in columns_of(found, ys):
        y[...] = pad_rows(jnp.concatenate(pieces, axis=1))

def sums(found, ys):
    """The sum of all members' terms in order, the same bits everywhere, for each (width, y)."""
    return [functools.reduce(jnp.add, terms) for terms, _ in columns_of(found, ys)]

def reduce_start(m, path, *xs):
    """Each x [8, n] f32 is this rank's term of a sum."""
    send(m, path[0], on_wire(m, xs))

def reduce_finish(m, path, *ys):
    """y = the sum over all ranks, for each (width, y)."""
    width = sum(n for n, _ in ys)
    found = receive(m, path[0], width)
    for stage in path[1:]:
        send(m, stage, on_wire(m, sums(found, ys)))
        found = receive(m, stage, width)
    for x, (width, y) in zip(sums(found, ys), ys):
        y[:, :width] = pad_rows(x)

def open_exchanges(m):
    """Counters to zero; tells every rank that writes here that this one is in the kernel."""
    for stage in STAGES:
        m.phase[stage.number] = 0
        for step in range(1, stage.size):
            pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1, device_id=(peer(stage, step),))

def await_peers(m):
    """Before the first message: every rank that it may go to is in this kernel."""
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), sum(stage.size - 1 for stage in STAGES))

# ---- rotary embedding ----------------------------------------------------------------------------
#
# A frequency is negative at the first feature of a pair, whose sine is subtracted, and 0 where
# nothing is turned: x * cos + (the other of its pair) * sin is the rotation, whatever the layout.

def rope_angles(m, frequency):
    """[8, n]: position * frequency, in float32 as the frequencies are; frequency [1, n]."""
    shape = (ROWS_PADDED, frequency.shape[1])
    return jnp.broadcast_to(jnp.maximum(m.position_column[...], 0), shape).astype(f32) * frequency

def rotate_halves(x, head_dim, width, cos, sin):
    """Rotates feature j with j + width / 2, in each head of x [8, heads * head_dim] f32."""
    half, out = width // 2, []
    for y in heads_of(x, head_dim):
        other = [y[:, half:width], y[:, :half], *([y[:, width:]] if width < head_dim else [])]
        out.append(y * cos + jnp.concatenate(other, axis=1) * sin)
    return jnp.concatenate(out, axis=1)

# ---- attention over a positional cache -----------------------------------------------------------
#
# A cache is u32 [layers, rows, blocks, context / 2, 128]: a word holds tokens 2 i (low half) and
# 2 i + 1 (high) of a feature, a block is 128 features. All (row, tile) pairs form one list of
# items; tiles stream through a ring of slots, KV_BATCH items are computed at a time.

KV_TILE = 256  # tokens
KV_SLOTS = 16  # tiles in VMEM: half computed on, half on their way
KV_BATCH = 8
MASKED = -1e30  # finite: a tile whose tokens are all masked must not make NaN

class Cache(NamedTuple):  # The VMEM side of one kind of cache.
    tiles: object  # u32 [KV_SLOTS, blocks, KV_TILE / 2, 128]
    token: object  # u32 [blocks, 8, 128]: the new token, in the high half
    old: object  # u32 [rows, blocks, 1, 128]: the words that the new token goes into
    word: object  # likewise, with the new token: to be written back
    queries: object  # [8, heads padded, features that are scored]
    softmax: object  # f32 [2, 8, heads padded, 128]: largest score; sum of weights
    mixed: object  # f32 [8, heads padded, features that are summed]
    items: object  # the tiles to be read
    count: object  # how many
    keys: tuple  # blocks that are scored
    values: tuple  # blocks that are summed
    scale: float

def open_cache(m, name, tiles, items, count, keys, values, scale):
    refs = (getattr(m, f"{name}_{part}") for part in Cache._fields[1:7])
    return Cache(tiles, *refs, items, count, keys, values, scale)

def kv_item(items, i):
    """(row, tile) of item i."""
    return items[i] >> 16, items[i] & 0xFFFF

def list_kv_items(m, items, count):
    """items: every tile with a token that an active row has beside its new one, row after row."""
    total = jnp.int32(0)
    for row in range(m.rows):

        def put(tile, base, row=row):
            items[base + tile] = (row << 16) | tile
            return base

        tiles = lax.div(m.positions[row] + KV_TILE - 1, KV_TILE)  # inactive (-1): 0
        total = lax.fori_loop(0, tiles, put, total) + tiles
    count[0] = total

def put_queries(kv, queries):
    """One f32 [8, n] a head -> [8, heads padded, n]."""
    none = [jnp.zeros_like(queries[0])] * (kv.queries.shape[1] - len(queries))
    kv.queries[...] = jnp.swapaxes(jnp.stack(queries + none), 0, 1).astype(bf16)

def put_token(kv, x):
    """The new token's features, f32 [8, blocks * 128]."""
    kv.token[...] = jnp.stack([bitcast(round_bf16(b), u32) for b in heads_of(x, LANES)])

def wide(parts):
    return jnp.concatenate(parts, axis=-1)

def see_token(m, kv):
    """A row's softmax begins with the new token itself; that of an inactive row mixes nothing."""
    kv.old[...] = jnp.zeros_like(kv.old)
    kv.softmax[1] = jnp.ones_like(kv.softmax[1])
    kv.mixed[...] = jnp.zeros_like(kv.mixed)
    for row in range(m.rows):
        block = [bitcast(kv.token[b, row : row + 1], f32) for b in range(kv.token.shape[0])]
        key, value = (wide([block[b] for b in part]) for part in (kv.keys, kv.values))
        score = jnp.sum(kv.queries[row].astype(f32) * key, axis=1, keepdims=True) * kv.scale
        kv.softmax[0, row] = jnp.broadcast_to(score, kv.softmax.shape[2:])
        value = jnp.where(m.positions[row] >= 0, value, 0.0)
        kv.mixed[row] = jnp.broadcast_to(value, kv.mixed.shape[1:])

def own_words(m, kv):
    """The words of the new tokens, each with the token before it or with none yet behind it."""
    for row in range(m.rows):
        odd, token = (m.positions[row] & 1) == 1, kv.token[:, row : row + 1]
        kv.word[row] = jnp.where(odd, token | (kv.old[row] & u32(0xFFFF)), token >> 16)

def kv_tile(m, kv, i):
    """(row, slot, tokens before the new one, listed?) of item i or the nearest listed."""
    at = jnp.clip(i, 0, kv.count[0] - 1)
    row, tile = kv_item(kv.items, at)
    return row, lax.rem(at, KV_SLOTS), m.positions[row] - tile * KV_TILE, at == i

def score_tile(m, kv, i):
    """f32 [heads padded, KV_TILE] of item i. Keeps the word that the new token may go into."""
    row, slot, old, *_ = kv_tile(m, kv, i)
    kv.old[row] = kv.tiles[slot, :, pl.ds(jnp.clip(old >> 1, 0, KV_TILE // 2 - 1), 1)]
    return dot_t(kv.queries[row], wide([bitcast(kv.tiles[slot, b], bf16) for b in kv.keys]))

def soften_tile(m, kv, i, scores):
    """(what its row's earlier weights fade by, sum of its own, its own): of the largest score."""
    row, _, old, listed = kv_tile(m, kv, i)
    token = lax.broadcasted_iota(i32, scores.shape, 1)
    scores = jnp.where(token < jnp.where(listed, old, 0), scores * kv.scale, MASKED)
    before = kv.softmax[0, row]
    after = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    highest = wide([after] * -(-KV_TILE // LANES))[:, :KV_TILE]
    weights, fade = jnp.exp(scores - highest), jnp.exp(before - after)
    kv.softmax[0, row] = after
    return fade, jnp.sum(weights, axis=1, keepdims=True), weights.astype(bf16)

def mix_tile(m, kv, i, fade, total, weights):
    """The tile's part of its row's result. Values beyond the old tokens are cleared: 0 * NaN."""
    row, slot, old, *_ = kv_tile(m, kv, i)
    low = 2 * lax.broadcasted_iota(i32, (KV_TILE // 2, LANES), 0)
    keep = jnp.where(low + 1 < old, u32(0xFFFFFFFF), jnp.where(low < old, u32(0xFFFF), u32(0)))
    mixed = dot(weights, wide([bitcast(kv.tiles[slot, b] & keep, bf16) for b in kv.values]))
    kv.softmax[1, row] = kv.softmax[1, row] * fade + total
    # at a row's first tile the new token's value fades by its weight, which is rounded like all
    # others
    fade = jnp.where(old == m.positions[row], round_bf16(fade), fade)
    kv.mixed[row] = kv.mixed[row] * wide([fade] * len(kv.values)) + mixed

def attend_batch(m, kv, batch):
    """Stage by stage: one after another, each tile would wait for the MXU and its maximum."""
    items = [batch * KV_BATCH + j for j in range(KV_BATCH)]
    scores = [score_tile(m, kv, i) for i in items]
    softened = [soften_tile(m, kv, i, s) for i, s in zip(items, scores)]
    for i, parts in zip(items, softened):
        mix_tile(m, kv, i, *parts)

def gqa_inputs(kv, q, k, v, head_dim, value_dim, size):
    """Queries and the new token; `size` KV heads lie side by side, their keys before their values.
    A head sits in the lanes of its own key, zeros elsewhere: one dot scores a group's heads."""
    heads, keys, values = heads_of(q, head_dim), heads_of(k, head_dim), heads_of(v, value_dim)
    width, share, queries, token = kv.queries.shape[-1], len(heads) // len(keys), [], []
    for h, head in enumerate(heads):
        at = h // share % size * head_dim
        queries.append(jnp.pad(head, ((0, 0), (at, width - at - head_dim))))
    for first in range(0, len(keys), size):
        group = keys[first : first + size] + values[first : first + size]
        group = jnp.concatenate(group, axis=1)
        token.append(pad_lanes(group, -(-group.shape[1] // LANES) * LANES))
    put_queries(kv, queries)
    put_token(kv, jnp.concatenate(token, axis=1))

def gqa_output(kv, heads, kv_heads, first, value_dim, size):
    """[8, heads * value_dim] f32; a group's values begin at lane `first` of its summed blocks."""
    mixed = jnp.swapaxes(kv.mixed[...] / wide([kv.softmax[1]] * len(kv.values)), 0, 1)
    share = heads // kv_heads
    rows, out = mixed.shape[0] // (kv_heads // size), []
    for h in range(heads):
        group, own = divmod(h, size * share)
        at = first + own // share * value_dim
        out.append(mixed[group * rows + own][:, at : at + value_dim])
    return jnp.concatenate(out, axis=1)

def column(x, rows):
    """[1, n] -> [rows, 1], zeros after the n."""
    shape = (rows, x.shape[1])
    here = lax.broadcasted_iota(i32, shape, 0) == lax.broadcasted_iota(i32, shape, 1)
    return jnp.sum(jnp.where(here, x, 0.0), axis=1, keepdims=True)

# ---- routed experts ------------------------------------------------------------------------------

class Section(NamedTuple):  # One matrix of an expert: bf16, two a word, panel after panel.
    at: int  # first u32 row in the slot
    k: int
    panels: int  # of 128 columns
    panel_rows: int
    scales_at: int
    scale_rows: int  # a panel
    runs: tuple  # of panels: each is one basic block, whose drains the next one hides

EXPERT_UP = Section(0, 2048, 6, 1024, 6144, 0, ((0, 1), (3, 4), (2,), (5,)))  # gate | up
EXPERT_DOWN = Section(6144, 384, 16, 192, 9216, 0, (range(16),))
LOCAL_EXPERTS = 32
EXPERT_SLOTS = 4
FIRST_EXPERTS = 2  # fetched before others: more at once would all come late
EXPERTS_AHEAD = 3  # on their way while one is computed

def first_expert(local):
    """The first of a rank's `local` experts; the ranks of one tensor-parallel group share them."""
    return lax.div(lax.axis_index("tp"), 2) * local

def lower_lanes(flags):
    """flags [8, n] bool -> f32 [8, n]: how many lower lanes of the row are set.
    A prefix sum is a product with a triangle; panels of 128 lanes are stacked to share one dot."""
    flags, n = jnp.where(flags, 1.0, 0.0), flags.shape[1]
    panels = heads_of(pad_lanes(flags, -(-n // LANES) * LANES), LANES)
    below, lane = (lax.broadcasted_iota(i32, (LANES, LANES), axis) for axis in (0, 1))
    triangle = jnp.where(below < lane, 1.0, 0.0).astype(bf16)
    inside = jnp.split(dot(jnp.concatenate(panels).astype(bf16), triangle), len(panels))
    whole = [jnp.sum(x, axis=1, keepdims=True) for x in panels]
    return jnp.concatenate([x + sum(whole[:i]) for i, x in enumerate(inside)], axis=1)[:, :n]

def merged(a, b, most):
    """The `most` largest of two falling runs of arrays, elementwise: a bitonic network."""
    step, none = 1 << (max(len(a), len(b)) - 1).bit_length(), [jnp.full_like(a[0], -jnp.inf)]
    a, b = a + none * (step - len(a)), none * (step - len(b)) + b[::-1]
    run = a + b if step < most else [jnp.maximum(x, y) for x, y in zip(a, b)]
    while step:
        for i in (i for i in range(len(run) - step) if not i & step):
            x, y = run[i], run[i + step]
            run[i], run[i + step] = jnp.maximum(x, y), jnp.minimum(x, y)
        step //= 2
    return run

def falling(run, most):
    """The `most` (a power of two) largest of a run of arrays, elementwise, in falling order."""
    half = len(run) // 2
    return merged(falling(run[:half], most), falling(run[half:], most), most) if half else run

def kth_largest(key, k):
    """f32 [8, 1]: the k-th largest of each row of key [8, n]. Whole vectors are sorted,
    elementwise, rows on the lanes: each turn of a search along the lanes would wait for the XLU."""
    most, count = 1 << (k - 1).bit_length(), -(-key.shape[1] // LANES)
    key = jnp.pad(key, ((0, 0), (0, -key.shape[1] % LANES)), constant_values=-jnp.inf)
    panels = falling(heads_of(key, LANES), count)[:count]  # the i-th: what is i-th in its lane
    turned = jnp.concatenate(panels, axis=0).T  # column 8 i + r: row r of the i-th
    run = falling(jnp.split(turned, LANES // ROWS_PADDED), most)
    for by in (4, 2, 1):
        run = merged(run, [jnp.roll(x, by, 0) for x in run], most)
    row, column = (lax.broadcasted_iota(i32, run[0].shape, axis) for axis in (0, 1))
    def on_rows(x, i):
        return jnp.max(jnp.where(column == row + 8 * i, x, -jnp.inf), axis=1, keepdims=True)

    # at most k lanes have one of the k largest, k / 2 have two, k / 3 three
    runs = [[on_rows(x, i) for x in run[: k // (i + 1)]] for i in range(min(len(panels), k))]
    while len(runs) > 1:
        runs = [*runs[2:], merged(*runs[:2], most)]
    return runs[0][k - 1]

def top_k_lanes(key, last, top_k):
    """bool [8, n]: each row's top_k largest, `last` the least of them; ties to the lowest lane."""
    above, tied = key > last, key == last
    need = top_k - jnp.sum(jnp.where(above, 1.0, 0.0), axis=1, keepdims=True)
    return above | (tied & (lower_lanes(tied) < need))

def want_experts(m, chosen, local):
    """Marks this rank's experts that any row chose, a bit each, and counts them.
    m.expert_words: a word whose bits say which of the others are not zero, then those."""
    here = lax.broadcasted_iota(i32, (1, chosen.shape[1]), 1) - first_expert(local)
    asked = jnp.max(jnp.where(chosen, 1.0, 0.0), axis=0, keepdims=True) > 0
    asked = asked & (here >= 0) & (here < local)
    m.expert_count[0] = jnp.sum(jnp.where(asked, 1.0, 0.0)).astype(i32)
    bits, live = jnp.where(asked, 1 << (here & 31), 0), i32(0)
    for i in range(-(-local // 32)):
        if i % ROWS_PADDED == 0:  # eight words at a time, a row each
            row = i + lax.broadcasted_iota(i32, (ROWS_PADDED, 1), 0)
            words = jnp.sum(jnp.where(here >> 5 == row, bits, 0), axis=1, keepdims=True)
        m.expert_words[1 + i] = word = words[i % ROWS_PADDED, 0]
        live |= (word != 0).astype(i32) << i
    m.expert_words[0] = live

def lowest_bit(x):
    return 31 - lax.clz(x & -x)

def take_expert(m, i):
    """The lowest expert that is still marked becomes number i of the list."""
    live = m.expert_words[0]
    at = lowest_bit(live)
    word = m.expert_words[1 + at]
    left = m.expert_words[1 + at] = word & (word - 1)
    m.expert_ids[i] = 32 * at + lowest_bit(word)
    m.expert_words[0] = jnp.where(left == 0, live & (live - 1), live)

def panel_part(m, slot, at, panel, panel_rows, skip, rows):
    """`rows` u32 rows of one panel of an expert slot, after the first `skip`."""
    start = at + panel * panel_rows + skip
    return m.expert_slot[slot, pl.ds(start, rows), :]

def expert_matmul(m, slot, s, lhs, write):
    """x W of one section: write(panel, f32 [8, 128]), run after run; lhs: [8, k]."""
    for run in s.runs:
        w = [panel_part(m, slot, s.at, panel, s.panel_rows, 0, s.panel_rows) for panel in run]
        w = jnp.concatenate([bitcast(part, bf16) for part in w], axis=1)
        y = dot(lhs[...], w)
        for panel, part in zip(run, heads_of(y, LANES)):
            write(panel, part)

def run_expert(m, i, route, y):
    """Expert i of the list, from its slot: y += route[:, e] * down(phi(gate, up))."""
    slot, width = lax.rem(i, EXPERT_SLOTS), EXPERT_DOWN.k
    def write_up(panel, gate_up):
        m.expert_up[:, lanes(panel * LANES, LANES)] = gate_up
    expert_matmul(m, slot, EXPERT_UP, m.expert_x, write_up)
    gate = round_bf16(m.expert_up[:, :width])
    up = round_bf16(m.expert_up[:, 384 : 384 + width])
    h = (silu(gate) * up).astype(bf16)
    m.expert_h[...] = h
    expert = first_expert(LOCAL_EXPERTS) + m.expert_ids[i]
    lane = lax.broadcasted_iota(i32, route.shape, 1)
    weight = jnp.sum(jnp.where(lane == expert, route[...], 0.0), axis=1, keepdims=True)
    def add_down(panel, down):
        y[:, lanes(panel * LANES, LANES)] += weight * down
    expert_matmul(m, slot, EXPERT_DOWN, m.expert_h, add_down)

# ---- copies --------------------------------------------------------------------------------------

def embed_copy(m, row):
    """The embedding row of row's token."""
    source = m.embedding.at[pl.ds(vocab_index(m, row) * EMBED_WORDS, EMBED_WORDS)]
    target = m.embed_words.at[:, row, :]
    return async_copy(source, target, m.embed_sem)

def cache_tile_copy(m, index, i):
    """Tile of item i, into its slot."""
    slot, (row, tile) = lax.rem(i, KV_SLOTS), kv_item(m.kv_items, i)
    first = pl.multiple_of(tile * (KV_TILE // 2), KV_TILE // 2)
    source = m.attention_cache.at[index, row, :, pl.ds(first, KV_TILE // 2), :]
    target = m.cache_tiles.at[slot]
    return async_copy(source, target, m.cache_tile_sem.at[slot])

def cache_word_copy(m, index, row):
    """The words of the row's new token, back into the cache."""
    source = m.cache_word.at[row]
    target = m.attention_cache.at[index, row, :, pl.ds(m.positions[row] >> 1, 1), :]
    return async_copy(source, target, m.cache_word_sem.at[row])

def expert_copy(m, index, i):
    """Number i of the layer's list of experts, into its slot."""
    slot = lax.rem(i, EXPERT_SLOTS)
    source, target = m.experts.at[index * LOCAL_EXPERTS + m.expert_ids[i]], m.expert_slot.at[slot]
    return async_copy(source, target, m.expert_sem.at[slot])

def tape_copy(m, g):
    """Chunk g of the tape into its ring slot."""
    slot = lax.rem(g, RING_DEPTH)
    first = pl.multiple_of(m.chunks[2 * g], 8)
    rows = pl.multiple_of(m.chunks[2 * g + 1], 8)
    source, target = m.tape.at[pl.ds(first, rows)], m.ring.at[slot, pl.ds(0, rows)]
    return async_copy(source, target, m.ring_sem.at[slot])

# ---- sub-layers ----------------------------------------------------------------------------------

def begin(m, g):
    """Embedding rows of the tokens; how far each kind's heads are turned."""
    for row in range(m.rows):
        pl.when(embed_here(m, row))(lambda: embed_copy(m, row).start())
    lax.fori_loop(0, RING_DEPTH, lambda i, _: tape_copy(m, i).start(), None)
    for row in range(m.rows):
        pl.when(embed_here(m, row))(lambda: embed_copy(m, row).wait())
    # -- embed
    m.embedded[...] = embedded_rows(m, 2048)
    await_peers(m)
    reduce_start(m, (CORE, CHIP), m.embedded[...])
    tape_copy(m, g).wait()  # attention.rope 0
    # -- attention.rope
    frequency = line(vector(m, g, 0, 8), 128)
    angle = rope_angles(m, frequency)
    m.attention_cos[...] = jnp.cos(angle)
    m.attention_sin[...] = jnp.sin(angle)
    tape_copy(m, g + RING_DEPTH).start()
    g += 1

    # the first layer's first tiles
    def first_cache_tile_copy(i, _):
        cache_tile_copy(m, m.facts[MIXER_INDEX], i).start()
    lax.fori_loop(0, jnp.minimum(m.kv_count[0], KV_SLOTS), first_cache_tile_copy, None)
    reduce_finish(m, (CORE, CHIP), (2048, m.embedded))
    # -- enter
    m.running[...] = m.embedded[...].astype(bf16)
    return g

def attention_mixer(m, layer, index, g):
    """Grouped-query attention, with a positional cache."""
    tape_copy(m, g).wait()  # mixer.norm 0
    # -- attention.norm
    m.h[...] = rms_norm(m.running[...].astype(f32), vector(m, g, 0, 8, bf16), 1e-06).astype(bf16)
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- attention.qkv
    def attention_qkv_block(i, g):
        w = panels(m, g, 0, 2048, 384)
        m.qkv_y[:, lanes(i * 384, 384)] = dot(m.h[...], w)
    g = stream(m, g, range(2), attention_qkv_block, turn=2)
    tape_copy(m, g).wait()  # q_norm 0, k_norm 8
    # -- attention.qk
    q, k = round_bf16(m.qkv_y[:, 0:512]), round_bf16(m.qkv_y[:, 512:640])
    q = round_bf16(norm_heads(q, line(vector(m, g, 0, 8, bf16), 128), 1e-06))
    k = round_bf16(norm_heads(k, line(vector(m, g, 8, 8, bf16), 128), 1e-06))
    cos, sin = m.attention_cos[...], m.attention_sin[...]
    q = rotate_halves(q, 128, 128, cos, sin)
    k = rotate_halves(k, 128, 128, cos, sin)
    m.q_rope[...] = q.astype(bf16)
    m.k_rope[...] = k.astype(bf16)
    # -- attention.attention
    kv = open_cache(m, "cache", m.cache_tiles, m.kv_items, m.kv_count, (0,), (1,), 128**-0.5)
    q, k = m.q_rope[...].astype(f32), m.k_rope[...].astype(f32)
    v = round_bf16(m.qkv_y[:, 640:768])
    gqa_inputs(kv, q, k, v, 128, 128, 1)
    see_token(m, kv)
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    def cache_batch(batch, _):
        for j in range(KV_BATCH):
            due = batch * KV_BATCH + j < m.kv_count[0]
            pl.when(due)(lambda: cache_tile_copy(m, index, batch * KV_BATCH + j).wait())
        attend_batch(m, kv, batch)
        for j in range(KV_BATCH):
            due = batch * KV_BATCH + j + KV_SLOTS < m.kv_count[0]
            pl.when(due)(lambda: cache_tile_copy(m, index, batch * KV_BATCH + j + KV_SLOTS).start())
    lax.fori_loop(0, lax.div(m.kv_count[0] + KV_BATCH - 1, KV_BATCH), cache_batch, None)
    own_words(m, kv)
    each_active_row(m, lambda row: cache_word_copy(m, index, row).start())
    m.attended[...] = gqa_output(kv, 4, 1, 0, 128, 1).astype(bf16)
    tape_copy(m, g).wait()  # o 0
    # -- attention.o
    m.o_y[...] = dot(m.attended[...], panels(m, g, 0, 512, 2048))
    reduce_start(m, (CORE, CHIP), m.o_y[...])
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    reduce_finish(m, (CORE, CHIP), (2048, m.o_y))
    # -- attention.add
    m.running[...] = (m.running[...].astype(f32) + round_bf16(m.o_y[...])).astype(bf16)
    each_active_row(m, lambda row: cache_word_copy(m, index, row).wait())
    return g

def moe_ffn(m, layer, index, g):
    """Routed experts, each distinct one fetched once."""
    tape_copy(m, g).wait()  # ffn.norm 0, router 8
    # -- moe.norm
    m.h[...] = rms_norm(m.running[...].astype(f32), vector(m, g, 0, 8, bf16), 1e-06).astype(bf16)
    # -- moe.router
    m.router_y[...] = dot(m.h[...], panels(m, g, 8, 2048, 128))
    # -- moe.route
    logits = m.router_y[...]
    score = jnp.exp(logits - jnp.max(logits, axis=1, keepdims=True))
    score = score / jnp.sum(score, axis=1, keepdims=True)
    chosen = top_k_lanes(score, kth_largest(score, 8), 8) & (m.position_column[...] >= 0)
    weight = jnp.where(chosen, score, 0.0)
    total = jnp.sum(weight, axis=1, keepdims=True)
    weight = weight / jnp.where(total > 0, total, 1.0)  # inactive rows: 0 / 1
    m.route[...] = weight
    want_experts(m, chosen, LOCAL_EXPERTS)
    g += 1
    # -- moe.experts
    def first_experts(i, _):
        take_expert(m, i)
        expert_copy(m, index, i).start()
    lax.fori_loop(0, jnp.minimum(m.expert_count[0], FIRST_EXPERTS), first_experts, None)
    lax.fori_loop(FIRST_EXPERTS, m.expert_count[0], lambda i, _: take_expert(m, i), None)
    more = jnp.minimum(m.expert_count[0], EXPERTS_AHEAD) - FIRST_EXPERTS
    lax.fori_loop(0, more, lambda i, _: expert_copy(m, index, FIRST_EXPERTS + i).start(), None)
    m.routed[...] = jnp.zeros_like(m.routed)
    m.expert_x[...] = m.h[...]
    def routed_expert(i, _):
        expert_copy(m, index, i).wait()
        due = i + EXPERTS_AHEAD < m.expert_count[0]
        pl.when(due)(lambda: expert_copy(m, index, i + EXPERTS_AHEAD).start())
        run_expert(m, i, m.route, m.routed)
    lax.fori_loop(0, m.expert_count[0], routed_expert, None)
    reduce_start(m, (CORE, CHIP), m.routed[...])
    tape_copy(m, g + RING_DEPTH - 1).start()

    # the next layer's first tiles
    def first_cache_tile_copy(i, _):
        cache_tile_copy(m, m.facts[(layer + 1) * FACTS + MIXER_INDEX], i).start()

    trips = jnp.where(layer + 1 < LAYERS, jnp.minimum(m.kv_count[0], KV_SLOTS), 0)
    lax.fori_loop(0, trips, first_cache_tile_copy, None)
    reduce_finish(m, (CORE, CHIP), (2048, m.routed))
    # -- moe.add
    m.running[...] = (m.running[...].astype(f32) + round_bf16(m.routed[...])).astype(bf16)
    return g

def end(m, g):
    """Final norm, logits of this rank's vocabulary, greedy token."""
    tape_copy(m, g).wait()  # norm 0
    # -- end.norm
    m.h[...] = rms_norm(m.running[...].astype(f32), vector(m, g, 0, 8, bf16), 1e-06).astype(bf16)
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- head
    m.logits[...] = jnp.zeros_like(m.logits)
    def head_block(i, g):
        k, n = lax.rem(i, 4), lax.div(i, 4)
        x = m.h[:, lanes(k * 512, 512)]
        w = panels(m, g, 0, 512, 1920)
        m.logits[:, lanes(n * 1920, 1920)] += dot(x, w)
    g = stream(m, g, range(22), head_block)
    g = stream(m, g, range(22, 40), head_block, refills=0)
    # -- greedy
    first = lax.axis_index("tp") * 18992
    top, token = greedy_local(m.logits[:, :18992], first, jnp.clip(151936 - first, 0, 18992))
    m.best_logit[...], m.best_token[...] = top, token
    gather_start(m, (ALL,), m.best_logit[...], m.best_token[...])
    gather_finish(m, (ALL,), (1, m.best_logits), (1, m.best_tokens))
    tops = m.best_logits[...]
    best = tops == jnp.max(tops, axis=1, keepdims=True)
    token = jnp.min(jnp.where(best, m.best_tokens[...], NO_TOKEN), axis=1, keepdims=True)
    m.token[...] = jnp.broadcast_to(token.astype(i32), (ROWS_PADDED, LANES))
    return g

def decode_layer(m, layer, g):
    """One layer: its mixer, then its ffn, as the table says."""
    index = m.facts[layer * FACTS + MIXER_INDEX]
    g = attention_mixer(m, layer, index, g)
    index = m.facts[layer * FACTS + FFN_INDEX]
    return moe_ffn(m, layer, index, g)

def decode_kernel(m):
    """The whole step. `m` has every place as an attribute, and `rows`, the number of rows."""
    open_exchanges(m)
    fill_positions(m)
    list_kv_items(m, m.kv_items, m.kv_count)
    g = begin(m, 0)
    g = lax.fori_loop(0, LAYERS, lambda layer, g: decode_layer(m, layer, g), g)
    end(m, g)

# ---- places --------------------------------------------------------------------------------------

OPERANDS = {  # name: where
    "tokens": pltpu.SMEM,  # token id of each row
    "positions": pltpu.SMEM,  # position of each row; -1: inactive
    "chunks": pltpu.SMEM,  # first row and rows of each chunk of the tape
    "facts": pltpu.SMEM,  # per-layer data, FACTS words a layer
    "tape": pl.ANY,  # u32 [695824, 128]
    "experts": pl.ANY,  # u32 [1536, 9216, 128]
    "embedding": pl.ANY,  # u32 [151936, 128]
}

def states(rows):
    """HBM arrays that the step reads and updates in place, of one rank."""
    array = jax.ShapeDtypeStruct
    return {
        "attention_cache": array((48, rows, 2, 2048, 128), u32)  # two tokens a word
    }

def outputs(rows):
    return {
        "logits": jax.ShapeDtypeStruct((8, 19200), f32),  # logits of this rank's vocabulary
        "token": jax.ShapeDtypeStruct((8, 128), i32),  # the greedy token of each row, on every lane
    }

def places(rows):
    """VMEM, SMEM and semaphores of one core."""
    vmem, smem, dma = pltpu.VMEM, pltpu.SMEM, pltpu.SemaphoreType.DMA
    return {
        "embed_words": vmem((8, rows, 128), u32),  # embedding rows, two features a word
        "embed_sem": dma,  # embedding rows
        "embedded": vmem((8, 2048), f32),  # embed
        "attention_cos": vmem((8, 128), f32),  # rope table, all layers
        "attention_sin": vmem((8, 128), f32),  # rope table, all layers
        "running": vmem((8, 2048), bf16),  # the residual stream
        "h": vmem((8, 2048), bf16),  # rms norm
        "qkv_y": vmem((8, 768), f32),  # q | k | v, not rounded
        "q_rope": vmem((8, 512), bf16),  # qk norm rope
        "k_rope": vmem((8, 128), bf16),  # qk norm rope
        "cache_tiles": vmem((16, 2, 128, 128), u32),  # tiles of the cache, one a slot
        "cache_token": vmem((2, 8, 128), u32),  # the new token of each row
        "cache_old": vmem((rows, 2, 1, 128), u32),  # the words that it goes into
        "cache_word": vmem((rows, 2, 1, 128), u32),  # its words, to be written back
        "cache_queries": vmem((8, 8, 128), bf16),  # queries
        "cache_softmax": vmem((2, 8, 8, 128), f32),  # largest score, sum of weights
        "cache_mixed": vmem((8, 8, 128), f32),  # weighed values
        "cache_tile_sem": dma((16,)),  # one a tile slot
        "cache_word_sem": dma((rows,)),  # new words out
        "kv_items": smem((128,), i32),  # row << 16 | tile of every tile to be read
        "kv_count": smem((1,), i32),  # how many
        "attended": vmem((8, 512), bf16),  # gqa attention
        "o_y": vmem((8, 2048), f32),  # out, not rounded
        "router_y": vmem((8, 128), f32),  # router_logits, not rounded
        "route": vmem((8, 128), f32),  # route
        "expert_slot": vmem((4, 9216, 128), u32),  # experts, one a slot
        "expert_sem": dma((4,)),  # one an expert slot
        "expert_ids": smem((32,), i32),  # local ids of the layer's distinct experts
        "expert_words": smem((2,), i32),  # bits of those that are not yet in the list
        "expert_count": smem((1,), i32),  # how many
        "expert_up": vmem((8, 768), f32),  # gate | up of one expert
        "expert_x": vmem((8, 2048), bf16),  # left operand
        "expert_h": vmem((8, 384), bf16),  # left operand
        "routed": vmem((8, 2048), f32),  # routed experts
        "best_logit": vmem((8, 1), f32),  # the largest logit here
        "best_token": vmem((8, 1), f32),  # its token
        "best_logits": vmem((8, 8), f32),  # best_logit of all ranks
        "best_tokens": vmem((8, 8), f32),  # best_token of all ranks
        "ring": vmem((18, 4096, 128), u32),  # chunks of the tape, one a slot
        "ring_sem": dma((18,)),  # one a ring slot
        "position_column": vmem((8, 1), i32),  # positions as a column; padding rows are inactive
        "inbox_core": vmem((2, 2, rows, 2048), u32),  # by half, member; peers write here
        "inbox_chip": vmem((2, 4, rows, 2048), u32),  # by half, member; peers write here
        "inbox_all": vmem((2, 8, rows, 128), u32),  # by half, member; peers write here
        "phase": smem((3,), i32),  # uses of each stage so far
        "sent": dma,  # messages on their way out
        "arrived": dma((2, 3)),  # messages that came in: half, stage
    }

def decode_call(rows, operands, state, interpret=False):
    """The pallas_call on one rank -> (outputs, states); the states are updated in place.
    On the chip the kernel writes to the states where they are, and they are handed on: as aliased
    outputs, XLA would copy them on every call. The interpreter gives back outputs only."""
    out, held, scratch = outputs(rows), states(rows), places(rows)
    aliased = held if interpret else {}
    given = [f"{n}_in" if interpret else n for n in held]
    names = [*OPERANDS, *given, *out, *aliased, *scratch]
    def body(*refs):
        decode_kernel(SimpleNamespace(rows=rows, **dict(zip(names, refs))))

    hbm, vmem = (pl.BlockSpec(memory_space=s) for s in (pltpu.HBM, pltpu.VMEM))
    limits = dict(vmem_limit_bytes=64 * 2**20, collective_id=0, disable_bounds_checks=True)
    got = pl.pallas_call(
        body,
        name="qwen3_30b_a3b_decode",
        out_shape=[*out.values(), *aliased.values()],
        in_specs=[pl.BlockSpec(memory_space=s) for s in OPERANDS.values()] + [hbm] * len(held),
        out_specs=[vmem] * len(out) + [hbm] * len(aliased),
        scratch_shapes=list(scratch.values()),
        input_output_aliases={len(OPERANDS) + i: len(out) + i for i in range(len(aliased))},
        compiler_params=pltpu.CompilerParams(has_side_effects=True, **limits),
        interpret=interpret,
    )(*[operands[n] for n in OPERANDS], *[state[n] for n in held])
    return dict(zip(out, got)), dict(zip(held, got[len(out) :])) if interpret else state
