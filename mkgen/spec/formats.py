"""The storage formats of weights, by name: what `build.formats` may say for a family, for 'experts' or for the 'rest'."""
from __future__ import annotations

from dataclasses import dataclass

BITS = {"bf16": 16, "int8": 8, "e4m3": 8, "int4": 4, "e2m1": 4}                # of a code
SCALE_BYTES = {"": 0, "f32": 4, "bf16": 2, "f16": 2, "e8m0": 1, "e4m3": 1}
ZERO_BYTES = 1                               # a zero point is stored as one signed byte


@dataclass(frozen=True)
class Format:
    """code: what a weight is stored as. group: weights along K that share one scale (0: none do). scale: what it is stored as.

    column: one scale for a whole column instead of one a group. block: the scale also serves so many columns."""
    name: str
    code: str                                # bf16 | int8 | e4m3 | int4 | e2m1
    group: int = 0
    scale: str = ""                          # f32 | bf16 | f16 | e8m0 | e4m3
    column: bool = False
    block: int = 1
    zero: bool = False                       # a zero point beside each scale
    tensor_scale: bool = False               # a second, f32 scale for the whole matrix

    @property
    def bits(self) -> int:
        return BITS[self.code]

    def true_bytes(self, k: int, n: int) -> int:
        """Bytes of a matrix [k, n] as a checkpoint would hold it: codes, scales and zero points, without padding."""
        codes = k * n * self.bits // 8
        scales = (-(-n // self.block)) * (1 if self.column else -(-k // self.group) if self.group else 0)
        return codes + scales * (SCALE_BYTES[self.scale] + ZERO_BYTES * self.zero) + 4 * self.tensor_scale


def _int4(group: int, zero: bool, scale: str) -> Format:
    return Format(f"int4_g{group}{'_zero' * zero}{'_f16' * (scale == 'f16')}", "int4", group, scale, zero=zero)


FORMATS = {f.name: f for f in (
    Format("bf16", "bf16"),
    Format("int8", "int8", scale="f32", column=True),
    Format("fp8", "e4m3", scale="f32", column=True),             # a scale a tensor is the same for every column
    Format("fp8_block", "e4m3", 128, "f32", block=128),          # 128 x 128 blocks
    Format("fp8_g256", "e4m3", 256, "e8m0"),                     # 256 of K a scale, a power of two: mxfp4 in twice the bytes, exactly
    # scales of two bytes: bf16, or the f16 of an AWQ or GPTQ checkpoint, which bf16 does not hold exactly
    *(_int4(g, zero, scale) for scale in ("bf16", "f16") for zero in (False, True) for g in (32, 64, 128)),
    Format("mxfp4", "e2m1", 32, "e8m0"),
    Format("nvfp4", "e2m1", 16, "e4m3", tensor_scale=True),
)}
