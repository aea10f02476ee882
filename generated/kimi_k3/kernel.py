"""kimi_k3: one decode step as one Pallas program, for 32 tpu7x cores.

Written by `mkgen build`; change the spec or the templates, not this file. Read it from the bottom:
`decode_kernel` runs all 93 layers in one loop; a layer calls one function a sub-layer.

Conventions. `m` holds every place: HBM arrays, VMEM buffers, SMEM tables, semaphores; `places` says
what each is for. Weights lie on one tape of u32 rows in the order of their use; `g` counts the
chunks of it that have been read. Chunk g waits in ring slot g mod RING_DEPTH; when it has been read
for the last time, chunk g + RING_DEPTH is started into its slot. Activations are [8, width]: decode
rows, padded to a sublane tile. `layer` counts layers, `index` earlier layers of the same kind.
Values and sums are f32: a product takes two bf16 terms of a value, a positional cache keeps bf16.
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
LAYERS, RING_DEPTH = 93, 14
EMBED_WORDS = 28  # u32 rows of one token's embedding
VOCAB_RUN = 5120  # tokens of the vocabulary on one rank
FACTS = 6  # words a layer in the table m.facts:
MIXER, MIXER_INDEX, FFN, FFN_INDEX = range(4)
SNAPSHOTS, OPENS_BLOCK = range(4, FACTS)

# ---- arithmetic ----------------------------------------------------------------------------------

def lanes(start, width):
    """A run of lanes that starts at a multiple of 128."""
    return pl.ds(start if isinstance(start, int) else pl.multiple_of(start, LANES), width)

def terms(x):
    """f32 [r, n] -> f32 [2 r, n]: what bf16 holds of each number, then what it leaves."""
    high = bitcast(bitcast(x, u32) & u32(0xFFFF0000), f32)
    return jnp.concatenate([high, x - high])

def dot(x, w, contract=0):
    """[8, k] x [k, n] -> [8, n], summed in f32. An f32 x goes as two bf16 terms, in one pass."""
    dims = (((1,), (contract,)), ((), ()))
    split = x if x.dtype == bf16 else terms(x).astype(bf16)
    y = lax.dot_general(split, w, dims, preferred_element_type=f32)
    return y if x.dtype == bf16 else sum(jnp.split(y, 2))

def dot_t(x, w):
    """[8, k] x [n, k] -> [8, n]."""
    return dot(x, w, contract=1)

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

def per_head(x, head_dim):
    """[r, heads] -> [r, heads * head_dim]: each head's number on all its lanes."""
    wide = (x.shape[0], head_dim)
    return jnp.concatenate([jnp.broadcast_to(h, wide) for h in heads_of(x, 1)], axis=1)

def situ(x, beta):
    return beta * jnp.tanh(x / beta) * jax.nn.sigmoid(x)

def open_block(m, layer):
    """Where the layer opens a block, the running sum is kept as a snapshot and begins anew."""
    @pl.when(m.facts[layer * FACTS + OPENS_BLOCK] == 1)
    def _():
        m.snapshots[m.facts[layer * FACTS + SNAPSHOTS] - 1] = m.running[...]
        m.running[...] = jnp.zeros_like(m.running)

