"""Shares of ranks: any number of heads, experts, columns and words of the vocabulary on any number of ranks."""
from __future__ import annotations

import pytest

from mkgen.plan.shard import local_units, sharers, unit_range
from mkgen.prove.mini import few_heads
from mkgen.spec.model import Conv, Decay, Gate, Gqa, Linear, LinearGate, LinearNorm, Mla, Mlp, QkNorm, Rope
from small_specs import prove_kernel, spec

EVERY = [(g * each, g, ranks) for g in (*range(1, 13), 16, 33, 40) for each in (1, 2, 3, 5) for ranks in range(1, 33)]


def held(units: int, ranks: int, groups: int, once: bool) -> list[range]:
    return [range(*unit_range(units, ranks, rank, groups, once)) for rank in range(ranks)]


@pytest.mark.parametrize("once", (True, False))
def test_every_unit_has_a_rank_and_no_rank_mixes_groups_that_others_share(once):
    for units, groups, ranks in EVERY:
        each, local = units // groups, local_units(units, ranks, groups)
        shares = held(units, ranks, groups, once)
        owners = [sum(u in share for share in shares) for u in range(units)]
        repeated = each == 1 and not once and groups < ranks
        assert owners == [sharers(ranks, groups) if repeated else 1] * units, (units, groups, ranks)
        assert max(map(len, shares)) == local and len(shares[0]) == local
        for rank, share in enumerate(shares):
            keys = {u // each for u in share}
            mine = set(range(*unit_range(groups, ranks, rank, groups)))      # the key heads that this rank keeps
            assert keys <= mine, "a query head reads a key head of another rank"
            assert len(share) % each == 0 or len(mine) == 1                  # whole groups, or a part of one


@pytest.mark.parametrize("heads, kv_heads, ranks, query, key", [
    (9, 3, 2, 6, 2), (9, 3, 4, 3, 1), (9, 3, 8, 2, 1), (40, 8, 16, 3, 1), (12, 12, 8, 2, 2), (6, 6, 4, 2, 2),
    (48, 16, 8, 6, 2), (48, 16, 32, 2, 1), (64, 8, 32, 2, 1), (1, 1, 32, 1, 1), (32, 4, 8, 4, 1)])
def test_heads_of_a_rank(heads, kv_heads, ranks, query, key):
    assert (local_units(heads, ranks, kv_heads), local_units(kv_heads, ranks, kv_heads)) == (query, key)


def full(heads: int, kv_heads: int, ranks: int) -> bool:
    return ranks * local_units(heads, ranks, kv_heads) == heads


def test_a_mini_keeps_what_does_not_divide():
    for heads, kv_heads, ranks in EVERY:
        for few in {min(ranks, 2), min(ranks, 4), ranks} if ranks > 1 else {1}:
            made = few_heads(heads, kv_heads, ranks, few, 2, 2)
            assert made[0] % made[1] == 0 and made[0] > 0
            assert full(*made, few) == full(heads, kv_heads, ranks), (heads, kv_heads, ranks, few, made)


@pytest.mark.slow
def test_kernel_of_heads_and_columns_that_do_not_divide():
    """On four ranks: one without any head, one with fewer query heads than its neighbour, one without any column."""
    prove_kernel(spec(4, {
        "idle": Gqa(heads=9, kv_heads=3, head_dim=24, rope=Rope(1e4), qk_norm=QkNorm(), gate=Gate()),
        "uneven": Gqa(heads=10, kv_heads=2, head_dim=24, rope=Rope(1e4, 16)),
        "latent": Mla(heads=6, q_rank=40, kv_rank=24, nope_dim=20, rope_dim=12, v_dim=24, gate=Gate()),
        "recurrent": Linear(heads=3, key_dim=24, value_dim=24, conv=Conv(3), decay=Decay("floor", "channel", 20, -4.0),
                            norm=LinearNorm(), gate=LinearGate("sigmoid"))},
        {"dense": Mlp(width=50), "tiny": Mlp(width=3)}, "idle uneven latent recurrent", "dense*3 tiny", hidden=200,
        mesh={"chip": 2, "core": 2}))
