"""The ends of the model: token ids in, logits and the greedy token out."""
from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from mkgen.graph.ir import Cost, Op, Value, Weight


@dataclass(frozen=True)
class Embed(Op):
    """x = table[token]; the table is split by vocabulary, a row outside the rank's part is zero, so x is a partial sum."""
    x: Value
    table: Weight
    kind = "embed"
    rounds = "none: rows are copied"

    def inputs(self):
        return ()

    def outputs(self):
        return (self.x,)

    def weights(self):
        return (self.table,)

    def gives(self, spread):
        return {self.x.name: "partial"}

    def meaning(self, env):
        x = jnp.take(env.w(self.table), env.tokens, axis=0)
        env.put(self.x, jnp.where(env.active[:, None], x, 0.0))

    def lower(self, b):
        vocab, hidden = self.table.shape
        run = -(-vocab // b.ranks)
        words = b.embedding(self.table, run)
        b.buffer("embed_words", (words, "rows", 128), "u32", "embedding rows, two features a word")
        b.semaphores("embed_sem", (), "embedding rows")
        b.transfer("embed_copy", ("m", "row"), "m.embedding.at[pl.ds(vocab_index(m, row) * EMBED_WORDS, EMBED_WORDS)]",
                   "m.embed_words.at[:, row, :]", "m.embed_sem", words * 512, "The embedding row of row's token.",
                   reads=("embedding",), writes=("embed_words",))
        with b.first():
            with b.loop("embed_rows", "row", "m.rows", unroll=True):
                b.start("embed_copy", "m", "row", when="embed_here(m, row)")
            b.fill_ring()                # behind them: memory shares itself out among all that are under way
        with b.loop("embed_rows", "row", "m.rows", unroll=True):
            b.wait("embed_copy", "m", "row", when="embed_here(m, row)")
        b.step(self, "ends", "embed", reads=("embed_words",), x=b.write(self.x), hidden=hidden)
        if b.ranks > 1:
            b.step(self, "exchange", "await_peers")


@dataclass(frozen=True)
class Enter(Op):
    """The residual stream begins: y = r(scale x)."""
    x: Value
    y: Value
    scale: float = 1.0
    kind = "enter"
    rounds = "y"

    def inputs(self):
        return (self.x,)

    def outputs(self):
        return (self.y,)

    def meaning(self, env):
        env.put(self.y, env[self.x] * self.scale)

    def lower(self, b):
        b.step(self, "ends", "enter", x=b.read(self.x, "f32"), y=b.write(self.y), scale=self.scale)


@dataclass(frozen=True)
class FinishLogits(Op):
    """logits = softcap tanh(z / softcap), z = scale (logits + bias); where softcap is 0, z. In place, split by vocabulary."""
    logits: Value
    bias: Weight | None
    scale: float
    softcap: float
    kind = "finish_logits"

    def inputs(self):
        return (self.logits,)

    def outputs(self):
        return ()

    def weights(self):
        return () if self.bias is None else (self.bias,)

    def needs(self, spread):
        return {}

    def cost(self):
        return Cost(flops=12 * self.logits.width)

    def meaning(self, env):
        z = env[self.logits] if self.bias is None else env[self.logits] + env.w(self.bias)
        z = z * self.scale
        env.put(self.logits, self.softcap * jnp.tanh(z / self.softcap) if self.softcap else z)

    def lower(self, b):
        at, bias = (None, None) if self.bias is None else b.vector_at(self.bias)
        place = b.place(self.logits)
        b.step(self, "ends", "finish_logits", writes=(place.buffer,), logits=b.ref(self.logits), width=place.width, at=at,
               bias=bias and f"tape_rows(m, g, {at}, {bias.rows})", scale=self.scale, softcap=self.softcap)


@dataclass(frozen=True)
class Greedy(Op):
    """token = argmax(logits) over the first `usable` ids, ties to the lowest id. The logits stay split by vocabulary."""
    logits: Value
    token: Value
    usable: int
    kind = "greedy"

    def inputs(self):
        return (self.logits,)

    def outputs(self):
        return (self.token,)

    def needs(self, spread):
        return {}

    def cost(self):
        return Cost(flops=self.logits.width)

    def meaning(self, env):
        env.values[self.token.name] = jnp.argmax(env[self.logits][:, :self.usable], axis=-1).astype(jnp.int32)

    def lower(self, b):
        run = -(-self.logits.width // b.ranks)
        b.close()
        found = (b.buffer("best_logit", (8, 1), "f32", "the largest logit here"), b.buffer("best_token", (8, 1), "f32", "its token"))
        b.step(self, "ends", "greedy_local", writes=found, logits=b.ref(self.logits), run=run, usable=self.usable)
        tops, tokens = b.gather_buffers(found)
        b.buffer("token", (8, 128), "i32", "the greedy token of each row, on every lane", space="out")
        b.step(self, "ends", "greedy_store", writes=("token",), tops=f"m.{tops}", tokens=f"m.{tokens}")
