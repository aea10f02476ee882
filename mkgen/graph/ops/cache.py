"""The kernel side of a positional cache: its buffers and copies, and the loop over the tiles that are seen."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Op


@dataclass(frozen=True)
class Seen:
    """Which tokens a token sees: all up to itself, the last `window` of them, or those of its own `chunk`."""
    window: int = 0
    chunk: int = 0

    @property
    def name(self) -> str:
        """Of the list of tiles that kinds with the same sight share."""
        return f"_window_{self.window}" if self.window else f"_chunk_{self.chunk}" if self.chunk else ""

    def texts(self) -> dict[str, str]:
        """As keyword arguments of the generated helpers."""
        return {k: str(n) for k, n in (("window", self.window), ("chunk", self.chunk)) if n}

    def oldest(self, positions):
        """The first token that is seen."""
        p = jnp.maximum(positions, 0)
        return p - p % self.chunk if self.chunk else jnp.maximum(p - self.window + 1, 0) if self.window else jnp.zeros_like(p)

    def tiles(self, context: int, tile: int) -> int:
        """The most that a row reads."""
        span = self.window or self.chunk or context
        return min(context // tile, (span + tile - 2) // tile + 1)


@dataclass(frozen=True)
class Lanes:
    """The features of a token in blocks of 128, those of `groups` runs of heads after each other, each in `blocks` of its own.

    keys, values: the blocks of a group that are scored and summed; rows: query heads of a group, padded to sublane tiles."""
    blocks: int
    keys: tuple[int, ...]
    values: tuple[int, ...]
    rows: int
    groups: int = 1


def open_cache(b, op: Op, lanes: Lanes, scale: str, seen: Seen = Seen(), **more: str) -> tuple[str, str]:
    """Declares a cache with its ring of tiles, and starts the first tiles early. more: other keyword arguments of the helper.
    Returns the first part of its buffers' names, and the name of the tiles: kinds that have them of one shape share them."""
    tile, slots, name = b.build.kv_tile, b.build.kv_slots, b.own(op.state)
    blocks = lanes.groups * lanes.blocks
    cache = b.state(op.states()[0], ("rows", blocks, b.build.context // 2, 128), "u32", "two tokens a word")
    items, count = f"kv_items{seen.name}", f"kv_count{seen.name}"
    groups = (lanes.groups,) if lanes.groups > 1 else ()
    tiles = b.shared("cache_tiles", f"{name}_tiles", (slots, blocks, tile // 2, 128), "u32", "tiles of the cache, one a slot")
    b.buffer(f"{name}_token", (blocks, 8, 128), "u32", "the new token of each row")
    b.buffer(f"{name}_old", ("rows", blocks, 1, 128), "u32", "the words that it goes into")
    b.buffer(f"{name}_word", ("rows", blocks, 1, 128), "u32", "its words, to be written back")
    b.buffer(f"{name}_queries", (8, *groups, lanes.rows, len(lanes.keys) * 128), b.build.activations, "queries")
    b.buffer(f"{name}_softmax", (2, 8, lanes.groups * lanes.rows, 128), "f32", "largest score, sum of weights")
    b.buffer(f"{name}_mixed", (8, lanes.groups * lanes.rows, len(lanes.values) * 128), "f32", "weighed values")
    arrived = b.shared("cache_tile_sem", f"{name}_tile_sem", (slots,), "dma", "one a tile slot", space="dma_sem")
    b.semaphores(f"{name}_word_sem", ("rows",), "new words out")
    most = b.max_rows * seen.tiles(b.build.context, tile)
    b.buffer(items, (most,), "i32", "row << 16 | tile of every tile to be read", space="smem")
    b.buffer(count, (1,), "i32", "how many", space="smem")
    b.transfer(f"{name}_tile_copy", ("m", "index", "i"), f"{cache}.at[index, row, :, pl.ds(first, KV_TILE // 2), :]",
               f"m.{tiles}.at[slot]", f"m.{arrived}.at[slot]", blocks * tile // 2 * 512, "Tile of item i, into its slot.",
               setup=(f"slot, (row, tile) = lax.rem(i, KV_SLOTS), kv_item(m.{items}, i)",
                      "first = pl.multiple_of(tile * (KV_TILE // 2), KV_TILE // 2)"), reads=(cache[2:],), writes=(tiles,))
    b.transfer(f"{name}_word_copy", ("m", "index", "row"), f"m.{name}_word.at[row]",
               f"{cache}.at[index, row, :, pl.ds(m.positions[row] >> 1, 1), :]", f"m.{name}_word_sem.at[row]", blocks * 512,
               "The words of the row's new token, back into the cache.", reads=(f"{name}_word",), writes=(cache[2:],))
    b.start_early_loop(f"{name}_tile_copy", "i", f"jnp.minimum(m.{count}[0], KV_SLOTS)", "m", "index", "i", bound=slots)
    b.step(op, "attention", "cache", name=name, tiles=tiles, items=items, count=count, keys=lanes.keys, values=lanes.values,
           scale=scale, more=({"groups": str(lanes.groups)} if lanes.groups > 1 else {}) | seen.texts() | more)
    return name, tiles


def attend(b, op: Op, name: str, tiles: str, seen: Seen = Seen(), reads: tuple[str, ...] = ()) -> None:
    """The loop over all tiles: wait, compute, refill the slots of the batch that is done with. reads: what the computing reads besides."""
    count, most = f"m.kv_count{seen.name}[0]", seen.tiles(b.build.context, b.build.kv_tile)
    batch, state = b.build.tiles_at_once, tuple(f"{name}_{part}" for part in ("softmax", "mixed"))
    b.step(op, "attention", "begin", reads=(f"{name}_queries", f"{name}_token", *reads), writes=(*state, f"{name}_old"))
    b.close()
    with b.loop(f"{name}_batch", "batch", f"lax.div({count} + KV_BATCH - 1, KV_BATCH)", bound=-(-b.max_rows * most // batch)):
        with b.loop("", "j", "KV_BATCH", unroll=True):
            b.wait(f"{name}_tile_copy", "m", "index", "batch * KV_BATCH + j", when=f"batch * KV_BATCH + j < {count}")
        b.step(op, "attention", "attend", reads=(*state, tiles, f"{name}_queries"), writes=(*state, f"{name}_old"))
        if b.build.kv_slots < b.max_rows * most:
            with b.loop("", "j", "KV_BATCH", unroll=True):
                i = "batch * KV_BATCH + j + KV_SLOTS"
                b.start(f"{name}_tile_copy", "m", "index", i, when=f"{i} < {count}")
    b.step(op, "attention", "words", reads=(f"{name}_token", f"{name}_old"), writes=(f"{name}_word",))
    with b.loop(f"{name}_words", "row", "m.rows"):
        b.start(f"{name}_word_copy", "m", "index", "row", when="m.positions[row] >= 0")
    b.wait_late(f"{name}_word_copy", "m", "index", "row", when="m.positions[row] >= 0", rows=True)
