"""Checkpoints of the quantisers in use: read without loss, stored bit for bit where the build's format is theirs."""
import json

import numpy as np
import pytest
from hubs import QWEN, checkpoint, hub_tensors, load, role_values, same, small_plan
from vendors import CONFIG, FORMAT, KINDS, gptq, int4_packed, quantised

from mkgen.errors import MkgenError
from mkgen.pack.coded import Coded, decode, encode
from mkgen.pack.hub import Arrays, Checkpoint
from mkgen.pack.image import embedding_image
from mkgen.pack.places import TapePlaces, expert_layers
from mkgen.pack.recode import nearest, recode
from mkgen.pack.unpack import expert_from_images, weight_from_tapes
from mkgen.pack.vendor import find
from mkgen.pack.write import pack
from mkgen.reference.params import TensorParams

RNG = np.random.default_rng(2)


class Told(Arrays):
    """Tensors in memory with the configuration of a folder."""
    def __init__(self, tensors, **quantization):
        super().__init__(tensors)
        self.quantization = quantization


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(200, 384), (16, 256), (3, 48, 128)])
def test_every_layout_stands_for_its_values(kind, shape):
    t, values = quantised(kind, "a.proj.weight", shape, RNG)
    layout = find(Told(t, **CONFIG.get(kind, {})), "a.proj.weight", len(shape) - 2)
    assert layout.shape == shape and not layout.faults()
    assert set(layout.names) | set(layout.spare) == set(t)
    for e in range(shape[0]) if len(shape) == 3 else [None]:
        c = layout.read(e)
        assert isinstance(c, Coded) and c.format == FORMAT[kind]
        same(decode(c), values if e is None else values[e])


def test_stacks_in_one_tensor_have_names_without_weight():
    t, values = quantised("mxfp4_blocks", "mlp.experts.gate_up", (2, 8, 64), RNG)
    assert set(t) == {"mlp.experts.gate_up_blocks", "mlp.experts.gate_up_scales"}
    same(decode(find(Arrays(t), "mlp.experts.gate_up", 1).read(1)), values[1])
    t, values = quantised("fp8_block", "mlp.experts.gate_up", (2, 8, 64), RNG)
    same(decode(find(Arrays(t), "mlp.experts.gate_up", 1).read(0)), values[0])


@pytest.mark.parametrize("group, k, zero, want", [(128, 256, False, "int4_g128"), (64, 192, True, "int4_g64_zero"), (32, 96, False, "int4_g32"),
                                                  (256, 512, True, "int4_g128_zero"), (96, 192, False, "int4_g32"), (48, 96, False, None)])
def test_groups_of_int4(group, k, zero, want):
    t, values = quantised(lambda rng, n, k: int4_packed(rng, n, k, group, zero), "w.weight", (24, k), RNG)
    c = find(Told(t, config_groups={"group_0": {"weights": {"group_size": group}}}), "w.weight").read()
    assert (c.format if isinstance(c, Coded) else None) == want
    same(decode(c) if want else c, values)


def test_activation_order_is_read_but_is_no_format():
    order = RNG.permutation(256) // 128
    t, values = quantised(lambda rng, n, k: gptq(rng, n, k, order=order), "w.weight", (16, 256), RNG)
    got = find(Arrays(t), "w.weight").read()
    assert isinstance(got, np.ndarray)
    same(got, values)
    t["w.g_idx"] = t["w.g_idx"] + 1
    with pytest.raises(MkgenError, match="g_idx names group 2, there are 2"):
        find(Arrays(t), "w.weight").read()


def test_symmetric_gptq_needs_no_zero_points():
    t, values = quantised(lambda rng, n, k: gptq(rng, n, k, zero=False), "w.weight", (16, 256), RNG)
    c = find(Arrays(t), "w.weight").read()
    assert c.format == "int4_g128_f16"
    same(decode(c), values)
    with_zeros = recode(c, "int4_g128_zero_f16")
    same(decode(with_zeros), values)
    same(decode(recode(with_zeros, "int4_g32_f16")), values)


@pytest.mark.parametrize("kind, damage, words", [
    ("fp8_block", {"w.weight_scale_inv": np.ones((1, 3), np.float32)}, "misshapen w.weight_scale_inv"),
    ("fp8_block", {"w.weight_scale_inv": None}, "missing w.weight_scale"),
    ("fp8_tensor", {"w.weight_scale": np.ones(2, np.float32)}, "misshapen w.weight_scale"),
    ("int8", {"w.weight_scale": np.ones((200, 1), np.int32)}, "misdtyped w.weight_scale"),
    ("mxfp4", {"w.weight_scale": np.ones((200, 11), np.uint8)}, "misshapen w.weight_scale"),
    ("nvfp4", {"w.weight_scale": np.ones((200, 24), np.uint8)}, "misdtyped w.weight_scale"),
    ("nvfp4_packed", {"w.weight_scale": None}, "missing w.weight_scale"),
    ("int4_packed", {"w.weight_scale": np.ones((199, 12), np.float32)}, "misshapen w.weight_scale"),
    ("gptq", {"w.qzeros": None}, "missing w.qzeros"),
    ("gptq", {"w.g_idx": np.zeros(383, np.int32)}, "misshapen w.g_idx"),
    ("awq", {"w.qzeros": np.zeros((6, 24), np.int32)}, "misshapen w.qzeros"),
    ("awq", {"w.scales": None}, "missing w.scales")])
def test_parts_that_do_not_fit(kind, damage, words):
    t, _ = quantised(kind, "w.weight", (200, 384), RNG)
    t = {n: a for n, a in (t | damage).items() if a is not None}
    faults = [f"{what} {name}" for what, name, _ in find(Arrays(t), "w.weight").faults()]
    assert words in faults


def test_bits_that_cannot_be_read():
    t, _ = quantised("gptq", "w.weight", (200, 384), RNG)
    (_, _, detail), = find(Told(t, bits=8), "w.weight").faults()
    assert "8 bits" in detail


# -- from one format to another --------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, fmt, exact", [
    ("fp8_tensor", "fp8_block", True), ("fp8_channel", "fp8_block", True), ("fp8_block", "fp8", False), ("awq", "int4_g32_zero_f16", True),
    ("awq", "int4_g128_zero_f16", False), ("awq", "int4_g64_zero", False), ("awq", "int4_g64_f16", False), ("mxfp4", "bf16", None),
    ("mxfp4", "fp8", None), ("int4_packed", "int4_g32_f16", True), ("fp8_block", "int8", None)])
def test_what_is_the_same_in_another_format(kind, fmt, exact):
    t, values = quantised(kind, "w.weight", (160, 256), RNG)
    c = find(Arrays(t), "w.weight").read()
    made = recode(c, fmt)
    assert (made is not None) == bool(exact)
    if exact:
        same(decode(made), values)
    else:
        near = nearest(c, fmt)
        assert near.format == fmt
        error = np.abs(decode(near) - values).max() / np.abs(values).max()
        assert error <= {"bf16": 2 ** -9, "int4_g64_zero": 2 ** -8}.get(fmt, .2)
        if exact is None and fmt == "bf16":
            assert error == 0                # mxfp4 is exact in bf16
