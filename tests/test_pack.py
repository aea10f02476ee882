"""Packing: every weight comes back bit for bit, from all ranks; files are the images in memory."""
import numpy as np
import pytest
from hubs import KIMI, QWEN, checkpoint, expert_names, hub_tensors, load, make, same, small_plan, with_mxfp4_experts
from ml_dtypes import bfloat16

from mkgen.errors import MkgenError
from mkgen.graph.weights import assemble
from mkgen.pack import write
from mkgen.pack import sections
from mkgen.pack.coded import Coded, decode, encode
from mkgen.pack.formats import dequantise_mxfp4, from_hub, pack_lanes, pack_panels, quantise_mxfp4
from mkgen.pack.image import embedding_image, expert_image, put_expert, put_matrix, tape_image
from mkgen.pack.packed import load_packed
from mkgen.pack.places import Home, TapePlaces, embedding_weight, expert_layers, expert_ranks, share
from mkgen.pack.unpack import (embedding_from_images, expert_from_images, matrix_from_tape, vector_from_tape,
                               weight_from_tapes)
from mkgen.pack.wanted import tensor_names
from mkgen.pack.write import pack
from mkgen.plan.experts import plan_experts
from mkgen.plan.layout import layout_hash
from mkgen.plan.tape import Matrix, Part
from mkgen.reference.params import TensorParams

PLANS = [("kimi_k3", KIMI, ranks, fmt) for ranks in (1, 4) for fmt in ("bf16", "mxfp4")]
PLANS += [("qwen3_30b_a3b", QWEN, ranks, "bf16") for ranks in (1, 4)]
each_plan = pytest.mark.parametrize("base, sizes, ranks, fmt", PLANS,
                                    ids=lambda v: "" if isinstance(v, dict) else str(v))


def logical(plan, t, weight, layer, expert=None):
    """What the graph says that a weight is, in the dtype in which it is stored."""
    value = assemble(weight.assemble, *(t[n] for n in tensor_names(plan, weight, layer, expert)))
    return np.asarray(value).astype(bfloat16 if weight.dtype == "bf16" else np.float32)


@each_plan
def test_round_trip(tmp_path, base, sizes, ranks, fmt):
    plan, t, hub = make(tmp_path, base, sizes, ranks, fmt)
    figures = pack(plan, hub, tmp_path / "out")
    packed = load(plan, tmp_path / "out")
    places = TapePlaces(plan)
    weights = {w.name for s in plan.graph.sublayers() for op in s.ops for w in op.weights()}
    assert weights - {"embed", *plan.experts[0].weights} == {name for _, name in places.homes}
    for layer, name in places.homes:
        value = weight_from_tapes(places, [p.tape for p in packed], layer, name)
        same(value, logical(plan, t, plan.weights[name], layer))
    same(embedding_from_images(plan, [p.embedding for p in packed]), logical(plan, t, embedding_weight(plan), None))
    for index, layer in enumerate(expert_layers(plan, plan.experts[0])):
        for e in range(plan.experts[0].experts):
            values = expert_from_images(plan.experts[0], [p.experts["experts"] for p in packed], index, e)
            for name, value in zip(plan.experts[0].weights, values):
                tensor, = tensor_names(plan, plan.weights[name], layer, e)
                if fmt == "bf16":
                    same(value.codes, t[tensor])
                    continue
                stem = tensor.removesuffix(".weight")
                codes, scales = from_hub(t[f"{stem}.weight_packed"], t[f"{stem}.weight_scale"])
                same(value.codes, codes.T)
                same(value.scales, np.ldexp(np.float32(1), scales.T.astype(np.int32) - 127))
    assert figures["layout_hash"] == layout_hash(plan) == packed[0].manifest["layout_hash"]
    assert figures["bytes"] == sum(a.nbytes for p in packed for a in (p.tape, p.experts["experts"], p.embedding))
    assert not figures["rounded_to_bf16"] and not figures["converted"]
    assert figures["checkpoint_bytes"] == sum(a.nbytes for a in t.values())


