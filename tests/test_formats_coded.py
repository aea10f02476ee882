"""Storage formats of weights: what codes and scales mean, against plain arithmetic; cuts; what cannot be kept exactly."""
from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from mkgen.errors import MkgenError
from mkgen.pack.coded import Coded, check, decode, encode
from mkgen.pack.recode import recode
from mkgen.spec.formats import FORMATS

RNG = np.random.default_rng(11)
QUANTISED = [name for name in FORMATS if name != "bf16"]
FP4 = [0, .5, 1, 1.5, 2, 3, 4, 6]
# half a step at the end of the range, relative to the largest of a group: what rounding to nearest may cost
WORST = {"int8": .5 / 127, "e4m3": 16 / 448, "e2m1": 1 / 6, "int4": .5 / 7}


def weights(n, k):
    return (RNG.standard_normal((n, k)) * np.exp(RNG.uniform(-3, 3, (n, 1)))).astype(np.float32)


def one_value(c: Coded, n: int, k: int) -> float:
    """By the letter of the table, in Python's arithmetic."""
    f = FORMATS[c.format]
    q = int(c.codes[n, k])
    at = 0 if f.column else k // c.group
    scale = float(c.scales[n, at])
    if f.code == "int8":
        return q * scale
    if f.code == "int4":
        return (q - float(c.zeros[n, at]) if f.zero else q - 16 * (q > 7)) * scale
    if f.code == "e2m1":
        return (-1) ** (q >> 3) * FP4[q & 7] * scale * c.tensor_scale
    exponent, mantissa = q >> 3 & 15, q & 7
    return (-1) ** (q >> 7) * (2.0 ** -6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8)) * scale


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_mean_what_the_table_says(name):
    w = weights(150, 330)                                                    # the last groups and blocks are short
    c = encode(name, w)
    got = decode(c)
    for n, k in zip(RNG.integers(0, 150, 200), RNG.integers(0, 330, 200)):
        assert np.isclose(one_value(c, n, k), got[n, k], rtol=1e-6, atol=0)
    check(c, name)


@pytest.mark.parametrize("name", QUANTISED)
def test_encoding_is_as_close_as_the_format_allows(name):
    f, w = FORMATS[name], weights(150, 330)
    error = np.abs(decode(encode(name, w)) - w)
    edge = 330 if f.column else f.group
    for n0 in range(0, 150, f.block):
        for k0 in range(0, 330, edge):
            cut = slice(n0, n0 + f.block), slice(k0, k0 + edge)
            bound = WORST[f.code] * (np.abs(w[cut]).max() if not f.zero else np.ptp(w[cut]) + 1e-9)
            slack = 2.2 if name == "nvfp4" or f.scale == "e8m0" or f.zero else 1.1     # scale rounded; mxfp4 saturates above 6
            assert error[cut].max() <= slack * bound, (n0, k0)


@pytest.mark.parametrize("name", QUANTISED)
def test_what_is_exact_in_a_format_stays_so(name):
    """Values of a Coded whose groups reach the end of the range are found again, code by code."""
    f = FORMATS[name]
    c = encode(name, weights(64, 256))
    again = encode(name, decode(c))
    if f.zero or f.code == "int4" and f.scale != "f32":                      # a rounded scale may move a code
        assert np.abs(decode(again) - decode(c)).max() <= np.abs(decode(c)).max() * WORST["int4"] * 2
    elif name in ("int8", "fp8", "fp8_block", "mxfp4"):
        np.testing.assert_allclose(decode(again), decode(c), rtol=1e-6)