def take_term(m, g, v, eps):
    """One more term v [8, n] of a softmax mixture, scored (sum v w) rsqrt(mean v^2 + eps); w begins
    chunk g -> highest score, sum of weights, those of past and of v, each [8, 128]; sum of v^2."""
    width, squares = v.shape[1], sum_lanes(v * v)
    w = line(bitcast(tape_rows(m, g, 0, -(-width // LANES)), f32), width)
    score = sum_lanes(v * w) * lax.rsqrt(squares / width + eps)
    top, total, _ = jnp.split(m.past_sums[...], 3, axis=1)
    highest = jnp.maximum(top, score)
    past, now = jnp.exp(top - highest), jnp.exp(score - highest)
    return highest, past * total + now, past, now, squares

def weighed(m, v, past, now):
    """past * m.past + now * v; weights on 128 lanes."""
    pairs = ((a, b, a.shape[1]) for a, b in zip(heads_of(m.past[...], LANES), heads_of(v, LANES)))
    return jnp.concatenate([a * past[:, :n] + b * now[:, :n] for a, b, n in pairs], axis=1)

def weigh_past(m, g, live, eps):
    """The next mixture but for its newest term: past = sum of exp(score - highest) v over the first
    `live` snapshots (no other is written); past_sums = highest | sum of weights | of past^2."""
    m.past[...] = jnp.zeros_like(m.past)
    m.past_sums[...] = jnp.full(m.past_sums.shape, -1e30)  # sums that weigh nothing
    def one(p, _):
        v = m.snapshots[p].astype(f32)
        highest, total, past, now, _ = take_term(m, g, v, eps)
        m.past_sums[:, : 2 * LANES] = jnp.concatenate([highest, total], axis=1)
        m.past[...] = weighed(m, v, past, now)
    lax.fori_loop(0, live, one, None)
    squares = sum_lanes(m.past[...] * m.past[...])
    m.past_sums[:, 2 * LANES :] = jnp.broadcast_to(squares, (ROWS_PADDED, LANES))

def mixture_norm(m, g, gain, eps, norm_eps):
    """RMS norm of the softmax mixture of the snapshots, as `weigh_past` left them, and the running
    sum; its mean square follows from its terms, whose sums along the lanes come all at once."""
    v, width = m.running[...].astype(f32), m.running.shape[1]
    crossed = sum_lanes(m.past[...] * v)
    _, total, past, now, squares = take_term(m, g, v, eps)
    square = past * past * m.past_sums[:, 2 * LANES :] + now * (2 * past * crossed + now * squares)
    scale = lax.rsqrt(jnp.maximum(square / width, 0.0) + norm_eps * total * total)
    return weighed(m, v, past * scale, now * scale) * line(gain, width)

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

def columns(m, g, at, k, n):
    """bf16 [n, k]: a matrix of odd width, stored with k on the lanes in blocks of 128."""
    return side_by_side(tape_rows(m, g, at, k * n // (2 * LANES)), k // LANES)

def next_chunk(m, g):
    """Chunk g has been read: its slot is refilled; waits for the chunk behind it."""
    tape_copy(m, g + RING_DEPTH).start()
    tape_copy(m, g + 1).wait()
    return g + 1

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

ALL = Stage(0, 32, 1)
STAGES = (ALL,)

def member(stage):
    """My place among the ranks of this stage."""
    return lax.rem(lax.div(lax.axis_index("tp"), stage.stride), stage.size)

def peer(stage, step):
    """Another rank of the stage for each step."""
    return lax.axis_index("tp") ^ (step * stage.stride)

def inbox(m, stage):
    return (m.inbox_all,)[stage.number]

def outbox(m, stage):
    return (m.outbox_all,)[stage.number]

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
    if apart:
        source = outbox(m, stage).at[member(stage) ^ step, :, :wide]
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

def send_runs(m, stage, xs):
    """Each x f32 [8, members * n]: member i of the stage gets run i."""
    me = member(stage)
    for i in range(stage.size):
        words = on_wire(m, [jnp.split(x, stage.size, axis=1)[i] for x in xs])
        width = words.shape[1]
        outbox(m, stage)[i, :, :width] = words
    inbox(m, stage)[half(m, stage), me, :, :width] = outbox(m, stage)[me, :, :width]
    for step in range(1, stage.size):
        message(m, stage, width, step, apart=True).start()

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

def scatter_start(m, path, *xs):
    """Each x f32 [8, up to ranks * n] is this rank's term of a sum: rank r gets run r of n."""
    ranks = functools.reduce(lambda n, stage: n * stage.size, path, 1)
    send_runs(m, path[0], [pad_lanes(x, -(-x.shape[1] // ranks) * ranks) for x in xs])

def scatter_finish(m, path, *ys):
    """y [8, width] = this rank's run of the sum over all ranks, for each (width, y)."""
    runs = functools.reduce(lambda n, stage: n * stage.size, path[1:], 1)
    for i, stage in enumerate(path):
        wide = [(runs * width, y) for width, y in ys]
        found = receive(m, stage, sum(n for n, _ in wide), apart=True)
        totals = [functools.reduce(jnp.add, terms) for terms, _ in columns_of(found, wide)]
        if path[i + 1 :]:
            send_runs(m, path[i + 1], totals)
            runs //= path[i + 1].size
    for x, (_, y) in zip(totals, ys):
        y[...] = pad_rows(x)

def open_exchanges(m):
    """Counters to zero; tells every rank that writes here that this one is in the kernel."""
    for stage in STAGES:
        m.phase[stage.number] = 0
        for step in range(1, stage.size):
            pl.semaphore_signal(pltpu.get_barrier_semaphore(), 1, device_id=(peer(stage, step),))

def await_peers(m):
    """Before the first message: every rank that it may go to is in this kernel."""
    pl.semaphore_wait(pltpu.get_barrier_semaphore(), sum(stage.size - 1 for stage in STAGES))

# ---- linear recurrences --------------------------------------------------------------------------

def l2_heads(x, size, eps):
    """Each head divided by its length."""
    unit = [h * lax.rsqrt(jnp.sum(h * h, axis=1, keepdims=True) + eps) for h in heads_of(x, size)]
    return jnp.concatenate(unit, axis=1)

def short_conv(x, old, w, position, taps, bias=0.0):
    """silu(bias + sum over taps of w * input), and the shifted window.
    x [8, n]; old [taps - 1, 8, n], oldest first; w: tap by tap, each padded to whole rows."""
    n, rows = x.shape[1], -(-x.shape[1] // LANES)
    window = jnp.where(position > 0, old, 0.0)  # at position 0 memory is not trusted
    inputs = [*window, x]
    total = sum((inputs[t] * line(w[t * rows : (t + 1) * rows], n) for t in range(taps)), bias)
    shifted = jnp.where(position >= 0, jnp.stack(inputs[1:]), old)
    return jax.nn.silu(total), shifted

def by_block(blocks, *parts):
    """[8, blocks * n] each -> [blocks, 8, all n]: a block's share of every part."""
    shares = zip(*(jnp.split(x, blocks, axis=1) for x in parts))
    return jnp.stack([jnp.concatenate(share, axis=1) for share in shares])

def key_columns(x, key, each):
    """[1, heads * lanes of a key] -> [key, heads * each]: each vector down its lanes."""
    heads, wide = heads_of(x, -(-key // LANES) * LANES), -(-each // LANES)
    squares = [jnp.broadcast_to(h[:, :key], (LANES, key)).T for h in heads]
    return jnp.concatenate([jnp.concatenate([s] * wide, axis=1)[:, :each] for s in squares], axis=1)

def delta_rule(q, k, decay, v, beta, s, clean):
    """S <- decay S; S <- S + k (x) beta (v - S^T k); returns S^T q [1, n]. A row's block of heads;
    s: ref [key, n]; q, k [key, n]; v, beta [1, n]; decay either."""
    out = []
    parts = zip(*(heads_of(x, LANES) for x in (q, k, decay, v, beta)))
    for i, (q, k, decay, v, beta) in enumerate(parts):
        here = slice(i * LANES, (i + 1) * LANES)
        new = jnp.where(clean, 0.0, s[:, here]) * decay
        new += k * (beta * (v - jnp.sum(new * k, axis=0, keepdims=True)))
        out.append(jnp.sum(new * q, axis=0, keepdims=True))
        s[:, here] = new
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
    kv.queries[...] = jnp.swapaxes(jnp.stack(queries + none), 0, 1)

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
    return fade, jnp.sum(weights, axis=1, keepdims=True), weights

def mix_tile(m, kv, i, fade, total, weights):
    """The tile's part of its row's result. Values beyond the old tokens are cleared: 0 * NaN."""
    row, slot, old, *_ = kv_tile(m, kv, i)
    low = 2 * lax.broadcasted_iota(i32, (KV_TILE // 2, LANES), 0)
    keep = jnp.where(low + 1 < old, u32(0xFFFFFFFF), jnp.where(low < old, u32(0xFFFF), u32(0)))
    mixed = dot(weights, wide([bitcast(kv.tiles[slot, b] & keep, bf16) for b in kv.values]))
    kv.softmax[1, row] = kv.softmax[1, row] * fade + total
    kv.mixed[row] = kv.mixed[row] * wide([fade] * len(kv.values)) + mixed

def attend_batch(m, kv, batch):
    """Stage by stage: one after another, each tile would wait for the MXU and its maximum."""
    items = [batch * KV_BATCH + j for j in range(KV_BATCH)]
    scores = [score_tile(m, kv, i) for i in items]
    softened = [soften_tile(m, kv, i, s) for i, s in zip(items, scores)]
    for i, parts in zip(items, softened):
        mix_tile(m, kv, i, *parts)

def mla_queries(kv, heads, k_up, nope_dim):
    """Query heads in the latent (q_nope k_up^T), beside their part for the shared key."""
    out = []
    for q, w in zip(heads, k_up):
        key = [q[:, nope_dim:].astype(f32)] if q.shape[1] > nope_dim else []
        both = jnp.concatenate([dot_t(q[:, :nope_dim], w), *key], axis=1)
        out.append(pad_lanes(both, kv.queries.shape[2]))
    return out

def mla_output(kv, v_up, first):
    """Mixed latents of the heads from `first` on, out of the latent: f32 [8, v_dim] a head."""
    mixed = jnp.swapaxes(kv.mixed[...] / wide([kv.softmax[1]] * len(kv.values)), 0, 1)
    out = [dot(mixed[h][:, : w.shape[0]], w) for h, w in enumerate(v_up, first)]
    return jnp.concatenate(out, axis=1)

# ---- routed experts ------------------------------------------------------------------------------

class Format(NamedTuple):  # How weights are stored, and how they are multiplied.
    codes: object  # dtype
    per_word: int
    group: int  # k rows that share a scale

class Section(NamedTuple):  # A matrix or a block of one: codes, then scales, panel after panel.
    format: Format
    at: int  # first u32 row
    k: int
    panels: int  # of 128 columns
    scales_at: int
    scale_rows: int  # a panel
    runs: tuple  # of panels: each is one basic block, whose drains the next one hides

MXFP4 = Format(jnp.float4_e2m1fn, 8, 32)
EXPERT_UP = Section(MXFP4, 0, 3584, 6, 2688, 28, ((0, 1, 3, 4), (2, 5)))  # gate | up
EXPERT_DOWN = Section(MXFP4, 2856, 384, 28, 4200, 3, (range(28),))
LOCAL_EXPERTS = 224
EXPERT_SLOTS = 4
FIRST_EXPERTS = 2  # fetched before others: more at once would all come late
EXPERTS_AHEAD = 3  # on their way while one is computed
DEPTH = 256  # k rows of one dot: the depth of the MXU

def first_expert(local):
    """The first of a rank's `local` experts; the ranks of one tensor-parallel group share them."""
    return lax.div(lax.axis_index("tp"), 8) * local

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
    """Marks this rank's experts that any row chose, four bits each, 8 + the row if it is alone.
    m.expert_words: a word whose bits say which of the others are not zero, then those."""
    here = lax.broadcasted_iota(i32, (1, chosen.shape[1]), 1) - first_expert(local)
    rows = jnp.sum(jnp.where(chosen, 1.0, 0.0), axis=0, keepdims=True)
    asked = (rows > 0) & (here >= 0) & (here < local)
    m.expert_count[0] = jnp.sum(jnp.where(asked, 1.0, 0.0)).astype(i32)
    row = jnp.where(chosen, lax.broadcasted_iota(i32, chosen.shape, 0), 0)
    mark = jnp.where(rows == 1, 8 + jnp.sum(row, axis=0, keepdims=True), 1)
    bits, live = jnp.where(asked, mark << 4 * (here & 7), 0), i32(0)
    for i in range(-(-local // 8)):
        if i % ROWS_PADDED == 0:  # eight words at a time, a row each
            row = i + lax.broadcasted_iota(i32, (ROWS_PADDED, 1), 0)
            words = jnp.sum(jnp.where(here >> 3 == row, bits, 0), axis=1, keepdims=True)
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
    first = lowest_bit(word) & ~3
    left = m.expert_words[1 + at] = word & ~(15 << first)
    m.expert_ids[i], m.taker[i] = 8 * at + (first >> 2), (word >> first & 15) - 8
    m.expert_words[0] = jnp.where(left == 0, live & (live - 1), live)

def spread(m, left, x, f):
    """x [8, k] -> left[c], 256 of k each, block-diagonal: a row keeps the columns of one group.
    One dot over it gives the sum of each group by itself, to be scaled."""
    for c, part in enumerate(heads_of(x, DEPTH)):
        part, width = terms(part), part.shape[1]
        group = lax.broadcasted_iota(i32, (DEPTH // f.group, width), 1) // f.group
        own = group == lax.broadcasted_iota(i32, group.shape, 0)
        lines = [r + t for r in range(min(m.rows, x.shape[0])) for t in (0, x.shape[0])]
        blocks = [jnp.where(own, part[j : j + 1], 0.0) for j in lines]
        stack = jnp.concatenate(blocks).astype(bf16)
        left[c, : stack.shape[0], :width] = stack

def sublane_sums(xs, lines=8):
    """Up to 8 of [8, n] -> [8, n]: row j is the sum of the j-th's rows, in one order for all.
    From row `lines` on they are zero."""
    for by in (1, 2, 4):
        if len(xs) == 1:  # the rows that count are lower ones
            xs = [xs[0] + jnp.roll(xs[0], -by, 0)] if by < lines else xs
            continue
        lower = lax.broadcasted_iota(i32, xs[0].shape, 0) & by == 0
        pairs = zip(xs[::2], [*xs[1::2], xs[-1]])
        xs = [jnp.where(lower, a + jnp.roll(a, -by, 0), b + jnp.roll(b, by, 0)) for a, b in pairs]
    return xs[0]

def coded_matmul(m, slots, slot, s, left, write, rows=0):
    """x W of the section s in slots[slot], of `rows` rows or all: write(panel, f32 [8, 128])."""
    f, rows, groups = s.format, rows or m.rows, DEPTH // s.format.group
    for run in s.runs:

        def rows_of(at, each, skip, count):
            starts = [at + panel * each + skip for panel in run]
            return jnp.concatenate([slots[slot, pl.ds(a, count), :] for a in starts], axis=1)
        words = rows_of(s.scales_at, s.scale_rows, 0, s.scale_rows)
        scales = bitcast(bitcast(words, jnp.uint8).astype(u32) << 23, f32)  # an exponent
        scales = jnp.pad(scales, ((0, -scales.shape[0] % groups), (0, 0)))
        totals = [0.0] * rows
        for c in range(-(-s.k // DEPTH)):
            depth = min(DEPTH, s.k - c * DEPTH)
            words = rows_of(s.at, s.k // f.per_word, c * DEPTH // f.per_word, depth // f.per_word)
            w = bitcast(words, f.codes).astype(jnp.float8_e4m3fn)
            y = dot(left[c, : groups * 2 * rows, :depth], w)
            for j, part in enumerate(jnp.split(y, rows)):
                totals[j] += sum(jnp.split(part, 2)) * scales[c * groups :][:groups]
        y = sublane_sums(totals, -(-s.k // f.group))
        if rows == 1 < m.rows:  # whichever row it is
            y = jnp.broadcast_to(y[:1], y.shape)
        for panel, part in zip(run, heads_of(y, LANES)):
            write(panel, part)

def run_expert(m, i, route, y, alone=False):
    """Expert i of the list, for one row or all: y += route[:, e] * down(phi(gate, up))."""
    slot, width = lax.rem(i, EXPERT_SLOTS), EXPERT_DOWN.k
    row, rows = m.taker[i], 1 if alone else m.rows
    left = m.expert_x.at[:, pl.ds(pl.multiple_of(row * 16, 16), 16)] if alone else m.expert_x
    def write_up(panel, gate_up):
        m.expert_up[:, lanes(panel * LANES, LANES)] = gate_up
    coded_matmul(m, m.expert_slot, slot, EXPERT_UP, left, write_up, rows=rows)
    gate = m.expert_up[:, :width]
    up = m.expert_up[:, 384 : 384 + width]
    h = situ(gate, 4.0) * (25.0 * jnp.tanh(up / 25.0))
    spread(m, m.expert_h, h[:1] if alone else h, MXFP4)
    expert = first_expert(LOCAL_EXPERTS) + m.expert_ids[i]
    lane = lax.broadcasted_iota(i32, route.shape, 1)
    weight = jnp.sum(jnp.where(lane == expert, route[...], 0.0), axis=1, keepdims=True)
    def add_down(panel, down):
        y[:, lanes(panel * LANES, LANES)] += jnp.where(weight != 0, weight * down, 0.0)
    coded_matmul(m, m.expert_slot, slot, EXPERT_DOWN, m.expert_h, add_down, rows=rows)

# ---- copies --------------------------------------------------------------------------------------

def embed_copy(m, row):
    """The embedding row of row's token."""
    source = m.embedding.at[pl.ds(vocab_index(m, row) * EMBED_WORDS, EMBED_WORDS)]
    target = m.embed_words.at[:, row, :]
    return async_copy(source, target, m.embed_sem)

def window_read(m, index):
    """The layer's convolution window, in."""
    return async_copy(m.kda_window.at[index], m.window, m.window_in)

def window_write(m, index):
    """The layer's convolution window, out."""
    return async_copy(m.window, m.kda_window.at[index], m.window_out)

def matrix_read(m, index, row):
    """A row's recurrent matrices, in."""
    return async_copy(m.kda_matrix.at[index, row], m.matrix.at[row], m.matrix_in.at[row])

def matrix_write(m, index, row):
    """A row's recurrent matrices, out."""
    return async_copy(m.matrix.at[row], m.kda_matrix.at[index, row], m.matrix_out.at[row])

def cache_tile_copy(m, index, i):
    """Tile of item i, into its slot."""
    slot, (row, tile) = lax.rem(i, KV_SLOTS), kv_item(m.kv_items, i)
    first = pl.multiple_of(tile * (KV_TILE // 2), KV_TILE // 2)
    source = m.mla_cache.at[index, row, :, pl.ds(first, KV_TILE // 2), :]
    target = m.cache_tiles.at[slot]
    return async_copy(source, target, m.cache_tile_sem.at[slot])

def cache_word_copy(m, index, row):
    """The words of the row's new token, back into the cache."""
    source = m.cache_word.at[row]
    target = m.mla_cache.at[index, row, :, pl.ds(m.positions[row] >> 1, 1), :]
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
    """Embedding rows of the tokens."""
    for row in range(m.rows):
        pl.when(embed_here(m, row))(lambda: embed_copy(m, row).start())
    lax.fori_loop(0, RING_DEPTH, lambda i, _: tape_copy(m, i).start(), None)
    for row in range(m.rows):
        pl.when(embed_here(m, row))(lambda: embed_copy(m, row).wait())
    # -- embed
    m.embedded[...] = embedded_rows(m, 7168)
    await_peers(m)
    scatter_start(m, (ALL,), m.embedded[...])
    scatter_finish(m, (ALL,), (224, m.embedded_run))
    gather_start(m, (ALL,), m.embedded_run[...])
    gather_finish(m, (ALL,), (224, m.embedded))
    # -- enter
    m.running[...] = m.embedded[...]
    tape_copy(m, g).wait()  # the next sub-layer's
    # -- begin.past
    weigh_past(m, g, 0, 1e-05)
    return g

def kda_mixer(m, layer, index, g):
    """Linear recurrence: in each head the delta rule, then norm and gate."""
    window_read(m, index).start()
    each_active_row(m, lambda row: matrix_read(m, index, row).start())
    # -- mixer_mixture: residual.mixer 0, mixer.norm 56, f_a 88
    m.h[...] = mixture_norm(m, g, vector(m, g, 56, 32, bf16), 1e-05, 1e-05)
    # -- kda.f_a
    m.f_a_y[...] = dot(m.h[...], panels(m, g, 88, 7168, 128))
    g = next_chunk(m, g)  # b 0, f_b 448
    # -- kda.b
    m.b_y[...] = dot_t(m.h[...], columns(m, g, 0, 7168, 16))
    # -- kda.f_b
    m.f_b_y[...] = dot(m.f_a_y[...], panels(m, g, 448, 128, 384))
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- kda.qkvg
    def kda_qkvg_block(i, g):
        w = panels(m, g, 0, 7168, 128)
        m.qkvg_y[:, lanes(i * 128, 128)] = dot(m.h[...], w)
    g = stream(m, g, range(12), kda_qkvg_block, turn=4)
    window_read(m, index).wait()
    tape_copy(m, g).wait()  # q_conv+k_conv+v_conv 0, a 40, dt_bias 48, o_norm 56
    # -- kda.conv
    x, w = m.qkvg_y[:, 0:1152], vector(m, g, 0, 40)
    y, window = short_conv(x, m.window[...], w, m.position_column[...], 4)
    m.conv[...], m.window[...] = y, window
    window_write(m, index).start()
    # -- kda.recurrence
    a = line(vector(m, g, 40, 8), 3)  # exp(A_log), as packed
    dt_bias = line(vector(m, g, 48, 8), 384)
    q, k = (l2_heads(x, 128, 1e-06) for x in (m.conv[:, 0:384], m.conv[:, 384:768]))
    decay = jnp.exp(-5.0 * jax.nn.sigmoid(per_head(a, 128) * (m.f_b_y[...] + dt_bias)))
    beta = per_head(jax.nn.sigmoid(m.b_y[:, 0:3]), 128)
    m.matrix_inputs[...] = by_block(3, q * 128**-0.5, k, decay, m.conv[:, 768:1152], beta)
    m.matrix_outputs[...] = jnp.zeros_like(m.matrix_outputs)  # what inactive rows put out
    def matrix_row(row):
        matrix_read(m, index, row).wait()
        for i in range(3):
            x = m.matrix_inputs[i, pl.ds(row, 1), :]
            q, k, decay, v, beta = jnp.split(x, [128, 256, 384, 512], axis=1)
            q, k, decay = (key_columns(x, 128, 128) for x in (q, k, decay))
            s, clean = m.matrix.at[row, i], m.positions[row] == 0
            m.matrix_outputs[i, pl.ds(row, 1), :] = delta_rule(q, k, decay, v, beta, s, clean)
        matrix_write(m, index, row).start()
    each_active_row(m, matrix_row)
    m.recurrence[...] = jnp.concatenate([x[:, :128] for x in m.matrix_outputs[...]], axis=1)
    # -- kda.gated_norm
    w = line(vector(m, g, 56, 8), 128)
    normed = norm_heads(m.recurrence[...], w, 1e-05)
    gate = jax.nn.sigmoid(m.qkvg_y[:, 1152:1536])
    m.gated[...] = normed * gate
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- kda.o
    m.o_y[...] = jnp.zeros_like(m.o_y)
    def kda_o_block(i, g):
        x = m.gated[:, lanes(i * 128, 128)]
        w = panels(m, g, 0, 128, 7168)
        m.o_y[...] += dot(x, w)
    g = stream(m, g, range(3), kda_o_block, turn=3)
    scatter_start(m, (ALL,), m.o_y[...])
    # -- kda.past
    open_block(m, layer)
    tape_copy(m, g).wait()  # the next sub-layer's
    weigh_past(m, g, m.facts[layer * FACTS + SNAPSHOTS], 1e-05)
    scatter_finish(m, (ALL,), (224, m.out_run))
    gather_start(m, (ALL,), m.out_run[...])
    gather_finish(m, (ALL,), (224, m.o_y))
    # -- kda.add
    m.running[...] = m.running[...] + m.o_y[...]
    window_write(m, index).wait()
    each_active_row(m, lambda row: matrix_write(m, index, row).wait())
    return g

def mla_mixer(m, layer, index, g):
    """Multi-head latent attention."""
    first_cache_tile_copy = jnp.minimum(m.kv_count[0], KV_SLOTS)
    lax.fori_loop(0, first_cache_tile_copy, lambda i, _: cache_tile_copy(m, index, i).start(), None)
    # -- mixer_mixture: residual.mixer 0, mixer.norm 56, kv_a 88, q_a 984
    m.h[...] = mixture_norm(m, g, vector(m, g, 56, 32, bf16), 1e-05, 1e-05)
    # -- mla.kv_a
    m.kv_a_y[...] = dot_t(m.h[...], columns(m, g, 88, 7168, 32))
    # -- mla.q_a
    m.q_a_y[...] = dot_t(m.h[...], columns(m, g, 984, 7168, 48))
    gather_start(m, (ALL,), m.kv_a_y[:, 0:18], m.q_a_y[...])
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- mla.g
    def mla_g_block(i, g):
        w = panels(m, g, 0, 7168, 128)
        m.g_y[:, lanes(i * 128, 128)] = dot(m.h[...], w)
    g = stream(m, g, range(3), mla_g_block, turn=3)
    gather_finish(m, (ALL,), (18, m.kv_a_whole), (48, m.q_a_whole))
    tape_copy(m, g).wait()  # q_norm 0, kv_norm 8, q_b 16
    # -- mla.q_norm
    m.q_latent[...] = rms_norm(m.q_a_whole[...], vector(m, g, 0, 8, bf16), 1e-06)
    # -- mla.kv_norm
    m.latent[...] = rms_norm(m.kv_a_whole[:, 0:512], vector(m, g, 8, 8, bf16), 1e-06)
    # -- mla.q_b
    m.q_b_y[...] = dot_t(m.q_latent[...], columns(m, g, 16, 1536, 576))
    # -- mla.attention
    kv = open_cache(
        m, "cache", m.cache_tiles, m.kv_items, m.kv_count, (0, 1, 2, 3, 4), (0, 1, 2, 3), 192**-0.5
    )
    g = next_chunk(m, g)  # k_up 0
    k_up = (panels(m, g, h * 256, 512, 128) for h in range(3))
    put_queries(kv, mla_queries(kv, heads_of(m.q_b_y[...], 192), k_up, 128))
    token = jnp.concatenate([m.latent[...], m.kv_a_whole[:, 512:576]], axis=1)
    put_token(kv, pad_lanes(token, 640))
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    see_token(m, kv)
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
    tape_copy(m, g).wait()  # v_up 0
    v_up = (panels(m, g, h * 256, 512, 128) for h in range(3))
    m.attended[...] = mla_output(kv, v_up, 0)
    # -- mla.gate
    gate = jax.nn.sigmoid(m.g_y[...])
    m.mla_gated[...] = m.attended[...] * gate
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- mla.o
    m.o_y[...] = jnp.zeros_like(m.o_y)
    def mla_o_block(i, g):
        x = m.mla_gated[:, lanes(i * 128, 128)]
        w = panels(m, g, 0, 128, 7168)
        m.o_y[...] += dot(x, w)
    g = stream(m, g, range(3), mla_o_block, turn=3)
    scatter_start(m, (ALL,), m.o_y[...])
    # -- mla.past
    open_block(m, layer)
    tape_copy(m, g).wait()  # the next sub-layer's
    weigh_past(m, g, m.facts[layer * FACTS + SNAPSHOTS], 1e-05)
    scatter_finish(m, (ALL,), (224, m.out_run))
    gather_start(m, (ALL,), m.out_run[...])
    gather_finish(m, (ALL,), (224, m.o_y))
    # -- mla.add
    m.running[...] = m.running[...] + m.o_y[...]
    each_active_row(m, lambda row: cache_word_copy(m, index, row).wait())
    return g

def dense_ffn(m, layer, index, g):
    """Gated MLP."""
    # -- ffn_mixture: residual.ffn 0, ffn.norm 56
    m.h[...] = mixture_norm(m, g, vector(m, g, 56, 32, bf16), 1e-05, 1e-05)
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- dense.gate_up
    def dense_gate_up_block(i, g):
        w = panels(m, g, 0, 7168, 128)
        m.gate_up_y[:, lanes(i * 128, 128)] = dot(m.h[...], w)
    g = stream(m, g, range(17), dense_gate_up_block)
    # -- dense.act
    gate = m.gate_up_y[:, 0:1056]
    up = m.gate_up_y[:, 1056:2112]
    m.act[...] = situ(gate, 4.0) * (25.0 * jnp.tanh(up / 25.0))
    # -- dense.down
    def dense_down_block(i, g):
        w = panels(m, g, 0, 1056, 896)
        m.down_y[:, lanes(i * 896, 896)] = dot(m.act[...], w)
    g = stream(m, g, range(8), dense_down_block)
    scatter_start(m, (ALL,), m.down_y[...])
    tape_copy(m, g).wait()  # the next sub-layer's
    # -- dense.past
    weigh_past(m, g, m.facts[layer * FACTS + SNAPSHOTS], 1e-05)
    scatter_finish(m, (ALL,), (224, m.out_run))
    gather_start(m, (ALL,), m.out_run[...])
    gather_finish(m, (ALL,), (224, m.down_y))
    # -- dense.add
    m.running[...] = m.running[...] + m.down_y[...]
    return g

def moe_ffn(m, layer, index, g):
    """Routed experts of a latent of 3584, each distinct one fetched once; shared experts."""
    # -- ffn_mixture: residual.ffn 0, ffn.norm 56, router 88
    m.h[...] = mixture_norm(m, g, vector(m, g, 56, 32, bf16), 1e-05, 1e-05)
    # -- moe.router
    m.router_y[...] = dot_t(m.h[...], columns(m, g, 88, 7168, 32))
    g = next_chunk(m, g)  # latent_down 0
    # -- moe.latent_down
    m.latent_down_y[...] = dot_t(m.h[...], columns(m, g, 0, 7168, 112))
    gather_start(m, (ALL,), m.router_y[:, 0:28], m.latent_down_y[...])
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- moe.shared_gate_up
    def moe_shared_gate_up_block(i, g):
        w = panels(m, g, 0, 7168, 128)
        m.shared_gate_up_y[:, lanes(i * 128, 128)] = dot(m.h[...], w)
    g = stream(m, g, range(3), moe_shared_gate_up_block, turn=3)
    # -- moe.shared_act
    gate = m.shared_gate_up_y[:, 0:192]
    up = m.shared_gate_up_y[:, 192:384]
    m.shared_act[...] = situ(gate, 4.0) * (25.0 * jnp.tanh(up / 25.0))
    # -- moe.shared_down
    def moe_shared_down_block(i, g):
        w = panels(m, g, 0, 192, 3584)
        m.shared_down_y[:, lanes(i * 3584, 3584)] = dot(m.shared_act[...], w)
    g = stream(m, g, range(2), moe_shared_down_block, turn=2)
    gather_finish(m, (ALL,), (28, m.router_logits_whole), (112, m.latent_in_whole))
    tape_copy(m, g).wait()  # router_bias 0
    # -- moe.route
    score = jax.nn.sigmoid(m.router_logits_whole[...])
    bias = line(vector(m, g, 0, 8), 896)
    key = score + bias
    chosen = top_k_lanes(key, kth_largest(key, 16), 16) & (m.position_column[...] >= 0)
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
    spread(m, m.expert_x, m.latent_in_whole[...], MXFP4)
    def routed_expert(i, _):
        expert_copy(m, index, i).wait()
        due = i + EXPERTS_AHEAD < m.expert_count[0]
        pl.when(due)(lambda: expert_copy(m, index, i + EXPERTS_AHEAD).start())
        pl.when(m.rows <= 2 or m.taker[i] < 0)(lambda: run_expert(m, i, m.route, m.routed))
        pl.when(m.rows > 2 and m.taker[i] >= 0)(lambda: run_expert(m, i, m.route, m.routed, True))
    lax.fori_loop(0, m.expert_count[0], routed_expert, None)
    scatter_start(m, (ALL,), m.shared_down_y[...], m.routed[...])
    tape_copy(m, g + RING_DEPTH - 1).start()
    scatter_finish(m, (ALL,), (224, m.shared_out_run), (112, m.routed_run))
    gather_start(m, (ALL,), m.routed_run[...])
    gather_finish(m, (ALL,), (112, m.routed))
    tape_copy(m, g).wait()  # latent_norm 0, latent_up 32
    # -- moe.latent_norm
    m.routed_norm[...] = rms_norm(m.routed[...], vector(m, g, 0, 32), 1e-05)
    # -- moe.latent_up
    m.latent_up_y[...] = dot_t(m.routed_norm[...], columns(m, g, 32, 3584, 224))
    # -- moe.sum
    m.out[...] = m.latent_up_y[...] + m.shared_out_run[...]
    gather_start(m, (ALL,), m.out[...])
    g = next_chunk(m, g)  # the next sub-layer's
    # -- moe.past
    weigh_past(m, g, m.facts[layer * FACTS + SNAPSHOTS], 1e-05)
    gather_finish(m, (ALL,), (224, m.out_whole))
    # -- moe.add
    m.running[...] = m.running[...] + m.out_whole[...]
    return g

def end(m, g):
    """Final norm, logits of this rank's vocabulary, greedy token."""
    # -- out_mixture: residual.out 0, norm 56
    m.h[...] = mixture_norm(m, g, vector(m, g, 56, 32, bf16), 1e-05, 1e-05)
    tape_copy(m, g + RING_DEPTH).start()
    g += 1
    # -- head
    m.logits[...] = jnp.zeros_like(m.logits)
    def head_block(i, g):
        k, n = lax.rem(i, 7), lax.div(i, 7)
        x = m.h[:, lanes(k * 1024, 1024)]
        w = panels(m, g, 0, 1024, 1024)
        m.logits[:, lanes(n * 1024, 1024)] += dot(x, w)
    g = stream(m, g, range(21), head_block)
    g = stream(m, g, range(21, 35), head_block, refills=0)
    # -- greedy
    first = lax.axis_index("tp") * 5120
    top, token = greedy_local(m.logits[:, :5120], first, jnp.clip(163840 - first, 0, 5120))
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
    kinds = [functools.partial(kind, m, layer, index) for kind in (kda_mixer, mla_mixer)]
    g = lax.switch(m.facts[layer * FACTS + MIXER], kinds, g)
    index = m.facts[layer * FACTS + FFN_INDEX]
    kinds = [functools.partial(kind, m, layer, index) for kind in (dense_ffn, moe_ffn)]
    return lax.switch(m.facts[layer * FACTS + FFN], kinds, g)

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
    "tape": pl.ANY,  # u32 [7092584, 128]
    "experts": pl.ANY,  # u32 [20608, 4288, 128]
    "embedding": pl.ANY,  # u32 [143360, 128]
}

def states(rows):
    """HBM arrays that the step reads and updates in place, of one rank."""
    array = jax.ShapeDtypeStruct
    return {
        "kda_window": array((69, 3, 8, 1152), f32),  # inputs, oldest first
        "kda_matrix": array((69, rows, 3, 128, 128), f32),  # [key, value heads]
        "mla_cache": array((24, rows, 5, 2048, 128), u32),  # two tokens a word
    }

def outputs(rows):
    return {
        "logits": jax.ShapeDtypeStruct((8, 5120), f32),  # logits of this rank's vocabulary
        "token": jax.ShapeDtypeStruct((8, 128), i32),  # the greedy token of each row, on every lane
    }

def places(rows):
    """VMEM, SMEM and semaphores of one core."""
    vmem, smem, dma = pltpu.VMEM, pltpu.SMEM, pltpu.SemaphoreType.DMA
    return {
        "embed_words": vmem((28, rows, 128), u32),  # embedding rows, two features a word
        "embed_sem": dma,  # embedding rows
        "embedded": vmem((8, 7168), f32),  # embed
        "embedded_run": vmem((8, 224), f32),  # this rank's columns of embedded
        "running": vmem((8, 7168), f32),  # the residual stream
        "snapshots": vmem((8, 8, 7168), f32),  # snapshots of the residual stream
        "past": vmem((8, 7168), f32),  # snapshots, weighed for the next mixture
        "past_sums": vmem((8, 384), f32),  # their highest score | sum of weights | of squares
        "h": vmem((8, 7168), f32),  # block mixture
        "f_a_y": vmem((8, 128), f32),  # f_a, not rounded
        "b_y": vmem((8, 16), f32),  # b, not rounded
        "f_b_y": vmem((8, 384), f32),  # z, not rounded
        "qkvg_y": vmem((8, 1536), f32),  # q | k | v | g, not rounded
        "window": vmem((3, 8, 1152), f32),  # the window of this layer
        "window_in": dma,  # window in
        "window_out": dma,  # window out
        "conv": vmem((8, 1152), f32),  # q_conv | k_conv | v_conv
        "matrix": vmem((rows, 3, 128, 128), f32),  # the recurrent matrices of this layer
        "matrix_inputs": vmem((3, 8, 640), f32),  # q | k | decay | v | beta, block by block
        "matrix_in": dma((rows,)),  # a row's matrices in
        "matrix_out": dma((rows,)),  # a row's matrices out
        "recurrence": vmem((8, 384), f32),  # recurrence
        "matrix_outputs": vmem((3, 8, 128), f32),  # what the recurrence gives, not rounded
        "gated": vmem((8, 384), f32),  # gated norm
        "o_y": vmem((8, 7168), f32),  # out, not rounded
        "out_run": vmem((8, 224), f32),  # this rank's columns of out
        "kv_a_y": vmem((8, 32), f32),  # kv_a, not rounded
        "q_a_y": vmem((8, 48), f32),  # q_a, not rounded
        "kv_a_whole": vmem((8, 576), f32),  # kv_a of all ranks
        "q_a_whole": vmem((8, 1536), f32),  # q_a of all ranks
        "g_y": vmem((8, 384), f32),  # g, not rounded
        "q_latent": vmem((8, 1536), f32),  # rms norm
        "latent": vmem((8, 512), f32),  # rms norm
        "q_b_y": vmem((8, 576), f32),  # q, not rounded
        "cache_tiles": vmem((16, 5, 128, 128), u32),  # tiles of the cache, one a slot
        "cache_token": vmem((5, 8, 128), u32),  # the new token of each row
        "cache_old": vmem((rows, 5, 1, 128), u32),  # the words that it goes into
        "cache_word": vmem((rows, 5, 1, 128), u32),  # its words, to be written back
        "cache_queries": vmem((8, 8, 640), f32),  # queries
        "cache_softmax": vmem((2, 8, 8, 128), f32),  # largest score, sum of weights
        "cache_mixed": vmem((8, 8, 512), f32),  # weighed values
        "cache_tile_sem": dma((16,)),  # one a tile slot
        "cache_word_sem": dma((rows,)),  # new words out
        "kv_items": smem((128,), i32),  # row << 16 | tile of every tile to be read
        "kv_count": smem((1,), i32),  # how many
        "attended": vmem((8, 384), f32),  # mla attention
        "mla_gated": vmem((8, 384), f32),  # output gate
        "gate_up_y": vmem((8, 2176), f32),  # gate | up, not rounded
        "act": vmem((8, 1056), f32),  # gated activation
        "down_y": vmem((8, 7168), f32),  # out, not rounded
        "router_y": vmem((8, 32), f32),  # router_logits, not rounded
        "latent_down_y": vmem((8, 112), f32),  # latent_in, not rounded
        "router_logits_whole": vmem((8, 896), f32),  # router_logits of all ranks
        "latent_in_whole": vmem((8, 3584), f32),  # latent_in of all ranks
        "shared_gate_up_y": vmem((8, 384), f32),  # shared_gate | shared_up, not rounded
        "shared_act": vmem((8, 192), f32),  # gated activation
        "shared_down_y": vmem((8, 7168), f32),  # shared_out, not rounded
        "route": vmem((8, 896), f32),  # route
        "expert_slot": vmem((4, 4288, 128), u32),  # experts, one a slot
        "expert_sem": dma((4,)),  # one an expert slot
        "expert_ids": smem((128,), i32),  # local ids of the layer's distinct experts
        "expert_words": smem((29,), i32),  # bits of those that are not yet in the list
        "expert_count": smem((1,), i32),  # how many
        "taker": smem((128,), i32),  # the row that alone chose it; -7: several
        "expert_up": vmem((8, 768), f32),  # gate | up of one expert
        "expert_x": vmem((14, 128, 256), bf16),  # left operand, block-diagonal
        "expert_h": vmem((2, 128, 256), bf16),  # left operand, block-diagonal
        "routed": vmem((8, 3584), f32),  # routed experts
        "shared_out_run": vmem((8, 224), f32),  # this rank's columns of shared_out
        "routed_run": vmem((8, 112), f32),  # this rank's columns of routed
        "routed_norm": vmem((8, 3584), f32),  # rms norm
        "latent_up_y": vmem((8, 224), f32),  # routed_out, not rounded
        "out": vmem((8, 224), f32),  # add
        "out_whole": vmem((8, 7168), f32),  # out of all ranks
        "best_logit": vmem((8, 1), f32),  # the largest logit here
        "best_token": vmem((8, 1), f32),  # its token
        "best_logits": vmem((8, 32), f32),  # best_logit of all ranks
        "best_tokens": vmem((8, 32), f32),  # best_token of all ranks
        "ring": vmem((14, 4096, 128), u32),  # chunks of the tape, one a slot
        "ring_sem": dma((14,)),  # one a ring slot
        "position_column": vmem((8, 1), i32),  # positions as a column; padding rows are inactive
        "inbox_all": vmem((2, 32, rows, 384), u32),  # by half, member; peers write here
        "outbox_all": vmem((32, rows, 384), u32),  # words that differ by peer, on their way out
        "phase": smem((1,), i32),  # uses of each stage so far
        "sent": dma,  # messages on their way out
        "arrived": dma((2, 1)),  # messages that came in: half, stage
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
        name="kimi_k3_decode",
        out_shape=[*out.values(), *aliased.values()],
        in_specs=[pl.BlockSpec(memory_space=s) for s in OPERANDS.values()] + [hbm] * len(held),
        out_specs=[vmem] * len(out) + [hbm] * len(aliased),
        scratch_shapes=list(scratch.values()),
        input_output_aliases={len(OPERANDS) + i: len(out) + i for i in range(len(aliased))},
        compiler_params=pltpu.CompilerParams(has_side_effects=True, **limits),
        interpret=interpret,
    )(*[operands[n] for n in OPERANDS], *[state[n] for n in held])
    return dict(zip(out, got)), dict(zip(held, got[len(out) :])) if interpret else state
