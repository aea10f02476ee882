"""Checkpoint folders: whole, sharded, damaged; and what a spec expects of them."""
import json

import ml_dtypes
import numpy as np
import pytest
from ml_dtypes import bfloat16
from safetensors.numpy import save_file

from mkgen.errors import MkgenError
from mkgen.pack.coded import decode
from mkgen.pack.expect import match
from mkgen.pack.formats import dequantise_mxfp4, from_hub
from mkgen.pack.hub import Checkpoint
from mkgen.pack.wanted import Expected, Part

RNG = np.random.default_rng(11)
HUB = {bfloat16: "BF16", ml_dtypes.float8_e4m3fn: "F8_E4M3", ml_dtypes.float8_e8m0fnu: "F8_E8M0"}


def write(path, tensors):
    """A safetensors file made by hand, so that the reader is not tested against itself or a missing bf16."""
    header, blobs, at = {"__metadata__": {"format": "pt"}}, [], 0
    for name, a in tensors.items():
        dtype = HUB.get(a.dtype.type) or {"float32": "F32", "float16": "F16", "uint8": "U8", "int8": "I8", "int32": "I32",
                                          "float64": "F64"}[a.dtype.name]
        blobs.append(np.ascontiguousarray(a).tobytes())
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [at, at + len(blobs[-1])]}
        at += len(blobs[-1])
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def tensors():
    """Two layers of a toy: norm, conv, a_log, two experts, one of them MXFP4."""
    t = {}
    for i in range(2):
        p = f"lm.layers.{i}."
        t[p + "norm.weight"] = RNG.standard_normal(48).astype(bfloat16)
        t[p + "conv.weight"] = RNG.standard_normal((24, 1, 4)).astype(np.float32)
        t[p + "A_log"] = RNG.standard_normal((1, 1, 8, 1)).astype(np.float32)
        t[p + "experts.0.w1.weight"] = RNG.standard_normal((16, 64)).astype(bfloat16)
        t[p + "experts.1.w1.weight_packed"] = RNG.integers(0, 256, (16, 32), dtype=np.uint8)
        t[p + "experts.1.w1.weight_scale"] = RNG.integers(1, 252, (16, 2), dtype=np.uint8)
    return t


def one(name, shape, role, **part):
    return Expected(name, (Part(role, shape, **part),))


def expectations():
    out = []
    for i in range(2):
        p = f"lm.layers.{i}."
        out += [one(p + "norm.weight", (48,), "mixer.norm"), one(p + "conv.weight", (24, 4), "kda.conv"),
                one(p + "A_log", (6,), "kda.a_log", narrow=True)]
        out += [one(p + f"experts.{e}.w1.weight", (16, 64), "moe.gate") for e in range(2)]
    return out


