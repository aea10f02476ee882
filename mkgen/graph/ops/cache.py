"""The kernel side of a positional cache: its buffers and copies, and the loop over its tiles."""
from __future__ import annotations


def open_cache(b, op, heads: int, blocks: int, keys: tuple, values: tuple, score_dim: int) -> str:
    """Declares a cache of `blocks` x 128 features a token with its ring of tiles, and starts the first tiles early."""
    tile, slots, name = b.build.kv_tile, b.build.kv_slots, b.own(op.state)
    cache = b.state(op.states()[0], ("rows", blocks, b.build.context // 2, 128), "u32", "two tokens a word")
    heads_padded = -(-heads // 8) * 8
    b.buffer(f"{name}_tiles", (slots, blocks, tile // 2, 128), "u32", "tiles of the cache, one a slot")
    b.buffer(f"{name}_token", (blocks, 8, 128), "u32", "the new token of each row")
    b.buffer(f"{name}_word", ("rows", blocks, 1, 128), "u32", "its words, to be written back")
    b.buffer(f"{name}_queries", (8, heads_padded, len(keys) * 128), b.build.activations, "queries")
    b.buffer(f"{name}_mixed", (8, heads_padded, len(values) * 128), "f32", "weighed values")
    b.semaphores(f"{name}_tile_sem", (slots,), "one a tile slot")
    b.semaphores(f"{name}_word_sem", ("rows",), "new words out")
    items = b.max_rows * (b.build.context // tile) + slots // 2 - 1
    b.buffer("kv_items", (items,), "i32", "row << 16 | tile of every tile to be read", space="smem")
    b.buffer("kv_count", (1,), "i32", "how many", space="smem")
    b.transfer(f"{name}_tile_copy", ("m", "index", "i"),
               f"{cache}.at[index, row, :, pl.ds(first, KV_TILE // 2), :]",
               f"m.{name}_tiles.at[slot]", f"m.{name}_tile_sem.at[slot]", blocks * tile // 2 * 512, "Tile of item i, into its slot.",
               setup=("slot, (row, tile) = lax.rem(i, KV_SLOTS), kv_item(m, i)",
                                                                    "first = pl.multiple_of(tile * (KV_TILE // 2), KV_TILE // 2)"), reads=(cache[2:],), writes=(f"{name}_tiles",))
    b.transfer(f"{name}_word_copy", ("m", "index", "row"), f"m.{name}_word.at[row]",
               f"{cache}.at[index, row, :, pl.ds(m.positions[row] >> 1, 1), :]", f"m.{name}_word_sem.at[row]", blocks * 512,
               "The words of the row's new token, back into the cache.", reads=(f"{name}_word",), writes=(cache[2:],))
    b.start_early_loop(f"{name}_tile_copy", "i", "jnp.minimum(m.kv_count[0], KV_SLOTS)", "m", "index", "i", bound=slots)
    b.step(op, "attention", "cache", writes=(f"{name}_mixed",), name=name, keys=keys, values=values, scale=f"{score_dim} ** -0.5")
    return name


def attend(b, op, name: str) -> None:
    """The loop over all tiles: wait, append the new token where it falls, compute, refill the slots."""
    batch, count = b.build.kv_slots // 2, "m.kv_count[0]"
    trips = f"lax.div({count} + KV_BATCH - 1, KV_BATCH)"
    b.close()
    with b.loop(f"{name}_batch", "batch", trips, carry="running", init="empty_softmax(kv)",
                bound=b.max_rows * b.build.context // b.build.kv_tile // batch + b.max_rows):
        with b.loop("", "j", "KV_BATCH", unroll=True):
            b.step(op, "attention", "item")
            b.wait(f"{name}_tile_copy", "m", "index", "i", when=f"i < {count}")
            b.step(op, "attention", "append", reads=(f"{name}_tiles", f"{name}_token"), writes=(f"{name}_tiles", f"{name}_word"), when="kv_newest(m, i)")
            b.start(f"{name}_word_copy", "m", "index", "kv_item(m, i)[0]", when="kv_newest(m, i)")
        b.step(op, "attention", "attend", reads=(f"{name}_tiles", f"{name}_queries"), writes=(f"{name}_mixed",))
        with b.loop("", "j", "KV_BATCH", unroll=True):
            b.step(op, "attention", "item")
            b.start(f"{name}_tile_copy", "m", "index", "i + KV_SLOTS", when=f"i + KV_SLOTS < {count}")
    b.wait_late(f"{name}_word_copy", "m", "index", "row", when="m.positions[row] >= 0", rows=True)
