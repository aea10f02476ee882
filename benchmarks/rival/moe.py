"""Routed experts in plain JAX: the list of a rank's distinct experts is compacted, and a loop with a dynamic trip count reads
one a trip.

No sort: an expert is chosen if fewer than top_k beat it, and its place in the list is how many wanted ones stand before it.
Both are fused compare-and-sum on the vector unit, and cost a fraction of what `lax.top_k` does here.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from mkgen.spec.model import Moe, Router
from rival.arrays import AXES, Leaf, block_of, even, expert_leaves, fused, row_parallel, vector
from rival.layers import Part, Setup, activation, need, product, rms, split, total


def moe(name: str, f: Moe, s: Setup, fp8: bool) -> Part:
    r = f.router
    plain = Moe(
        f.experts,
        f.top_k,
        f.width,
        router=r,
        activation=f.activation,
        shared_width=f.shared_width,
        latent=f.latent,
        latent_norm=f.latent_norm,
    )
    need(f == plain and f.experts % s.ranks == 0 and f.width % s.tp == 0, f"{name}: {f}")
    need(
        r == Router(r.score, bias=r.bias, renorm=r.renorm, scale=r.scale) and r.score in ("softmax", "sigmoid"), f"{name}: {r}"
    )
    need(bool(f.latent) or not f.shared_width, f"{name}: a shared expert without a latent")
    wide, local, width = f.latent or s.hidden, f.experts // s.ep, f.width // s.tp
    shared, narrow = f.shared_width // s.ranks, (f.experts // s.ranks, f.latent // s.ranks)
    leaves = expert_leaves(name, f.experts, wide, f.width, f.gated, s.tp, fp8, s.padded)
    if f.latent:
        leaves["gathered"] = fused(
            s.hidden, s.ranks, [(f"{name}.router", narrow[0], even), (f"{name}.latent_down", narrow[1], even)], lanes=s.lanes
        )
        leaves["latent_up"] = row_parallel(f"{name}.latent_up", f.latent, s.hidden)
        leaves |= {"latent_norm": vector(f"{name}.latent_norm", f.latent)} if f.latent_norm else {}
    else:
        leaves["router"] = Leaf((s.hidden, f.experts), P(), "act", lambda get: get(f"{name}.router"))
    if r.bias:
        leaves["bias"] = vector(f"{name}.router_bias", f.experts)
    if f.shared_width:
        leaves["shared_in"] = fused(
            s.hidden, s.ranks, [(f"{name}.shared_gate", shared, even), (f"{name}.shared_up", shared, even)]
        )
        leaves["shared_out"] = row_parallel(f"{name}.shared_down", f.shared_width, s.hidden)

    def apply(w, state, h, positions):
        if f.latent:  # router and latent are shared out by columns, and gathered together
            mine = product(s, h, w["gathered"])[:, : sum(narrow)]
            parts = lax.all_gather(mine, AXES, axis=1, tiled=False)
            logits, x = (p.reshape(s.rows, -1) for p in split(parts, *narrow))
        else:
            logits, x = product(s, h, w["router"]), h
        route = routing(r, f.top_k, logits, w.get("bias"))
        mine = lax.dynamic_slice_in_dim(route, lax.axis_index("ep") * local, local, axis=1)
        y = experts(s, f, w, x.astype(s.act), *listed(mine, min(local, s.rows * f.top_k)), width, fp8)
        if not f.latent:
            return total(s, y), {}
        y = total(s, y)
        if f.latent_norm:
            y = rms(y, w["latent_norm"], f.latent_norm.eps, f.latent_norm.offset)
        rows = f.latent // s.ranks
        y = product(s, lax.dynamic_slice_in_dim(y, lax.axis_index(AXES) * rows, rows, axis=1), w["latent_up"])
        if f.shared_width:
            y = y + product(s, activation(f.activation, *split(product(s, h, w["shared_in"]), shared, shared)), w["shared_out"])
        return total(s, y), {}

    return Part(leaves, apply)


def routing(r: Router, top_k: int, logits, bias):
    """[B, experts]: each expert's weight, zero where it is not chosen; ties go to the lowest id."""
    score = jax.nn.sigmoid(logits) if r.score == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    key = score if bias is None else score + bias
    ids = jnp.arange(key.shape[1])
    beaten = (key[:, None, :] > key[:, :, None]) | ((key[:, None, :] == key[:, :, None]) & (ids[None, :] < ids[:, None]))
    weight = jnp.where(jnp.sum(beaten, axis=-1, dtype=jnp.int32) < top_k, score, 0.0)
    if r.renorm:
        weight = weight / jnp.sum(weight, -1, keepdims=True)
    return weight * r.scale


def listed(route, most: int):
    """route [B, local experts] -> ids of the distinct ones [most], their weights [most, B], how many."""
    wanted = jnp.any(route != 0, axis=0)
    ids = jnp.arange(route.shape[1])
    place = jnp.sum(wanted[None, :] & (ids[None, :] < ids[:, None]), axis=1, dtype=jnp.int32)
    here = wanted[None, :] & (place[None, :] == jnp.arange(most)[:, None])  # [most, local experts]
    weights = jnp.sum(jnp.where(here[:, None, :], route[None], 0.0), axis=-1)
    return jnp.sum(jnp.where(here, ids[None, :], 0), axis=1, dtype=jnp.int32), weights, jnp.sum(wanted, dtype=jnp.int32)


def experts(s: Setup, f: Moe, w, x, ids, weights, count, width: int, fp8: bool):
    """sum_i weights_i f_{ids_i}(x), float32, a partial sum."""
    into = blocked(x, block_of(x.shape[1])) if fp8 else x

    def one(i, y):
        e = ids[i]
        g, u = split(expert_product(s, into, w, "expert_up", e, fp8), width, width)
        h = activation(f.activation, g, u).astype(s.act)
        out = expert_product(s, blocked(h, block_of(width)) if fp8 else h, w, "expert_down", e, fp8)
        return y + weights[i][:, None] * out

    with jax.named_scope("experts"):
        return lax.fori_loop(0, count, one, jnp.zeros((s.rows, x.shape[1]), jnp.float32))


def blocked(x, block: int):
    """x [B, K] -> [B K / block, K]: a row for each block of scales, zero elsewhere, so that one product keeps the blocks
    apart."""
    blocks = x.shape[1] // block
    keep = jnp.arange(x.shape[1])[None, :] // block == jnp.arange(blocks)[:, None]
    return jnp.where(keep, x[:, None, :], 0).reshape(-1, x.shape[1])


def expert_product(s: Setup, x, w, role: str, e, fp8: bool):
    y = product(s, x, one_of(w[role], e))
    if not fp8:
        return y
    scale = one_of(w[f"{role}_scale"], e)  # [blocks, N]
    y = y.reshape(s.rows, -1, scale.shape[1])
    return jnp.sum(y * scale[: y.shape[1]], axis=1)


def one_of(stack, e):
    """Expert e of [experts, ...]; inside a loop over layers the stack says itself how it is sliced."""
    return stack.expert(e) if hasattr(stack, "expert") else lax.dynamic_index_in_dim(stack, e, keepdims=False)