@each_plan
def test_the_files_are_the_images_in_memory(tmp_path, base, sizes, ranks, fmt):
    plan, t, hub = make(tmp_path, base, sizes, ranks, fmt)
    pack(plan, hub, tmp_path / "out")

    class Source(TensorParams):
        def expert_coded(self, weight, layer, e):
            stem = tensor_names(plan, weight, layer, e)[0].removesuffix(".weight")
            codes, scales = from_hub(t[f"{stem}.weight_packed"], t[f"{stem}.weight_scale"])
            return Coded("mxfp4", codes.T, np.ldexp(np.float32(1), scales.T.astype(np.int32) - 127))

    source = Source(t, plan.spec.model.checkpoint)
    for rank, p in enumerate(load(plan, tmp_path / "out")):
        same(p.tape, tape_image(plan, rank, source))
        same(p.experts["experts"], expert_image(plan, plan.experts[0], rank, source))
        same(p.embedding, embedding_image(plan, rank, source))


@each_plan
def test_padding_is_zero_and_blocks_are_as_the_kernel_reads_them(tmp_path, base, sizes, ranks, fmt):
    plan, t, hub = make(tmp_path, base, sizes, ranks, fmt)
    pack(plan, hub, tmp_path / "out")
    places, packed = TapePlaces(plan), load(plan, tmp_path / "out")
    for (layer, name), entries in places.entries.items():
        for rank, p in enumerate(packed):
            if name in plan.vectors and entries[0][0] is None:
                v, got = plan.vectors[name], vector_from_tape(places, p.tape, layer, name)
                assert not got[:, v.width:].any()
                (_, row), = entries
                used = got.size // (128 if v.dtype == "f32" else 256)
                assert not p.tape[row + used + 1:row + v.rows].any()
                continue
            m, got = plan.matrices[name], matrix_from_tape(places, p.tape, layer, name)
            want, at = np.zeros_like(got), 0
            for part in m.parts:
                w = plan.weights[part.weight]
                k, n = (share(w, axis, m, ranks, rank) for axis in (0, 1))
                local = logical(plan, t, w, layer)[k, n]
                want[:local.shape[0], at:at + local.shape[1]] = local
                at += part.width
            same(got, want)
            write_block = pack_panels if m.layout == "panels" else pack_lanes
            for block, row in entries:
                n, k = divmod(block, m.k_blocks)
                cut = want[k * m.block_k:(k + 1) * m.block_k, n * m.block_n:(n + 1) * m.block_n]
                same(p.tape[row:row + m.block_rows], write_block(cut))


@pytest.mark.parametrize("layout, k, k_padded, n_padded, block_k, block_n", [
    ("panels", 250, 256, 256, 128, 128), ("panels", 13, 16, 256, 16, 256), ("panels", 384, 384, 384, 128, 384),
    ("lanes", 256, 256, 176, 128, 176), ("lanes", 384, 384, 176, 384, 176), ("lanes", 128, 128, 192, 128, 96)])
def test_parts_of_any_width_share_a_matrix(layout, k, k_padded, n_padded, block_k, block_n):
    """Whatever the planner chooses: odd widths put two parts into one word, or one into several panels and blocks."""
    rng, widths = np.random.default_rng(3), (5, 131, 1, 26)
    m = Matrix("m", tuple(Part(str(i), w) for i, w in enumerate(widths)), layout, k, sum(widths), k_padded, n_padded,
               block_k, block_n, False)
    want, at = np.zeros((k_padded, n_padded), bfloat16), 0
    tape = np.zeros((m.rows + 8, 128), np.uint32)
    order = rng.permutation(m.blocks)                                             # blocks may lie anywhere
    entries = [(int(b), 8 + i * m.block_rows) for i, b in enumerate(order)]
    for i, width in enumerate(widths):
        local = rng.standard_normal((k, width), np.float32).astype(bfloat16)
        put_matrix(tape, entries, Home(m, i, at), local)
        want[:k, at:at + width] = local
        at += width
    for block, row in entries:
        n, i = divmod(block, m.k_blocks)
        cut = want[i * block_k:(i + 1) * block_k, n * block_n:(n + 1) * block_n]
        same(tape[row:row + m.block_rows], (pack_panels if layout == "panels" else pack_lanes)(cut))
    assert not tape[:8].any()


def test_every_row_of_the_tape_belongs_to_one_entry(tmp_path):
    plan, *_ = make(tmp_path)
    taken = np.zeros(plan.tape_rows, int)
    for (_, name), entries in TapePlaces(plan).entries.items():
        for block, row in entries:
            taken[row:row + (plan.vectors[name].rows if block is None else plan.matrices[name].block_rows)] += 1
    assert (taken == 1).all()


