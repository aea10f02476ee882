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


# -- packed ----------------------------------------------------------------------------------------------------------

SIZES = QWEN | {"hidden": 384, "mixers": {"attention": {"heads": 8, "kv_heads": 4, "head_dim": 48}}, "ffns": {"moe": {"experts": 8, "top_k": 2, "width": 64}}}
PROJECTIONS = ("q", "k", "v", "o")


def vendor_hub(plan, kind, roles, seed=0):
    """The plan's checkpoint with the tensors of some roles as `kind` keeps them, and the values of all roles' tensors."""
    rng, t, values = np.random.default_rng(seed), hub_tensors(plan.spec.model, seed=seed), {}
    patterns = [plan.spec.model.checkpoint[r].partition(" ")[0].split("{")[-1].partition("}")[2] for r in roles]
    for name in [n for n in t if any(n.endswith(p) for p in patterns)]:
        made, values[name] = quantised(kind, name, t.pop(name).shape, rng)
        t |= made
    return t, t | values


def written(folder, t, **quantization):
    hub = checkpoint(folder, t)
    (hub / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return hub


def attention_plan(folder, fmt, ranks=4, patterns=None):
    folder.mkdir(parents=True, exist_ok=True)
    formats = {f"attention.{c}": fmt for c in PROJECTIONS} if fmt else {}
    return small_plan(folder, "qwen3_30b_a3b", SIZES | {"checkpoint": patterns or {}}, ranks, replicate=[], formats=formats)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_the_vendor_s_format_is_stored_bit_for_bit(tmp_path, kind, ranks):
    """Over four ranks `o` has 96 rows of K on each: cuts go through groups and blocks."""
    plan = attention_plan(tmp_path, FORMAT[kind], ranks)
    t, values = vendor_hub(plan, kind, [f"attention.{c}" for c in PROJECTIONS])
    figures = pack(plan, written(tmp_path / "hub", t, **CONFIG.get(kind, {})), tmp_path / "out")
    assert not figures["converted"] and not figures["rounded_to_bf16"]
    assert figures["families"]["attention.o"]["packed"] == [FORMAT[kind]] and figures["families"]["moe.router"]["packed"] == ["bf16"]
    tapes, places = [p.tape for p in load(plan, tmp_path / "out")], TapePlaces(plan)
    source = TensorParams(Told(t, **CONFIG.get(kind, {})), plan.spec.model.checkpoint)
    for layer in range(2):
        for c in PROJECTIONS:
            want = values[plan.spec.model.checkpoint[f"attention.{c}"].format(layer=layer)]
            same(weight_from_tapes(places, tapes, layer, f"attention.{c}"), want.T)
            same(source.weight(plan.weights[f"attention.{c}"], layer), np.ascontiguousarray(want.T))


@pytest.mark.parametrize("kind", ["fp8_block", "awq", "nvfp4", "int4_packed"])
def test_parts_of_a_quantised_tensor(tmp_path, kind):
    """q, k and v out of one quantised tensor, not at the edges of its blocks."""
    a = "model.layers.{layer}.self_attn.qkv.weight | rows "
    plan = attention_plan(tmp_path, FORMAT[kind], 2 + 2, {"attention.q": a + "0:384", "attention.k": a + "384:576", "attention.v": a + "576:768"})
    t, values = vendor_hub(plan, kind, ["attention.q", "attention.o"])
    pack(plan, written(tmp_path / "hub", t), tmp_path / "out")
    tapes = [p.tape for p in load(plan, tmp_path / "out")]
    for c, rows in (("q", slice(0, 384)), ("k", slice(384, 576)), ("v", slice(576, 768))):
        want = values["model.layers.1.self_attn.qkv.weight"][rows]
        same(weight_from_tapes(TapePlaces(plan), tapes, 1, f"attention.{c}"), want.T)


@pytest.mark.parametrize("kind, exact", [("mxfp4", True), ("fp8_block", False), ("awq", False)])
def test_as_bf16_only_where_exact_or_asked_for(tmp_path, kind, exact):
    plan = attention_plan(tmp_path, None)
    t, values = vendor_hub(plan, kind, ["attention.q"])
    hub = written(tmp_path / "hub", t)
    if not exact:
        words = rf"(?s)q_proj.weight: \d+ of 147456 values are not exact in bf16.*attention\.q={FORMAT[kind]} to keep them, or --convert"
        with pytest.raises(MkgenError, match=words):
            pack(plan, hub, tmp_path / "out")
        assert not (tmp_path / "out.partial").exists()
    figures = pack(plan, hub, tmp_path / "out", convert=not exact)
    got = weight_from_tapes(TapePlaces(plan), [p.tape for p in load(plan, tmp_path / "out")], 1, "attention.q")
    want = values["model.layers.1.self_attn.q_proj.weight"].T
    same(got, want.astype(got.dtype))
    assert exact or figures["converted"]["bf16"] == {"model.layers.#.self_attn.q_proj.weight": {
        "tensors": 2, "values": sum(int((v.astype(got.dtype).astype(np.float32) != v).sum()) for n, v in values.items() if "q_proj.weight" in n
                                    and v.shape == (384, 384) and v.dtype == np.float32)}}


def test_any_format_from_plain_weights(tmp_path):
    for fmt in ("int8", "int4_g32_zero", "nvfp4"):
        plan = attention_plan(tmp_path / fmt, fmt)
        t = hub_tensors(plan.spec.model)
        hub = written(tmp_path / fmt / "hub", t)
        with pytest.raises(MkgenError, match=rf"(?s)attention\.o is {fmt}, the checkpoint's are bf16.*--convert"):
            pack(plan, hub, tmp_path / fmt / "out")
        figures = pack(plan, hub, tmp_path / fmt / "out", convert=True)
        assert figures["converted"][fmt]["model.layers.#.self_attn.o_proj.weight"]["tensors"] == 2
        tapes = [p.tape for p in load(plan, tmp_path / fmt / "out")]
        want = decode(encode(fmt, t["model.layers.0.self_attn.o_proj.weight"]))
        same(weight_from_tapes(TapePlaces(plan), tapes, 0, "attention.o"), want.T)


def test_scales_that_need_the_other_format_say_so(tmp_path):
    """AWQ's f16 scales are no bf16 numbers: codes are kept, scales rounded, and only if asked for."""
    plan = attention_plan(tmp_path, "int4_g64_zero")
    t, values = vendor_hub(plan, "awq", [f"attention.{c}" for c in PROJECTIONS])
    hub = written(tmp_path / "hub", t)
    with pytest.raises(MkgenError, match=r"--set build\.formats\.attention\.q=int4_g64_zero_f16"):
        pack(plan, hub, tmp_path / "out")
    pack(plan, hub, tmp_path / "out", convert=True)
    got = weight_from_tapes(TapePlaces(plan), [p.tape for p in load(plan, tmp_path / "out")], 0, "attention.k")
    want = values["model.layers.0.self_attn.k_proj.weight"].T
    assert 0 < np.abs(got - want).max() <= np.abs(want).max() * 2 ** -8


@pytest.mark.parametrize("kind", ["mxfp4", "mxfp4_blocks"])
@pytest.mark.parametrize("turned", [False, True])
def test_stacked_mxfp4_experts(tmp_path, kind, turned):
    """Gate and up interleaved in one stack; the pattern of the plain twin, which is turned, does as well."""
    e, turn = "model.layers.{layer}.mlp.experts.", "T | " * turned
    patterns = {"moe.expert_gate": e + f"gate_up | {turn}each 2 0:1", "moe.expert_up": e + f"gate_up | {turn}each 2 1:2",
                "moe.expert_down": e + "down" + " | T" * turned}
    sizes = SIZES | {"checkpoint": patterns}
    plan = small_plan(tmp_path, "qwen3_30b_a3b", sizes, 4, replicate=[], formats={"experts": "mxfp4"})
    rng, t = np.random.default_rng(0), {n: a for n, a in hub_tensors(plan.spec.model).items() if "experts" not in n}
    values = {}
    for layer in range(2):
        for name, shape in (("gate_up", (8, 128, 384)), ("down", (8, 384, 64))):
            made, values[name, layer] = quantised(kind, f"model.layers.{layer}.mlp.experts.{name}", shape, rng)
            t |= made
    figures = pack(plan, written(tmp_path / "hub", t), tmp_path / "out")
    assert not figures["converted"]
    image, images = plan.experts[0], [p.experts["experts"] for p in load(plan, tmp_path / "out")]
    source = TensorParams(t, plan.spec.model.checkpoint)
    for layer in range(2):
        for expert in (0, 5):
            got = expert_from_images(image, images, layer, expert)
            whole = values["gate_up", layer][expert]
            for coded, want, name in zip(got, (whole[0::2], whole[1::2], values["down", layer][expert]), image.weights):
                same(decode(coded), np.ascontiguousarray(want))
                same(source.expert(plan.weights[name], layer, expert), np.ascontiguousarray(want.T))


def test_what_is_wrong_with_quantised_weights_is_said_at_once(tmp_path):
    plan = attention_plan(tmp_path, "fp8_block")
    t, _ = vendor_hub(plan, "fp8_block", [f"attention.{c}" for c in PROJECTIONS])
    p = "model.layers.0.self_attn."
    good = dict(t)
    t[p + "q_proj.weight"] = t[p + "q_proj.weight"].copy()
    t[p + "q_proj.weight"].view(np.uint8)[3, 3] = 0x7F
    t[p + "k_proj.weight_scale_inv"] = t[p + "k_proj.weight_scale_inv"] * np.float32(np.inf)
    with pytest.raises(MkgenError) as caught:
        pack(plan, written(tmp_path / "nan", t), tmp_path / "out")
    assert all(f"{p}{c}_proj.weight: " in str(caught.value) for c in "qk") and "not finite" in str(caught.value) or "NaN" in str(caught.value)
    del good[p + "v_proj.weight_scale_inv"]
    good[p + "o_proj.weight_scale_inv"] = good[p + "o_proj.weight_scale_inv"][:2]
    with pytest.raises(MkgenError, match="2 problems") as caught:
        pack(plan, written(tmp_path / "bad", good), tmp_path / "out")
    assert f"missing: {p}v_proj.weight_scale" in str(caught.value) and f"misshapen: {p}o_proj.weight_scale_inv" in str(caught.value)


@pytest.mark.parametrize("kind", ["fp8_block", "fp8_channel", "int8", "nvfp4", "int4_packed", "awq", "gptq"])
def test_experts_in_the_vendor_s_format(tmp_path, kind):
    """One tensor an expert; over four ranks each expert is cut in two, through groups and blocks of down's K."""
    sizes = SIZES | {"ffns": {"moe": {"experts": 4, "top_k": 2, "width": 128}}}
    plan = small_plan(tmp_path, "qwen3_30b_a3b", sizes, 4, replicate=[], formats={"experts": FORMAT[kind]})
    t, values = vendor_hub(plan, kind, plan.experts[0].weights)
    figures = pack(plan, written(tmp_path / "hub", t, **CONFIG.get(kind, {})), tmp_path / "out")
    assert not figures["converted"] and figures["families"]["moe.expert_down"]["packed"] == [FORMAT[kind]]
    image, images = plan.experts[0], [p.experts["experts"] for p in load(plan, tmp_path / "out")]
    source = TensorParams(Told(t, **CONFIG.get(kind, {})), plan.spec.model.checkpoint)
    for layer, expert in ((0, 0), (1, 3)):
        for coded, name in zip(expert_from_images(image, images, layer, expert), image.weights):
            want = values[plan.spec.model.checkpoint[name].format(layer=layer, expert=expert)]
            same(decode(coded), want)
            same(source.expert(plan.weights[name], layer, expert), np.ascontiguousarray(want.T))
