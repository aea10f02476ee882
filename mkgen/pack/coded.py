"""One matrix in a storage format, whatever checkpoint it came from: codes, scales, zero points.

Readers of checkpoints make a `Coded`, the image writer consumes it, `decode` says what it means. [N, K] as hubs store it:
N outputs, K inputs. Every scale of a format is kept here as the float32 *value* that it stands for, never as stored bits.

    int8        w = q scale[n]                       q in -127..127, one scale a column (an output)
    fp8         w = e4m3(q) scale[n]                 a scale a tensor is the same for every n
    fp8_block   w = e4m3(q) scale[n, k // 128]       blocks of 128 x 128, the scale repeated for each column
    fp8_g256    w = e4m3(q) scale[n, k // 256]       scale a power of two, stored as that of mxfp4
    int4_gG     w = q scale[n, k // G]               q in -8..7
    int4_gG_zero  w = (q - zero) scale[n, k // G]    q in 0..15, zero a whole number in -120..135 (as GPTQ's 1..16)
    mxfp4       w = e2m1(q) scale[n, k // 32]        scale a power of two, 2^(s - 127) of the stored byte s in 1..254
    nvfp4       w = e2m1(q) scale[n, k // 16] tensor_scale      scale an e4m3 number

The last group of K may be short.
"""
from __future__ import annotations

from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np

from mkgen.errors import MkgenError
from mkgen.pack.formats import VALUES, as_bf16, quantise_mxfp4
from mkgen.spec.formats import FORMATS, Format

STORED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "e4m3": ml_dtypes.float8_e4m3fn, "f32": np.float32}
E4M3_MAX = 448.0
E2M1_MAX = 6.0
ZERO_RANGE = -120, 135                       # what a signed byte holds of zero - 8