def test_kv_heads_are_repeated(tmp_path):
    plan, t, hub = make(tmp_path, "qwen3_30b_a3b", QWEN, 4, "bf16")
    pack(plan, hub, tmp_path / "out")
    places = TapePlaces(plan)
    k, qkv = plan.weights["attention.k"], plan.matrices["attention.qkv"]
    assert [share(k, 1, qkv, 4, r) for r in range(4)] == [slice(0, 40)] * 2 + [slice(40, 80)] * 2
    tapes = [p.tape for p in load(plan, tmp_path / "out")]
    home, = places.homes[0, "attention.k"]
    parts = [matrix_from_tape(places, tape, 0, home.of.name)[:336, home.at:home.at + 40] for tape in tapes]
    same(parts[0], parts[1])
    same(np.concatenate([parts[0], parts[2]], 1), logical(plan, t, k, 0))


def test_ranks_by_themselves(tmp_path):
    plan, _, hub = make(tmp_path)
    pack(plan, hub, tmp_path / "all")
    pack(plan, hub, tmp_path / "some", ranks=[2])
    one, all_ = load_packed(tmp_path / "some", 2), load_packed(tmp_path / "all", 2)
    same(one.tape, all_.tape)
    same(one.experts["experts"], all_.experts["experts"])
    with pytest.raises(MkgenError, match=r"holds ranks \[2\], not 0"):
        load_packed(tmp_path / "some", 0)
    with pytest.raises(MkgenError, match="no rank 4"):
        pack(plan, hub, tmp_path / "none", ranks=[4])


def test_a_tied_head_reads_its_table_once(tmp_path):
    tied = QWEN | {"tied_head": True, "checkpoint": {"head": None}}
    plan = small_plan(tmp_path, "qwen3_30b_a3b", tied, 4, replicate=[])
    t = hub_tensors(plan.spec.model)
    hub = checkpoint(tmp_path / "tied", t)
    last = []
    pack(plan, hub, tmp_path / "out", progress=lambda done, total, name: last.append((done, total)))
    assert last[-1][0] == last[-1][1] == sum(a.nbytes for a in t.values())
    packed = load(plan, tmp_path / "out")
    table = t["model.embed_tokens.weight"]
    same(embedding_from_images(plan, [p.embedding for p in packed]), table)
    same(weight_from_tapes(TapePlaces(plan), [p.tape for p in packed], None, "head"), table.T)


# -- formats of the checkpoint ---------------------------------------------------------------------------------------

def test_per_head_vectors_may_be_padded(tmp_path):
    plan, t, hub = make(tmp_path)
    pack(plan, hub, tmp_path / "out")
    longer = {n: np.append(a, np.full(5, np.float32(7)))[None, None] if n.endswith("A_log") else a
              for n, a in t.items()}
    pack(plan, checkpoint(tmp_path / "longer", longer), tmp_path / "out2")
    for a, b in zip(load(plan, tmp_path / "out"), load(plan, tmp_path / "out2")):
        same(a.tape, b.tape)


def test_f32_is_rounded_counted_and_reported(tmp_path):
    plan, t, _ = make(tmp_path, fmt="bf16")
    name = next(n for n in t if n.endswith("o_proj.weight"))
    t[name] = t[name].astype(np.float32)
    t[name].reshape(-1)[:3] += np.float32(1e-6)
    figures = pack(plan, checkpoint(tmp_path / "f32", t), tmp_path / "out")
    assert figures["rounded_to_bf16"] == {name.replace("0", "#"): {"tensors": 1, "values": 3}}
    assert "3 values of 1 tensors" in write.describe(figures)
    t[name].reshape(-1)[0] = 3.4e38
    with pytest.raises(MkgenError, match="1 of .* values are too large for bf16"):
        pack(plan, checkpoint(tmp_path / "f32", t), tmp_path / "out2")


def test_f16_is_taken(tmp_path):
    plan, t, _ = make(tmp_path, fmt="bf16")
    half = {n: a.astype(np.float16) if a.ndim == 2 and "proj" in n else a for n, a in t.items()}
    pack(plan, checkpoint(tmp_path / "f16", half), tmp_path / "out")
    name, = (n for n in t if n.endswith("layers.3.self_attn.kv_b_proj.weight"))
    v_up = plan.weights["mla.v_up"]
    same(weight_from_tapes(TapePlaces(plan), [p.tape for p in load(plan, tmp_path / "out")], 3, "mla.v_up"),
         assemble(v_up.assemble, half[name]).astype(bfloat16))


