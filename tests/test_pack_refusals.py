"""What packing refuses, and what it leaves behind when it does: all said at once, nothing written, nothing half."""
import errno
import json
import os
from dataclasses import replace

import numpy as np
import pytest
from hubs import checkpoint, make, same

from mkgen.errors import MkgenError
from mkgen.pack import write
from mkgen.pack.packed import load_packed
from mkgen.pack.write import pack, pack_command
from mkgen.plan.layout import layout_hash


def test_all_that_is_wrong_with_the_tensors_is_said_before_anything_is_written(tmp_path):
    plan, t, _ = make(tmp_path)
    p = "language_model.model.layers.1."
    del t[p + "input_layernorm.weight"]
    t[p + "self_attn.q_proj.weight"] = t[p + "self_attn.q_proj.weight"][:-1]
    t[p + "self_attn.k_proj.weight"] = np.zeros(t[p + "self_attn.k_proj.weight"].shape, np.uint8)
    t["vision_tower.weight"] = np.zeros(3, np.float32)
    del t[p + "block_sparse_moe.experts.4.w2.weight_scale"]
    hub = checkpoint(tmp_path / "bad", t)
    with pytest.raises(MkgenError) as caught:
        pack(plan, hub, tmp_path / "out")
    text = str(caught.value)
    assert "5 problems" in text and not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    for line in (f"missing: {p}input_layernorm.weight", f"misshapen: {p}self_attn.q_proj.weight",
                 f"misdtyped: {p}self_attn.k_proj.weight", "extra: vision_tower.weight",
                 f"missing: {p}block_sparse_moe.experts.4.w2.weight_scale"):
        assert line in text
    with pytest.raises(MkgenError, match="4 problems"):
        pack(plan, hub, tmp_path / "out", ignore=["vision_tower.*"])


def test_what_is_ignored_is_counted(tmp_path):
    plan, t, _ = make(tmp_path, ranks=1)
    more = {f"vision_tower.{i}.weight": np.zeros(3, np.float32) for i in range(4)} | {"mtp.norm": np.ones(2, np.float32)}
    hub = checkpoint(tmp_path / "more", t | more)
    with pytest.raises(MkgenError, match=r"extra: 4 tensors vision_tower\.\{0\.\.3\}\.weight"):
        pack(plan, hub, tmp_path / "out", ignore=["mtp.*"])
    model = replace(plan.spec.model, ignore=("vision_tower.*",))
    plan = replace(plan, spec=replace(plan.spec, model=model))
    figures = pack(plan, hub, tmp_path / "out", ignore=["mtp.*", "*norm", "nothing"])
    assert figures["ignored"] == {"vision_tower.*": 4, "mtp.*": 1, "*norm": 0, "nothing": 0}
    assert "  ignored: 4 tensors vision_tower.*\n" in write.describe(figures)
    kept = pack(plan, checkpoint(tmp_path / "less", t), tmp_path / "out2")
    assert kept["parameters"] == figures["parameters"]


@pytest.mark.parametrize("ending, bad", [
    ("embed_tokens.weight", np.nan), ("layers.3.self_attn.kv_b_proj.weight", np.inf),
    ("layers.2.self_attn.A_log", np.nan), ("layers.4.mlp_res_proj.weight", -np.inf),
    ("layers.2.block_sparse_moe.experts.5.w3.weight", np.nan)])
def test_a_weight_that_is_not_finite(tmp_path, ending, bad):
    plan, t, _ = make(tmp_path, fmt="bf16")
    name, = (n for n in t if n.endswith(ending))
    t[name].reshape(-1)[-1] = bad
    with pytest.raises(MkgenError, match=f"{name}: 1 of {t[name].size} values are NaN or infinite"):
        pack(plan, checkpoint(tmp_path / "nan", t), tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "kimi_k3.yaml", "nan"]


def test_a_scale_that_is_no_number(tmp_path):
    plan, t, _ = make(tmp_path)
    name = [n for n in t if n.endswith("weight_scale")][-1]
    t[name][0, 0] = 255
    with pytest.raises(MkgenError, match=f"{name}: 1 of"):
        pack(plan, checkpoint(tmp_path / "nan", t), tmp_path / "out")


