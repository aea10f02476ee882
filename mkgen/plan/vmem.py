"""Bytes of a buffer in VMEM, with the padding of its two minor dimensions to a tile."""
from __future__ import annotations

from mkgen.plan.regions import Buffer

ITEM = {"f32": 4, "u32": 4, "i32": 4, "bf16": 2}


def item_bytes(dtype: str) -> int:
    return ITEM[dtype]


def vmem_bytes(b: Buffer, rows: int) -> int:
    """f32, u32, i32 tile to (8, 128); bf16 to (16, 128), or to (8, 128) when it has at most 8 rows. A single row takes one."""
    dims = b.dims(rows)
    lead, (sub, lane) = dims[:-2], (dims[-2] if len(dims) > 1 else 1, dims[-1])
    item = item_bytes(b.dtype)
    if item == 4:
        tile = 1 if sub == 1 else 8 if sub > 4 else 4 if sub > 2 else 2
    else:
        tile = 16 if sub > 8 else 8 if sub > 4 else 4 if sub > 2 else 2
    n = -(-sub // tile) * tile * (-(-lane // 128) * 128) * item
    for d in lead:
        n *= d
    return n
