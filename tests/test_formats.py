"""Packers against plain loops that say the layout in words, round trips, and the OCP MX rule."""
import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16

from mkgen.errors import MkgenError
from mkgen.pack import formats as f

RNG = np.random.default_rng(7)


def bits16(*shape):
    """Random bf16 bit patterns, NaN and infinities among them: a packer must not care."""
    return RNG.integers(0, 1 << 16, shape, dtype=np.uint16).view(bfloat16)


def same(a, b):
    """Bit for bit, shape and dtype as well."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()


def bitcast_bf16(rows):
    """The kernel's bitcast u32[n, 128] -> bf16[2n, 128]: row 2i from the low halves, 2i + 1 from the high."""
    out = np.empty((2 * len(rows), 128), np.uint16)
    out[0::2], out[1::2] = rows & 0xFFFF, rows >> 16
    return out.view(bfloat16)


@pytest.mark.parametrize("k, n", [(2, 128), (6, 384), (64, 256), (130, 128)])
@pytest.mark.parametrize("transposed", [False, True])
def test_panels(k, n, transposed):
    w = bits16(n, k).T if transposed else bits16(k, n)
    rows = f.pack_panels(w)
    assert rows.shape == (n // 128 * k // 2, 128) and rows.dtype == np.uint32
    same(f.unpack_panels(rows, k, n), w)
    for p in range(n // 128):                           # a panel, bitcast, is 128 columns of W
        panel = rows[p * k // 2:(p + 1) * k // 2]
        same(bitcast_bf16(panel), w[:, 128 * p:128 * (p + 1)])
    u = w.view(np.uint16) if not transposed else w.T.view(np.uint16).T
    for i, l in ((0, 0), (k // 2 - 1, 127), (k // 2 - 1, 5)):
        assert rows[i, l] == int(u[2 * i, l]) | int(u[2 * i + 1, l]) << 16


@pytest.mark.parametrize("k, n", [(128, 16), (256, 48), (640, 32), (128, 144)])
def test_lanes(k, n):
    w = bits16(k, n)
    rows = f.pack_lanes(w)
    assert rows.shape == (k // 128 * n // 2, 128)
    u = w.view(np.uint16)
    want = np.zeros(rows.shape, np.uint32)
    for j in range(k // 128):
        for i in range(n // 2):
            for l in range(128):
                want[j * n // 2 + i, l] = int(u[128 * j + l, 2 * i]) | int(u[128 * j + l, 2 * i + 1]) << 16
    same(rows, want)
    same(bitcast_bf16(rows[:n // 2]), w[:128].T)
    same(f.unpack_lanes(rows, k, n), w)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 255, 256, 257, 1000])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_vectors(n, dtype):
    v = bits16(n) if dtype == "bf16" else RNG.integers(0, 1 << 32, n, dtype=np.uint32).view(np.float32)
    rows = f.pack_vector(v, dtype)
    assert rows.shape == (f.vector_rows(n, dtype), 128) == (-(-n // (128 if dtype == "f32" else 256)), 128)
    flat = (rows.view(np.float32) if dtype == "f32" else bitcast_bf16(rows)).reshape(-1)
    same(flat[:n], v)                                   # element 128 j + l at row j, lane l
    assert not flat[n:].view(np.uint8).any()
    same(f.unpack_vector(rows, n, dtype), v)


def test_a_vector_is_rounded_to_the_dtype_asked_for():
    v = RNG.standard_normal(300).astype(np.float32)
    narrow = v.astype(bfloat16)
    same(f.unpack_vector(f.pack_vector(v, "bf16"), 300, "bf16"), narrow)
    same(f.unpack_vector(f.pack_vector(narrow, "f32"), 300, "f32"), narrow.astype(np.float32))


@pytest.mark.parametrize("k, n", [(32, 128), (96, 256), (160, 128), (128, 384)])
def test_codes_and_scales(k, n):
    codes = RNG.integers(0, 16, (k, n), dtype=np.uint8)
    scales = RNG.integers(1, 255, (k // 32, n), dtype=np.uint8)
    rows, srows = f.pack_codes(codes), f.pack_scales(scales)
    sr = f.scale_rows(k)
    assert rows.shape == (n // 128 * k // 8, 128) and srows.shape == (n // 128 * sr, 128)
    want, swant = np.zeros(rows.shape, np.uint32), np.zeros(srows.shape, np.uint32)
    for p in range(n // 128):
        for l in range(128):
            for kk in range(k):
                want[p * k // 8 + kk // 8, l] |= np.uint32(codes[kk, 128 * p + l]) << np.uint32(4 * (kk % 8))
            for g in range(4 * sr):
                b = scales[g, 128 * p + l] if g < k // 32 else 127
                swant[p * sr + g // 4, l] |= np.uint32(b) << np.uint32(8 * (g % 4))
    same(rows, want)
    same(srows, swant)
    same(f.unpack_codes(rows, k, n), codes)
    same(f.unpack_scales(srows, k, n), scales)


def test_hub_layout():
    n, k = 128, 64
    packed = RNG.integers(0, 256, (n, k // 2), dtype=np.uint8)
    scale = RNG.integers(1, 255, (n, k // 32), dtype=np.uint8)
    codes, scales = f.from_hub(packed, scale)
    for o in range(n):
        for kk in range(k):
            assert codes[kk, o] == (packed[o, kk // 2] >> 4 * (kk % 2)) & 15
            assert scales[kk // 32, o] == scale[o, kk // 32]
    for a, b in zip(f.to_hub(codes, scales), (packed, scale)):
        same(a, b)
    same(f.panels(f.hub_words(packed)), f.pack_codes(codes))                 # the short cut is the same bytes


@pytest.mark.parametrize("byte", [0, 255])
def test_exponents_0_and_255_are_refused(byte):
    scale = np.full((128, 2), 127, np.uint8)
    scale[5, 1] = byte
    with pytest.raises(MkgenError, match=r"gate.weight_scale: 1 of 256 e8m0"):
        f.from_hub(np.zeros((128, 32), np.uint8), scale, "gate.weight_scale")
    with pytest.raises(MkgenError, match="1..254"):
        f.pack_scales(scale.T)


def slow_quantise(group):
    """One group of 32 floats by the letter of the OCP MX spec, in Python's exact arithmetic."""
    top = max(abs(float(x)) for x in group)
    if top == 0:
        return [8 * int(np.signbit(x)) for x in group], 127
    e = int(np.floor(np.log2(np.float64(top)))) - 2
    e = min(max(e, -126), 127)
    codes = []
    for x in group:
        a = min(abs(float(x)) / 2.0 ** e, 6.0)
        near = sorted(range(8), key=lambda c: (abs(float(f.MAGNITUDES[c]) - a), c % 2))[0]
        codes.append(near + 8 * int(np.signbit(x)))
    return codes, e + 127


def test_quantise_against_the_letter_of_the_rule():
    w = (RNG.standard_normal((96, 40)) * 2.0 ** RNG.integers(-20, 20, (1, 40))).astype(np.float32)
    ties = np.array([0, .25, .5, .75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7], np.float32)
    w[:32, 0] = np.concatenate([ties, -ties]) * 2.0 ** -9         # every tie, both signs, saturation
    w[:32, 1] = 0
    w[:32, 2] = np.float32(1e-45) * np.arange(32)                 # denormals: the scale stops at 2^-126
    w[:32, 3] = np.finfo(np.float32).max * np.linspace(-1, 1, 32)
    w[32:64, 0] = 2.0 ** np.arange(-16, 16)                                  # exact powers of two
    codes, scales = f.quantise_mxfp4(w)
    assert codes.shape == (96, 40) and scales.shape == (3, 40) and codes.dtype == scales.dtype == np.uint8
    for g in range(3):
        for n in range(40):
            want = slow_quantise(w[32 * g:32 * (g + 1), n])
            assert (codes[32 * g:32 * (g + 1), n].tolist(), int(scales[g, n])) == want, (g, n)


def test_codes_are_those_of_ml_dtypes():
    same(f.VALUES.astype(ml_dtypes.float4_e2m1fn).view(np.uint8), np.arange(16, dtype=np.uint8))
    w = RNG.uniform(-6, 6, (32, 128)).astype(np.float32)
    w[0] = 6                                                                 # scale 2^0
    codes, scales = f.quantise_mxfp4(w)
    assert (scales == 127).all()
    same(codes, w.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))


def test_dequantise_is_exact_and_quantises_back():
    codes = RNG.integers(0, 16, (64, 128), dtype=np.uint8)
    codes[::32] = 7                                               # a 6 in each group pins its exponent
    scales = RNG.integers(1, 253, (2, 128), dtype=np.uint8)
    w = f.dequantise_mxfp4(codes, scales)
    same(w, (f.VALUES[codes].astype(np.float64) * 2.0 ** (np.repeat(scales, 32, 0).astype(np.float64) - 127))
         .astype(np.float32))
    same(w.astype(bfloat16).astype(np.float32), w)
    for values in (w, w.astype(bfloat16)):
        for a, b in zip(f.quantise_mxfp4(values), (codes, scales)):
            same(a, b)


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(MkgenError, match="not finite"):
        f.quantise_mxfp4(np.full((32, 1), np.inf, np.float32))
    with pytest.raises(ValueError, match="pad it first"):
        f.pack_panels(bits16(4, 100))
    with pytest.raises(ValueError, match="pad it first"):
        f.pack_lanes(bits16(100, 16))
    with pytest.raises(ValueError, match="as_bf16"):
        f.pack_panels(np.zeros((4, 128), np.float32))
    with pytest.raises(ValueError, match="0..15"):
        f.pack_codes(np.full((8, 128), 16, np.uint8))
    with pytest.raises(ValueError, match=r"expected uint32 rows \[2, 128\]"):
        f.unpack_panels(np.zeros((3, 128), np.uint32), 4, 128)