def test_what_is_there_is_not_overwritten(tmp_path):
    plan, _, hub = make(tmp_path, ranks=1)
    out = tmp_path / "out"
    out.mkdir()
    pack(plan, hub, out)                                                          # an empty folder will do
    before = load_packed(out, 0).tape.copy()
    with pytest.raises(MkgenError, match="--force"):
        pack(plan, hub, out)
    (out / "tape.0.npy").write_bytes(b"damaged")
    pack(plan, hub, out, force=True)
    same(load_packed(out, 0).tape, before)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "kimi_k3.yaml", "out"]
    (out / "thesis.tex").write_text("")
    with pytest.raises(MkgenError, match="thesis.tex"):
        pack(plan, hub, out, force=True)
    (out / "thesis.tex").unlink()
    (out / "manifest.json").unlink()
    with pytest.raises(MkgenError, match="without a manifest"):
        pack(plan, hub, out, force=True)
    (out / "manifest.json").write_text('{"name": "a web app"}')
    with pytest.raises(MkgenError, match="not a manifest of packed weights"):
        pack(plan, hub, out, force=True)
    with pytest.raises(MkgenError, match="is a file"):
        pack(plan, hub, tmp_path / "kimi_k3.yaml")


def test_a_failed_replacement_leaves_the_old_weights(tmp_path):
    plan, t, hub = make(tmp_path, ranks=1, fmt="bf16")
    out = tmp_path / "out"
    pack(plan, hub, out)
    t[[n for n in t if n.endswith("w2.weight")][-1]][0, 0] = np.nan
    with pytest.raises(MkgenError, match="NaN"):
        pack(plan, checkpoint(tmp_path / "nan", t), out, force=True)
    load_packed(out, 0)
    assert not (tmp_path / "out.partial").exists()


def test_half_written_output_is_not_taken_for_finished(tmp_path):
    plan, _, hub = make(tmp_path, ranks=1)
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    partial.mkdir()
    (partial / "tape.0.npy").write_bytes(b"half")
    with pytest.raises(MkgenError, match="none that were finished"):
        load_packed(partial, 0)
    pack(plan, hub, out)
    load_packed(out, 0)
    partial.mkdir()
    (partial / "notes").write_text("")
    with pytest.raises(MkgenError, match="in the way"):
        pack(plan, hub, tmp_path / "out", force=True)


def test_every_bad_weight_is_named(tmp_path):
    plan, t, _ = make(tmp_path, ranks=1, fmt="bf16")
    bad = [n for n in t if n.endswith(("w2.weight", "A_log", "embed_tokens.weight"))]
    for name in bad:
        t[name].reshape(-1)[0] = np.inf
    with pytest.raises(MkgenError) as caught:
        pack(plan, checkpoint(tmp_path / "bad", t), tmp_path / "out")
    lines = str(caught.value).splitlines()
    assert all(f"{name}: 1 of {t[name].size} values are NaN or infinite" in lines for name in bad)
    assert len(lines) == len(bad) + 2 and not (tmp_path / "out.partial").exists()


def test_a_full_disk_is_noticed_first(tmp_path, monkeypatch):
    plan, _, hub = make(tmp_path, ranks=1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(MkgenError, match="are to be written"):
        pack(plan, hub, tmp_path / "out")
    assert not (tmp_path / "out.partial").exists()


def test_a_disk_that_fills_up_while_the_files_are_made(tmp_path, monkeypatch):
    plan, _, hub = make(tmp_path, ranks=4)
    allocate, count = os.posix_fallocate, iter(range(99))

    def full(fd, offset, size):
        if next(count) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return allocate(fd, offset, size)
    with monkeypatch.context() as m, pytest.raises(MkgenError, match="(?s)No space left on device, with .* make room"):
        m.setattr(os, "posix_fallocate", full)
        pack(plan, hub, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hub", "kimi_k3.yaml"]
    pack(plan, hub, tmp_path / "out")


def test_files_that_are_not_as_the_manifest_says(tmp_path):
    plan, _, hub = make(tmp_path, ranks=1)
    pack(plan, hub, tmp_path / "out")
    np.save(tmp_path / "out" / "embedding.0.npy", np.zeros((3, 128), np.uint32))
    with pytest.raises(MkgenError, match="the manifest says"):
        load_packed(tmp_path / "out", 0)
    (tmp_path / "out" / "embedding.0.npy").write_bytes(b"nothing")
    with pytest.raises(MkgenError, match="cannot be read"):
        load_packed(tmp_path / "out", 0)


# -- the command -----------------------------------------------------------------------------------------------------

def test_the_command(tmp_path, capsys):
    plan, t, hub = make(tmp_path, ranks=1)
    figures = pack_command(plan, hub, tmp_path / "out", False, False, True)
    assert json.loads(capsys.readouterr().out) == figures
    sizes = {n: a.size * (2 if n.endswith("packed") else 1) for n, a in t.items() if not n.endswith("scale")}
    assert figures["parameters"] == sum(sizes.values())
    pack_command(plan, hub, tmp_path / "out", False, True, False)
    text = capsys.readouterr().out
    assert text.startswith("kimi_k3: ") and layout_hash(plan) in text
