"""Bit-exact packers between logical arrays and tape rows of 128 uint32 lanes.

A matrix is W[K, N]: K is contracted, N are the outputs; a checkpoint stores its transpose [N, K]. Whatever
the element width, consecutive K share a word, lowest bits first. So a word is what a little-endian machine
already sees in the checkpoint's own bytes, and packing into panels is one transpose of words.
The kernel undoes the packing with a value-level bitcast along sublanes: u32[n, 128] -> bf16[2n, 128].

MXFP4: a 4-bit code's low three bits index {0, .5, 1, 1.5, 2, 3, 4, 6}, bit 3 is the sign; 32 consecutive K
share an e8m0 byte b = 2^(b - 127). Bytes 0 and 255 are refused: the kernel shifts the byte straight into an
f32's exponent, where they would mean zero and infinity.
"""
from __future__ import annotations

import sys

import numpy as np
from ml_dtypes import bfloat16

from mkgen.errors import MkgenError

LANES = 128
GROUP = 32                                   # K that share one scale
ONE = 127                                    # e8m0 byte of 2^0: the scale of a group of zeros, and of padding
MAGNITUDES = np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)
VALUES = np.concatenate([MAGNITUDES, -MAGNITUDES])             # f32 value of each code 0..15

assert sys.byteorder == "little", "tape words are little-endian views of checkpoint bytes"


def as_bf16(w: np.ndarray) -> np.ndarray:
    """`w` of any float dtype -> bfloat16, round to nearest even; no copy if it is bfloat16 already."""
    return w if w.dtype == bfloat16 else w.astype(np.float32, copy=False).astype(bfloat16)


# -- panels: K on sublanes, 128 outputs on lanes -------------------------------------------------------------

