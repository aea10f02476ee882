"""Bytes of a buffer in VMEM, with the padding that the TPU compiler gives its two minor dimensions.

Measured with libtpu 0.0.52 for tpu7x, v6e: `tests/test_compile.py` asks the compiler again.
"""
from __future__ import annotations

from math import prod

from mkgen.plan.regions import Buffer

LANES, SUBLANES, WORD = 128, 8, 4        # a tile is 8 rows of 128 elements of any width; memory is 32-bit words
ITEM = {"f32": 4, "u32": 4, "i32": 4, "bf16": 2}


def item_bytes(dtype: str) -> int:
    return ITEM[dtype]


def padded_rows(rows: int, item: int) -> int:
    """Rows of a matrix of `item`-byte elements: a multiple of 8; up to 4 a power of two that fills whole words."""
    if rows > SUBLANES // 2:
        return -(-rows // SUBLANES) * SUBLANES
    tile = WORD // item
    while tile < rows:
        tile *= 2
    return tile


def vmem_bytes(b: Buffer, rows: int) -> int:
    """Bytes that `b` takes in the variant for `rows` rows."""
    dims, item = b.dims(rows), item_bytes(b.dtype)
    if len(dims) == 1:
        return -(-dims[0] * item // (LANES * WORD)) * LANES * WORD
    *lead, sub, lane = dims
    return prod(lead) * padded_rows(sub, item) * (-(-lane // LANES) * LANES) * item