@pytest.mark.parametrize("name", QUANTISED)
def test_cuts_and_finer_groups_keep_the_values(name):
    f, w = FORMATS[name], weights(96, 320)
    c, whole = encode(name, w), decode(encode(name, w))
    np.testing.assert_array_equal(decode(c.outputs(17, 50)), whole[17:50])
    edge = f.group or 64
    np.testing.assert_array_equal(decode(c.inputs(edge, 2 * edge)), whole[:, edge:2 * edge])
    np.testing.assert_array_equal(decode(c.inputs(2 * edge, 320)), whole[:, 2 * edge:])
    if f.group:
        with pytest.raises(ValueError, match="cuts a group"):
            c.inputs(edge // 2, edge)
        fine = c.regrouped(f.group // 2)
        np.testing.assert_array_equal(decode(fine), whole)
        np.testing.assert_array_equal(decode(fine.inputs(edge // 2, edge)), whole[:, edge // 2:edge])


def test_a_scale_that_is_not_stored_exactly_is_refused():
    c = encode("int4_g64", weights(8, 128))
    odd = Coded(c.format, c.codes, np.float32(np.float16(0.1)) + 0 * c.scales)
    with pytest.raises(MkgenError, match=r"x.weight: 16 of 16 scales of int4_g64 are no bf16 numbers(.|\n)*int4_g64_f16"):
        check(odd, "x.weight")
    check(Coded("int4_g64_f16", odd.codes, odd.scales), "x.weight")
    tiny = np.full_like(c.scales, np.float32(np.float16(3e-6)))              # a denormal f16: some checkpoints have them
    check(Coded("int4_g64_f16", odd.codes, tiny), "x.weight")
    for bad in (3.0, 2.0 ** -127, np.inf, np.nan):
        m = encode("mxfp4", weights(4, 32))
        with pytest.raises(MkgenError, match="e8m0"):
            check(Coded("mxfp4", m.codes, np.full_like(m.scales, bad)), "x.weight")
    z = encode("int4_g32_zero", weights(4, 32))
    check(Coded(z.format, z.codes, z.scales, z.zeros * 0 + 16), "x.weight")  # GPTQ's largest
    with pytest.raises(MkgenError, match="whole numbers"):
        check(Coded(z.format, z.codes, z.scales, z.zeros + 0.5), "x.weight")


def test_a_group_of_zeros():
    for name in QUANTISED:
        assert not decode(encode(name, np.zeros((8, 160), np.float32))).any(), name


def test_nibbles_are_those_of_ml_dtypes():
    codes = np.arange(16, dtype=np.uint8)[None].repeat(2, 0)
    nv = Coded("nvfp4", codes, np.ones((2, 1), np.float32))
    np.testing.assert_array_equal(decode(nv)[0], codes[0].view(ml_dtypes.float4_e2m1fn).astype(np.float32))
    signed = Coded("int4_g32", codes, np.ones((2, 1), np.float32))
    np.testing.assert_array_equal(decode(signed)[0], [*range(8), *range(-8, 0)])


def test_shapes_are_held():
    with pytest.raises(ValueError, match="has scales"):
        Coded("int8", np.zeros((4, 8), np.int8), np.ones((4, 2), np.float32))
    with pytest.raises(ValueError, match="zero points"):
        Coded("int4_g32_zero", np.zeros((4, 32), np.uint8), np.ones((4, 1), np.float32))


def test_mxfp4_as_fp8_keeps_every_bit_or_is_refused():
    """Powers of two up to 14 apart fit under one coarse scale; farther apart the smallest codes would be lost."""
    codes = RNG.integers(0, 16, (8, 600)).astype(np.uint8)                    # the last coarse group is short
    steps = RNG.integers(0, 15, (8, 19))
    fine = Coded("mxfp4", codes, np.ldexp(np.float32(1), steps - 20))
    coarse = recode(fine, "fp8_g256")
    assert coarse.scales.shape == (8, 3) and np.array_equal(decode(coarse), decode(fine))
    check(coarse, "w")
    far = replace(fine, codes=np.where(codes == 0, 1, codes), scales=np.ldexp(np.float32(1), np.where(steps == 0, -16, steps) - 20))
    assert (steps == 0).any() and recode(far, "fp8_g256") is None
    assert recode(encode("nvfp4", weights(8, 600)), "fp8_g256") is None       # other formats are no such case
