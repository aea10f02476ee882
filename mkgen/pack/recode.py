"""From one storage format to another: exactly where the other has the same numbers, else by encoding them again."""
from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from mkgen.pack.coded import Coded, decode, encode, to_stored
from mkgen.spec.formats import FORMATS

PROBED = 16                                  # outputs of a matrix that are decoded again to see that nothing has changed


def recode(c: Coded, fmt: str) -> Coded | None:
    """`c` in the format `fmt` with every value the same bit for bit, or None. Codes stay as they are."""
    made = _as_e4m3(c, fmt) or _with_scales(_with_zeros(c, fmt), fmt)
    if made is None or not np.array_equal(to_stored(FORMATS[fmt], made.scales), made.scales):
        return None
    some = slice(0, PROBED)
    if not np.array_equal(decode(_outputs(made, some)), decode(_outputs(c, some))):
        raise ValueError(f"{c.format} as {fmt} is not what it was")
    return made


def nearest(c: Coded, fmt: str) -> Coded:
    """The nearest in `fmt`: the same codes with rounded scales where only scales are in the way, else encoded anew."""
    made = _with_scales(_with_zeros(c, fmt), fmt)
    if made is None:
        return encode(fmt, decode(c))
    return replace(made, scales=to_stored(FORMATS[fmt], made.scales))


def take(c: Coded, outputs: np.ndarray, inputs: np.ndarray) -> Coded:
    """The outputs in any order, the inputs one run of whole groups, as `encode` would have kept them."""
    n, k = c.shape
    if not np.array_equal(outputs, np.arange(n)):
        first, last = int(outputs[0]), int(outputs[-1]) + 1
        run = len(outputs) == last - first and np.array_equal(outputs, np.arange(first, last))
        c = _outputs(c, slice(first, last) if run else outputs)
    return c if len(inputs) == k else c.inputs(int(inputs[0]), int(inputs[-1]) + 1)


def _outputs(c: Coded, at) -> Coded:
    return replace(c, codes=c.codes[at], scales=c.scales[at], zeros=None if c.zeros is None else c.zeros[at])


def _as_e4m3(c: Coded, fmt: str) -> Coded | None:
    """e2m1 codes under powers of two as e4m3 codes under coarser ones, or None: where the exponents that one coarse scale has to serve
    lie too far apart, or the formats are others. The largest code, 6, then comes to lie at 384 of 448."""
    f, to = c.kind, FORMATS[fmt]
    if (f.code, f.scale, to.code, to.scale) != ("e2m1", "e8m0", "e4m3", "e8m0"):
        return None
    n, k = c.shape
    starts = np.arange(0, c.scales.shape[1], to.group // c.group)
    coarse = np.ldexp(np.maximum.reduceat(c.scales, starts, axis=1), -6)
    x = decode(c) / np.repeat(coarse, to.group, axis=1)[:, :k]
    codes = x.astype(ml_dtypes.float8_e4m3fn)
    if not np.array_equal(codes.astype(np.float32), x):
        return None
    return Coded(fmt, codes.view(np.uint8), coarse)


def _with_zeros(c: Coded, fmt: str) -> Coded | None:
    """int4 with zero points as `fmt` has them: a signed code is an unsigned one with the zero point 8."""
    f, to = c.kind, FORMATS[fmt]
    if f.code != to.code or f.tensor_scale != to.tensor_scale:
        return None
    if f.zero == to.zero:
        return c
    if f.zero and (c.zeros != 8).any():
        return None
    plain = f"int4_g{f.group}{'_zero' * to.zero}{'_f16' * f.name.endswith('_f16')}"
    return replace(c, format=plain, codes=c.codes ^ 8, zeros=np.full_like(c.scales, 8) if to.zero else None)


def _with_scales(c: Coded | None, fmt: str) -> Coded | None:
    """The scales (and zero points) for the groups of `fmt`, unrounded; None if one group would need two."""
    if c is None:
        return None
    f, to, k = c.kind, FORMATS[fmt], c.shape[1]

    def regroup(a: np.ndarray | None) -> np.ndarray | None:
        if a is None or (f.column and to.column) or not (f.group or f.column):
            return a
        fine = a if f.column else np.repeat(a, c.group, axis=1)[:, :k]
        if f.column:
            return np.repeat(fine, -(-k // to.group), axis=1)
        size = k if to.column else to.group
        if not to.column and c.group % to.group == 0:
            return np.repeat(a, c.group // to.group, axis=1)[:, :-(-k // to.group)]
        coarse = fine[:, ::size]
        return coarse if np.array_equal(np.repeat(coarse, size, axis=1)[:, :k], fine) else None
    scales, zeros = regroup(c.scales), regroup(c.zeros)
    if scales is None or (zeros is None) != (c.zeros is None):
        return None
    return Coded(fmt, c.codes, scales, zeros, c.tensor_scale)
