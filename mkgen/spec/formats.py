"""The storage formats of weights, by name: what `build.formats` may say for a family, for 'experts' or for the 'rest'."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Format:
    """bits: of one weight's code. group: weights along K that share one scale (0: none do). scale: what a scale is stored as.

    column: one scale for a whole column instead of one a group. block: the scale also serves so many columns."""
    name: str
    bits: int
    group: int = 0
    scale: str = ""                          # f32 | bf16 | e8m0 | e4m3
    column: bool = False
    block: int = 1
    zero: bool = False                       # a zero point beside each scale
    tensor_scale: bool = False               # a second, f32 scale for the whole matrix


FORMATS = {f.name: f for f in (
    Format("bf16", 16),
    Format("int8", 8, scale="f32", column=True),
    Format("fp8", 8, scale="f32", column=True),                  # e4m3; a scale a tensor is the same for every column
    Format("fp8_block", 8, 128, "f32", block=128),               # e4m3, 128 x 128 blocks
    Format("int4_g32", 4, 32, "bf16"),
    Format("int4_g64", 4, 64, "bf16"),
    Format("int4_g128", 4, 128, "bf16"),
    Format("int4_g32_zero", 4, 32, "bf16", zero=True),
    Format("int4_g64_zero", 4, 64, "bf16", zero=True),
    Format("int4_g128_zero", 4, 128, "bf16", zero=True),
    Format("mxfp4", 4, 32, "e8m0"),
    Format("nvfp4", 4, 16, "e4m3", tensor_scale=True),
)}