def panels(words: np.ndarray) -> np.ndarray:
    """u32 words [N, R] (R words along K) -> u32 rows [N/128 * R, 128]: N/128 panels of [R, 128] in a row."""
    n, r = words.shape
    _multiple(n, LANES, "N of a panel layout")
    return np.ascontiguousarray(words.reshape(n // LANES, LANES, r).swapaxes(1, 2)).reshape(-1, LANES)


def unpanels(rows: np.ndarray, n: int) -> np.ndarray:
    """Inverse of `panels`: u32 rows [N/128 * R, 128] -> words [N, R]."""
    _multiple(n, LANES, "N of a panel layout")
    _rows(rows, len(rows) // (n // LANES) * (n // LANES))
    return np.ascontiguousarray(rows.reshape(n // LANES, -1, LANES).swapaxes(1, 2)).reshape(n, -1)


def pack_panels(w: np.ndarray) -> np.ndarray:
    """bf16 W[K, N], K even, N a multiple of 128 -> u32 panels [N/128 * K/2, 128].

    Row i of a panel holds K = 2i in its low halves, 2i + 1 in its high halves.
    """
    _multiple(w.shape[0], 2, "K of a bf16 panel")
    return panels(_bits16(w.T).view(np.uint32))


def unpack_panels(rows: np.ndarray, k: int, n: int) -> np.ndarray:
    """Inverse of `pack_panels`: u32 [N/128 * K/2, 128] -> bf16 W[K, N]."""
    _rows(rows, n // LANES * (k // 2))
    return unpanels(rows, n).view(bfloat16).T


# -- lanes: K on lanes, for outputs too narrow or too odd for panels -----------------------------------------

def pack_lanes(w: np.ndarray) -> np.ndarray:
    """bf16 W[K, N], K a multiple of 128, N of 16 -> u32 [K/128 * N/2, 128]: K/128 blocks of N/2 rows.

    Word (i, l) of block j holds W[128 j + l, 2i] low, W[128 j + l, 2i + 1] high: bitcast, it is W^T[N, 128].
    """
    k, n = w.shape
    _multiple(k, LANES, "K of a lane layout")
    _multiple(n, 16, "N of a lane layout")                                # whole bf16 tiles of 16 sublanes
    bits = _bits16(w.T).reshape(n // 2, 2, k // LANES, LANES)
    return _interleave(bits.transpose(2, 0, 3, 1))


def unpack_lanes(rows: np.ndarray, k: int, n: int) -> np.ndarray:
    """Inverse of `pack_lanes`: u32 [K/128 * N/2, 128] -> bf16 W[K, N]."""
    _rows(rows, k // LANES * (n // 2))
    halves = _halves(rows).reshape(k // LANES, n // 2, LANES, 2)
    return np.ascontiguousarray(halves.transpose(1, 3, 0, 2)).reshape(n, k).view(bfloat16).T


# -- vectors: 128 consecutive elements on the lanes of one row -----------------------------------------------

def vector_rows(n: int, dtype: str) -> int:
    """u32 rows that a vector of `n` elements takes, as 'f32' or 'bf16'."""
    return -(-n // (LANES * {"f32": 1, "bf16": 2}[dtype]))


def pack_vector(v: np.ndarray, dtype: str) -> np.ndarray:
    """v[n] -> u32 [vector_rows(n), 128], zero-padded. f32: row j, lane l = v[128 j + l].

    bf16: of such rows of 128 elements, u32 row i holds row 2i in its low halves, 2i + 1 in its high halves.
    """
    if v.ndim != 1:
        raise ValueError(f"a vector has one axis, not shape {v.shape}")
    rows = vector_rows(len(v), dtype)
    if dtype == "f32":
        return _pad(v.astype(np.float32), rows * LANES).view(np.uint32).reshape(rows, LANES)
    bits = _pad(as_bf16(v).view(np.uint16), rows * 2 * LANES).reshape(rows, 2, LANES)
    return _interleave(bits.swapaxes(1, 2))


def unpack_vector(rows: np.ndarray, n: int, dtype: str) -> np.ndarray:
    """Inverse of `pack_vector`: u32 rows -> f32 or bf16 v[n]."""
    _rows(rows, vector_rows(n, dtype))
    if dtype == "f32":
        return np.ascontiguousarray(rows).view(np.float32).reshape(-1)[:n]
    halves = _halves(rows).reshape(-1, LANES, 2).swapaxes(1, 2)
    return np.ascontiguousarray(halves).view(bfloat16).reshape(-1)[:n]


# -- mxfp4 on the tape: as panels ----------------------------------------------------------------------------

def pack_codes(codes: np.ndarray) -> np.ndarray:
    """u8 codes [K, N] in 0..15, K a multiple of 8, N of 128 -> u32 panels [N/128 * K/8, 128].

    Row i of a panel holds K = 8i .. 8i+7, low nibble first.
    """
    _multiple(codes.shape[0], 8, "K of mxfp4 codes")
    return panels(_bytes(codes).view(np.uint32))


def unpack_codes(rows: np.ndarray, k: int, n: int) -> np.ndarray:
    """Inverse of `pack_codes`: u32 [N/128 * K/8, 128] -> u8 codes [K, N]."""
    _rows(rows, n // LANES * (k // 8))
    return _nibbles(unpanels(rows, n).view(np.uint8)).T


def scale_rows(k: int) -> int:
    """u32 rows of one panel's scales: four groups of 32 K to a row."""
    return -(-k // (4 * GROUP))


def pack_scales(scales: np.ndarray) -> np.ndarray:
    """e8m0 u8 scales [K/32, N], N a multiple of 128 -> u32 panels [N/128 * scale_rows(K), 128].

    Row i of a panel holds groups 4i .. 4i+3, low byte first; the last row is padded with scales of one.
    """
    g, n = scales.shape
    check_exponents(scales)
    whole = np.full((n, -(-g // 4) * 4), ONE, np.uint8)
    whole[:, :g] = scales.T
    return panels(whole.view(np.uint32))


def unpack_scales(rows: np.ndarray, k: int, n: int) -> np.ndarray:
    """Inverse of `pack_scales`: u32 [N/128 * scale_rows(K), 128] -> e8m0 u8 scales [K/32, N]."""
    _rows(rows, n // LANES * scale_rows(k))
    return unpanels(rows, n).view(np.uint8)[:, :k // GROUP].T


# -- mxfp4 in a checkpoint -----------------------------------------------------------------------------------

def from_hub(packed: np.ndarray, scale: np.ndarray, name: str = "scale") -> tuple[np.ndarray, np.ndarray]:
    """weight_packed u8 [N, K/2], weight_scale u8 [N, K/32] -> u8 codes [K, N], e8m0 scales [K/32, N].

    The low nibble of a byte is the even K. `name` is the scale tensor's, for the error about bytes 0 and 255.
    """
    check_exponents(scale, name)
    return _nibbles(packed).T, scale.T


def to_hub(codes: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse of `from_hub`: codes [K, N], scales [K/32, N] -> weight_packed, weight_scale."""
    return _bytes(codes), np.ascontiguousarray(scales.T)


def hub_words(packed: np.ndarray) -> np.ndarray:
    """weight_packed u8 [N, K/2], K a multiple of 8 -> u32 words [N, K/8], whose `panels` equal `pack_codes`.

    The short cut past codes, for the terabytes: nothing is unpacked.
    """
    _multiple(packed.shape[1], 4, "K/2 of weight_packed")
    return np.ascontiguousarray(packed).view(np.uint32)


def check_exponents(scales: np.ndarray, name: str = "scale") -> None:
    """MkgenError if an e8m0 byte is 0 or 255."""
    bad = int(np.count_nonzero((scales == 0) | (scales == 255)))
    if bad:
        raise MkgenError(f"{name}: {bad} of {scales.size} e8m0 scales are 0 or 255 (denormal or NaN); "
                         "1..254 are valid")


# -- mxfp4 values --------------------------------------------------------------------------------------------

def quantise_mxfp4(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """W[K, N] f32 or bf16, K a multiple of 32 -> u8 codes [K, N], e8m0 scales [K/32, N] by the OCP MX rule.

    Shared exponent floor(log2 max|w|) - 2, then round to nearest, ties to even, saturating at 6; -0 keeps its
    sign. A weight that is not finite is an MkgenError.
    """
    k, n = w.shape
    _multiple(k, GROUP, "K of an mxfp4 matrix")
    groups = np.ascontiguousarray(w.T).astype(np.float32, copy=False).reshape(n, k // GROUP, GROUP)
    top = np.abs(groups).max(-1)
    if not np.isfinite(top).all():
        raise MkgenError("a weight that is to be stored as mxfp4 is not finite")
    exponent = np.frexp(top)[1] - 1 - 2           # top = m 2^e with 1/2 <= m < 1; scaled, top is in [4, 8)
    byte = np.where(top == 0, ONE, np.clip(exponent + 127, 1, 254))
    scaled = groups * _power_of_two(ONE - byte)[..., None]                       # exact: a power of two
    a = np.abs(scaled)
    codes = np.signbit(scaled).astype(np.uint8) << 3
    for tie, up in zip((.25, .75, 1.25, 1.75, 2.5, 3.5, 5.), (False, True) * 4):      # ties to the even code
        codes += (a >= tie) if up else (a > tie)
    return codes.reshape(n, k).T, byte.astype(np.uint8).T


def dequantise_mxfp4(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """u8 codes [K, N], e8m0 u8 scales [K/32, N] -> f32 W[K, N], exact (in bf16 as well) up to scale 2^125."""
    k, n = codes.shape
    values = VALUES[codes.T].reshape(n, k // GROUP, GROUP)
    return (values * _power_of_two(scales.T.astype(np.int32) - ONE)[..., None]).reshape(n, k).T


# -- helpers -------------------------------------------------------------------------------------------------

def _bits16(w: np.ndarray) -> np.ndarray:
    """bf16 array -> its bits, contiguous; other dtypes are refused, for a packer never rounds silently."""
    if w.dtype != bfloat16:
        raise ValueError(f"expected bfloat16, not {w.dtype}: round with as_bf16 first")
    return np.ascontiguousarray(w).view(np.uint16)


def _interleave(halves: np.ndarray) -> np.ndarray:
    """u16 [..., 128, 2] (low half, high half), any strides -> u32 rows [., 128]."""
    out = np.empty(halves.shape, np.uint16)
    out[..., 0] = halves[..., 0]              # two copies along lanes are faster than one over pairs
    out[..., 1] = halves[..., 1]
    return out.view(np.uint32).reshape(-1, LANES)


def _halves(rows: np.ndarray) -> np.ndarray:
    """u32 [n, 128] -> u16 [n, 128, 2]: low half, high half."""
    return np.ascontiguousarray(rows).view(np.uint16).reshape(-1, LANES, 2)


def _pad(v: np.ndarray, n: int) -> np.ndarray:
    out = np.zeros(n, v.dtype)
    out[:len(v)] = v
    return out


def _rows(rows: np.ndarray, count: int) -> None:
    if rows.dtype != np.uint32 or rows.shape != (count, LANES):
        raise ValueError(f"expected uint32 rows [{count}, {LANES}], not {rows.dtype} {list(rows.shape)}")


def _multiple(value: int, of: int, what: str) -> None:
    if value % of or value <= 0:
        raise ValueError(f"{what} is {value}, not a positive multiple of {of}: pad it first")


def _power_of_two(exponent: np.ndarray) -> np.ndarray:
    """f32 2^exponent for exponents -126..127 (and denormal below)."""
    return np.ldexp(np.float32(1), exponent.astype(np.int32))


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """u8 [N, K/2] -> u8 [N, K], low nibble first."""
    out = np.empty((*packed.shape, 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., 0])
    np.right_shift(packed, 4, out=out[..., 1])
    return out.reshape(len(packed), -1)


def _bytes(codes: np.ndarray) -> np.ndarray:
    """u8 codes [K, N] -> u8 [N, K/2], low nibble first: the checkpoint's layout, contiguous."""
    if codes.dtype != np.uint8 or (codes.size and codes.max() > 15):
        raise ValueError(f"codes are uint8 in 0..15, not {codes.dtype}")
    _multiple(codes.shape[0], 2, "K of mxfp4 codes")
    by_output = np.ascontiguousarray(codes.T)
    return by_output[:, 0::2] | (by_output[:, 1::2] << 4)