def test_mxfp4_experts_as_bf16_are_exact(tmp_path):
    plan, t, _ = make(tmp_path, fmt="bf16")
    t = with_mxfp4_experts(plan.spec.model, t)
    figures = pack(plan, checkpoint(tmp_path / "mx", t), tmp_path / "out")
    packed = [p.experts["experts"] for p in load(plan, tmp_path / "out")]
    stem = tensor_names(plan, plan.weights["moe.expert_down"], 2, 5)[0].removesuffix(".weight")
    want = dequantise_mxfp4(*from_hub(t[f"{stem}.weight_packed"], t[f"{stem}.weight_scale"]))
    assert np.array_equal(decode(expert_from_images(plan.experts[0], packed, 1, 5)[2]).T, want)
    assert not figures["rounded_to_bf16"]


def test_bf16_experts_as_mxfp4_only_where_exact_or_asked_for(tmp_path):
    plan, _, _ = make(tmp_path)
    t = hub_tensors(plan.spec.model)
    hub = checkpoint(tmp_path / "plain", t)
    with pytest.raises(MkgenError, match=r"(?s)not exact in mxfp4.*build\.formats\.experts=bf16.*--convert"):
        pack(plan, hub, tmp_path / "out")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    figures = pack(plan, hub, tmp_path / "out", convert=True)
    assert sum(g["tensors"] for g in figures["converted"]["mxfp4"].values()) == len(expert_names(plan.spec.model))
    gate, *_ = expert_from_images(plan.experts[0], [p.experts["experts"] for p in load(plan, tmp_path / "out")], 0, 3)
    codes, scales = quantise_mxfp4(t[tensor_names(plan, plan.weights["moe.expert_gate"], 1, 3)[0]].T)
    same(gate.codes, codes.T)
    same(gate.scales, np.ldexp(np.float32(1), scales.T.astype(np.int32) - 127))
    for name in expert_names(plan.spec.model):
        t[name] = np.ascontiguousarray(dequantise_mxfp4(*quantise_mxfp4(t[name].T)).T).astype(bfloat16)
    assert not pack(plan, checkpoint(tmp_path / "exact", t), tmp_path / "out2")["converted"]


def test_k_that_is_no_whole_group_is_padded():
    """Down's rows are filled up to whole groups, of the expert and of a rank's share."""
    image = plan_experts("experts", "moe", "mxfp4", 1, 1, 1, 1, 64, 45, 70, ("gate", "up", "down"))
    rng = np.random.default_rng(5)
    rows = np.zeros((image.rows, 128), np.uint32)
    down = rng.standard_normal((45, 70), np.float32)
    put_expert(image, rows, 2, 0, encode("mxfp4", down.T))
    padded = np.zeros((64, 70), np.float32)
    padded[:45] = down
    back = decode(sections.take(rows, image.down, 64, 70)).T
    assert not back[45:].any() and np.array_equal(back, dequantise_mxfp4(*quantise_mxfp4(padded)))
    assert np.array_equal(decode(expert_from_images(image, [rows[None]], 0, 0)[2]).T, back[:45])

    image = plan_experts("experts", "moe", "mxfp4", 1, 1, 1, 2, 64, 80, 70, ("gate", "up", "down"))     # shares of 64 and 16
    assert (image.width, image.whole_width) == (64, 80)
    halves, down = np.zeros((2, 1, image.rows, 128), np.uint32), rng.standard_normal((80, 70), np.float32)
    for part, half in enumerate(halves):
        put_expert(image, half[0], 2, part, encode("mxfp4", down.T))
    back = decode(expert_from_images(image, list(halves), 0, 0)[2]).T
    assert np.array_equal(back, dequantise_mxfp4(*quantise_mxfp4(np.pad(down, ((0, 16), (0, 0)))))[:80])
    assert not sections.take(halves[1, 0], image.down, 64, 70).codes[:, 16:].any()


def test_who_holds_an_expert(tmp_path):
    plan, *_ = make(tmp_path)
    assert [list(expert_ranks(plan.experts[0], e)) for e in range(6)] == [[0, 1]] * 3 + [[2, 3]] * 3