def shard(folder, t):
    """`t` in two shards with an index."""
    names = sorted(t)
    files = {n: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(files.values()):
        write(folder / file, {n: t[n] for n in names if files[n] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return files


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def error(call):
    with pytest.raises(MkgenError) as caught:
        call()
    return str(caught.value)


def test_reads_two_shards(tmp_path):
    t = tensors()
    shard(tmp_path, t)
    c = Checkpoint(tmp_path)
    assert c.names == sorted(t) and "lm.layers.0.A_log" in c and "nothing" not in c
    for name, a in t.items():
        assert c.shape(name) == a.shape
        same(c.read(name), a)
    assert c.dtype("lm.layers.0.norm.weight") == "bf16" and c.dtype("lm.layers.1.A_log") == "f32"
    same(c.read("lm.layers.0.conv.weight", 5, 9), t["lm.layers.0.conv.weight"][5:9])
    same(c.read("lm.layers.0.conv.weight", 20), t["lm.layers.0.conv.weight"][20:])


def test_every_dtype_in_a_single_file(tmp_path):
    dtypes = np.float32, np.float16, np.uint8, np.int8, *HUB
    t = {d.__name__: RNG.integers(1, 100, (3, 5)).astype(d) for d in dtypes}
    t |= {"scalar": np.array(3, np.float32), "empty": np.zeros((0, 4), np.float32), "f64": np.zeros(2)}
    write(tmp_path / "model.safetensors", t)
    c = Checkpoint(str(tmp_path))
    for name in t.keys() - {"f64"}:
        same(c.read(name), t[name])
    assert c.dtype("f64") == "f64" and "f64: dtype f64 cannot be read" in error(lambda: c.read("f64"))
    assert "no tensor other" in error(lambda: c.read("other"))


def test_reads_what_safetensors_writes(tmp_path):
    t = {"a": RNG.standard_normal((7, 3)).astype(np.float32), "b": RNG.integers(0, 255, 9, dtype=np.uint8)}
    save_file(t, tmp_path / "model.safetensors")
    c = Checkpoint(tmp_path)
    for name in t:
        same(c.read(name), t[name])


def test_damaged_folders(tmp_path):
    assert "no such folder" in error(lambda: Checkpoint(tmp_path / "gone"))
    assert "no .safetensors file at all" in error(lambda: Checkpoint(tmp_path))
    write(tmp_path / "model-00001-of-00002.safetensors", tensors())
    text = error(lambda: Checkpoint(tmp_path))
    assert "only model-00001-of-00002.safetensors" in text and "index.json" in text
    for bad in ("{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}'):
        (tmp_path / "model.safetensors.index.json").write_text(bad)
        assert "model.safetensors.index.json: " in error(lambda: Checkpoint(tmp_path))


def test_damaged_shards_are_all_named(tmp_path):
    files = shard(tmp_path, tensors())
    first, second = (tmp_path / f for f in sorted(set(files.values())))
    whole = first.read_bytes()
    first.write_bytes(whole[:-10])
    second.unlink()
    text = error(lambda: Checkpoint(tmp_path))
    assert f"{first}: truncated: {len(whole) - 10} bytes, its header promises {len(whole)}" in text
    assert f"{second}: no such file, but model.safetensors.index.json names it" in text


@pytest.mark.parametrize("damage", ["short", "tiny", "junk", "lies", "list", "shape"])
def test_damaged_headers(tmp_path, damage):
    path = tmp_path / "model.safetensors"
    write(path, {"a": np.zeros(4, np.float32)})
    whole = path.read_bytes()
    n = int.from_bytes(whole[:8], "little")
    path.write_bytes({"short": whole[:30], "tiny": whole[:3],
                      "junk": b"\x04" + bytes(7) + b"\xff\xfe{}" + whole,
                      "lies": (1 << 40).to_bytes(8, "little") + whole[8:],
                      "list": (2).to_bytes(8, "little") + b"[]",
                      "shape": whole[:8 + n].replace(b"[4]", b"[5]") + whole[8 + n:]}[damage])
    assert str(path) in error(lambda: Checkpoint(tmp_path))


def test_a_shard_lacks_what_the_index_places_there(tmp_path):
    t = tensors()
    files = shard(tmp_path, t)
    write(tmp_path / files["lm.layers.0.A_log"], {"lm.layers.1.A_log": t["lm.layers.1.A_log"]})
    assert "index places" in error(lambda: Checkpoint(tmp_path))


def test_a_file_that_shrinks_after_opening(tmp_path):
    path = tmp_path / "model.safetensors"
    write(path, {"a": np.zeros(4, np.float32)})
    c = Checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    assert "a ends after 15 of 16 bytes" in error(lambda: c.read("a"))


def test_expected_tensors_as_sources(tmp_path):
    t = tensors()
    shard(tmp_path, t)
    sources = match(expectations(), Checkpoint(tmp_path))
    assert set(sources) == {e.name for e in expectations()}

    def taken(name, role):
        return sources[name].take(role, sources[name].read())
    p = "lm.layers.1."
    same(taken(p + "norm.weight", "mixer.norm"), t[p + "norm.weight"])
    same(taken(p + "conv.weight", "kda.conv"), t[p + "conv.weight"].reshape(24, 4))
    same(taken(p + "A_log", "kda.a_log"), t[p + "A_log"].reshape(8)[:6])
    same(taken(p + "experts.0.w1.weight", "moe.gate"), t[p + "experts.0.w1.weight"])
    stored = from_hub(t[p + "experts.1.w1.weight_packed"], t[p + "experts.1.w1.weight_scale"])
    same(np.ascontiguousarray(decode(taken(p + "experts.1.w1.weight", "moe.gate"))),
         np.ascontiguousarray(dequantise_mxfp4(*stored).T))


def test_all_problems_at_once(tmp_path):
    t = tensors()
    del t["lm.layers.0.norm.weight"]
    t["lm.layers.1.norm.weight"] = np.zeros((2, 24), np.int32)
    t["lm.layers.0.A_log"] = np.zeros(5, np.float32)                          # shorter than the heads
    t["lm.layers.1.conv.weight"] = np.zeros((4, 24), np.float32)              # transposed, same size
    del t["lm.layers.0.experts.1.w1.weight_scale"]
    t["lm.layers.1.experts.1.w1.weight_packed"] = np.zeros((16, 31), np.int8)
    t["lm.layers.1.experts.0.w1.weight_scale"] = np.zeros((16, 2), np.uint8)
    t["lm.layers.2.norm.weight"] = t["vision.patch.weight"] = np.zeros(4, np.float32)
    shard(tmp_path, t)
    text = error(lambda: match(expectations(), Checkpoint(tmp_path), ["vision.*"]))
    first, *lines, why, fix = text.splitlines()
    assert first == f"{tmp_path}: not the tensors that the spec expects, 10 problems"
    assert {line.strip() for line in lines} == {
        "missing: lm.layers.0.norm.weight (mixer.norm [48])",
        "misshapen: lm.layers.1.norm.weight (mixer.norm is [2, 24], not [48])",
        "misdtyped: lm.layers.1.norm.weight (mixer.norm is i32, not bf16 or f32 or f16)",
        "misshapen: lm.layers.0.A_log (kda.a_log is [5], not [6] or longer)",
        "misshapen: lm.layers.1.conv.weight (kda.conv is [4, 24], not [24, 4])",
        "missing: lm.layers.0.experts.1.w1.weight_scale "
        "(lm.layers.0.experts.1.w1.weight is mxfp4, and this part of it is not there)",
        "misshapen: lm.layers.1.experts.1.w1.weight (moe.gate is [16, 62], not [16, 64])",
        "misdtyped: lm.layers.1.experts.1.w1.weight_packed (weight of mxfp4: i8, not u8)",
        "extra: lm.layers.1.experts.0.w1.weight_scale (moe.gate is also there as plain)",
        "extra: lm.layers.2.norm.weight (no role of the spec uses it)"}
    assert "the spec has 4,3" in why and "--ignore" in fix
    assert "extra: vision.patch.weight" in error(lambda: match(expectations(), Checkpoint(tmp_path)))


def test_many_problems_of_one_pattern_are_one_line(tmp_path):
    write(tmp_path / "model.safetensors", {"x": np.zeros(1, np.float32)})
    many = [one(f"l.{i}.e.{j}.w1.weight", (4, 32), "moe.gate")
            for i in range(3, 12) for j in range(5)]
    text = error(lambda: match(many, Checkpoint(tmp_path)))
    assert "missing: 45 tensors l.{3..11}.e.{0..4}.w1.weight (moe.gate [4, 32]), first l.3.e.0.w1" in text
    assert len(text.splitlines()) == 5


def test_groups_of_32_must_come_out_even(tmp_path):
    t = {"a.weight_packed": np.zeros((16, 24), np.uint8), "a.weight_scale": np.full((16, 1), 127, np.uint8)}
    write(tmp_path / "model.safetensors", t)
    text = error(lambda: match([one("a.weight", (16, 48), "moe.gate")], Checkpoint(tmp_path)))
    assert "misshapen: a.weight_scale (scale of mxfp4: [16, 1], not [16, 2])" in text


def test_scales_that_are_no_numbers_name_their_tensor(tmp_path):
    t = tensors()
    t["lm.layers.0.experts.1.w1.weight_scale"][0, 0] = 255
    shard(tmp_path, t)
    sources = match(expectations(), Checkpoint(tmp_path))
    assert "lm.layers.0.experts.1.w1.weight_scale: 1 of 32" in error(sources["lm.layers.0.experts.1.w1.weight"].read)