@dataclass(frozen=True)
class Coded:
    """codes: [N, K]; u8 with a nibble 0..15 (int4 without zero points: two's complement) or an e4m3 bit pattern, i8 for int8,
    bfloat16 for bf16. scales: f32 [N, groups of K]; [N, 1] for a scale a column; [N, 0] for bf16. zeros: f32, whole numbers.

    group: weights along K that a scale serves here; a divisor of the format's own where scales have been repeated."""
    format: str
    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None = None
    tensor_scale: float = 1.0
    group: int = 0                           # 0: the format's own

    def __post_init__(self):
        f = self.kind
        object.__setattr__(self, "group", self.group or f.group)
        n, k = self.codes.shape
        groups = 1 if f.column else -(-k // self.group) if f.group else 0
        if self.scales.shape != (n, groups):
            raise ValueError(f"{self.format} [{n}, {k}] has scales {list(self.scales.shape)}, not {[n, groups]}")
        if (self.zeros is not None) != f.zero or f.zero and self.zeros.shape != self.scales.shape:
            raise ValueError(f"{self.format}: zero points where there are none, or none, or not one a scale")

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape

    def outputs(self, first: int, last: int) -> Coded:
        """Columns [first, last) of N."""
        cut = slice(first, last)
        return replace(self, codes=self.codes[cut], scales=self.scales[cut], zeros=None if self.zeros is None else self.zeros[cut])

    def inputs(self, first: int, last: int) -> Coded:
        """[first, last) of K, both at the edge of a group (or at K's end): `regrouped` makes finer groups."""
        last = min(last, self.shape[1])
        if not self.kind.group:
            return replace(self, codes=self.codes[:, first:last])
        if first % self.group or last % self.group and last != self.shape[1]:
            raise ValueError(f"{self.format}: [{first}, {last}) of K cuts a group of {self.group}")
        cut = slice(first // self.group, -(-last // self.group))
        return replace(self, codes=self.codes[:, first:last], scales=self.scales[:, cut],
                       zeros=None if self.zeros is None else self.zeros[:, cut])

    def regrouped(self, group: int) -> Coded:
        """The same values with a scale for each `group` weights, a divisor of the present group."""
        if group == self.group or not self.kind.group:
            return self
        if self.group % group:
            raise ValueError(f"{self.format}: groups of {self.group} cannot be cut into groups of {group}")
        repeat = lambda a: np.repeat(a, self.group // group, axis=1)[:, :-(-self.shape[1] // group)]
        return replace(self, scales=repeat(self.scales), zeros=None if self.zeros is None else repeat(self.zeros), group=group)


def encode(fmt: str, w: np.ndarray) -> Coded:
    """w [N, K] of any float dtype -> the nearest that the format has, by the usual rules: the largest of a group (or column)
    lies at the end of the range, the scale is rounded to what it is stored as, codes to nearest, ties to even."""
    f = FORMATS[fmt]
    if f.code == "bf16":
        return Coded(fmt, np.ascontiguousarray(as_bf16(w)), np.zeros((len(w), 0), np.float32))
    w = np.ascontiguousarray(w, np.float32)
    if not np.isfinite(w).all():
        raise MkgenError(f"a weight that is to be stored as {fmt} is not finite")
    if fmt == "mxfp4":
        k = -(-w.shape[1] // f.group) * f.group
        codes, scales = quantise_mxfp4(_pad(w, k).T)
        return Coded(fmt, codes.T[:, :w.shape[1]], np.ldexp(np.float32(1), scales.T.astype(np.int32) - 127))
    if f.code == "int4":
        return _encode_int4(f, w)
    n, k = w.shape
    most = {"int8": 127.0, "e4m3": E4M3_MAX, "e2m1": E2M1_MAX}[f.code]
    top = np.abs(w).max(1, keepdims=True, initial=0) if f.column else _tops(f, w)
    tensor = np.float32(1)
    if f.tensor_scale:
        tensor = np.float32(top.max(initial=0) / (most * E4M3_MAX)) or np.float32(1)
    scales = _powers_of_two(top / most) if f.scale == "e8m0" else _to_scale(f, top / (most * tensor), floor=True)
    x = w / (_over_k(f, scales, k) * tensor)
    if f.code == "int8":
        return Coded(fmt, np.clip(np.rint(x), -127, 127).astype(np.int8), scales)
    dtype = ml_dtypes.float8_e4m3fn if f.code == "e4m3" else ml_dtypes.float4_e2m1fn
    return Coded(fmt, np.clip(x, -most, most).astype(dtype).view(np.uint8), scales, tensor_scale=float(tensor))


def _encode_int4(f: Format, w: np.ndarray) -> Coded:
    n, k = w.shape
    groups = -(-k // f.group)
    g = _pad(w, groups * f.group).reshape(n, groups, f.group)
    if not f.zero:
        scales = _to_scale(f, np.abs(g).max(2) / 7, floor=True)
        q = np.clip(np.rint(w / _over_k(f, scales, k)), -8, 7).astype(np.int8)
        return Coded(f.name, (q & 15).view(np.uint8), scales)
    low, high = np.minimum(g.min(2), 0), np.maximum(g.max(2), 0)
    scales = _to_scale(f, (high - low) / 15, floor=True)
    zeros = np.clip(np.rint(-low / scales), 0, 15).astype(np.float32)
    q = np.clip(np.rint(w / _over_k(f, scales, k)) + _over_k(f, zeros, k), 0, 15)
    return Coded(f.name, q.astype(np.uint8), scales, zeros)


def decode(c: Coded) -> np.ndarray:
    """f32 [N, K]: the values that the format stands for, each product rounded to float32 once."""
    f, k = c.kind, c.shape[1]
    if f.code == "bf16":
        return c.codes.astype(np.float32)
    if f.code == "int8":
        q = c.codes.astype(np.float32)
    elif f.code == "e4m3":
        q = c.codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    elif f.code == "e2m1":
        q = VALUES[c.codes]
    elif f.zero:
        q = c.codes.astype(np.float32) - _over_k(f, c.zeros, k, c.group)
    else:
        q = ((c.codes ^ 8).astype(np.int8) - 8).astype(np.float32)
    return q * _over_k(f, c.scales, k, c.group) * np.float32(c.tensor_scale)


def check(c: Coded, name: str) -> None:
    """MkgenError unless the image can hold every scale and zero point of `c` exactly."""
    f = c.kind
    held = to_stored(f, c.scales)
    bad = ~(held == c.scales) | ~np.isfinite(c.scales)
    if f.scale == "e8m0":
        bad |= (c.scales < 2.0 ** -126) | (c.scales > 2.0 ** 127)
    if bad.any():
        fix = {"bf16": f"{c.format}_f16", "f16": c.format.removesuffix("_f16")}.get(f.scale)
        raise MkgenError(f"{name}: {np.count_nonzero(bad)} of {bad.size} scales of {c.format} are no {f.scale} numbers\n"
                         f"  why: they are stored as {f.scale}, and weights are kept exactly\n"
                         f"  fix: {'build.formats: ' + fix if fix else 'a sound checkpoint'}")
    if c.zeros is not None:
        low, high = ZERO_RANGE
        bad = (c.zeros != np.rint(c.zeros)) | (c.zeros < low) | (c.zeros > high)
        if bad.any():
            raise MkgenError(f"{name}: {np.count_nonzero(bad)} of {bad.size} zero points are no whole numbers in {low}..{high}\n"
                             "  why: a zero point is stored as a byte\n  fix: another format")


def to_stored(f: Format, scales: np.ndarray) -> np.ndarray:
    """f32 -> the nearest f32 that the format's scale can store."""
    if f.scale == "e8m0":
        exponent = np.log2(np.clip(np.nan_to_num(scales), 2.0 ** -126, 2.0 ** 127))
        return np.ldexp(np.float32(1), np.rint(exponent).astype(np.int32))
    with np.errstate(over="ignore"):
        return scales.astype(STORED[f.scale]).astype(np.float32) if f.scale else scales


def _to_scale(f: Format, x: np.ndarray, floor: bool = False) -> np.ndarray:
    """As stored; a group of zeros gets a scale of one, one too small to store the smallest that is normal."""
    out = to_stored(f, x.astype(np.float32))
    tiny = np.float32(ml_dtypes.finfo(STORED[f.scale]).smallest_normal)
    return np.where(x == 0, np.float32(1), np.maximum(out, tiny)) if floor else out


def _powers_of_two(x: np.ndarray) -> np.ndarray:
    """The least power of two that is no smaller; one for zero."""
    mantissa, exponent = np.frexp(x.astype(np.float32))
    exponent = np.clip(exponent - (mantissa == 0.5), -126, 127)
    return np.where(x == 0, np.float32(1), np.ldexp(np.float32(1), exponent))


def _tops(f: Format, w: np.ndarray) -> np.ndarray:
    """[N, groups]: the largest magnitude of each group, and of the `block` columns that share its scale."""
    n, k = w.shape
    groups, blocks = -(-k // f.group), -(-n // f.block)
    padded = np.zeros((blocks * f.block, groups * f.group), np.float32)
    padded[:n, :k] = np.abs(w)
    top = padded.reshape(blocks, f.block, groups, f.group).max((1, 3))
    return np.repeat(top, f.block, axis=0)[:n]


def _over_k(f: Format, a: np.ndarray, k: int, group: int = 0) -> np.ndarray:
    """[N, groups] -> [N, K] (or [N, 1]: broadcasts)."""
    return a if f.column else np.repeat(a, group or f.group, axis=1)[:, :k]


def _pad(w: np.ndarray, k: int) -> np.ndarray:
    return w if w.shape[1] == k else np.pad(w, ((0, 0), (0, k - w.shape[1])))
