"""Small specs with awkward sizes, and random checkpoints for any spec, for tests that need weights but no model."""
from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import yaml
from ml_dtypes import bfloat16

from mkgen.graph.build import build_graph
from mkgen.pack.formats import quantise_mxfp4, to_hub
from mkgen.pack.packed import load_packed
from mkgen.pack.wanted import expected_of, layers, names
from mkgen.plan.planner import make_plan
from mkgen.spec.checkpoint import Axis, parse, picks, uncut
from mkgen.spec.load import load_spec
from mkgen.spec.roles import tensors
from mkgen.targets import load_target

ROOT = Path(__file__).resolve().parent.parent
HUB = {bfloat16: "BF16", np.float32: "F32", np.float16: "F16", np.uint8: "U8", np.int8: "I8", np.int32: "I32", np.int64: "I64",
       ml_dtypes.float8_e8m0fnu: "F8_E8M0", ml_dtypes.float8_e4m3fn: "F8_E4M3"}

SMALL_BUILD = {"context": 64, "kv_tile": 32, "rows": [1, 2], "ring_depth": 3, "expert_slots": 2, "block_kib": 128}
MESHES = {1: {"core": 1}, 4: {"chip": 2, "core": 2}}

# Over four ranks most widths do not divide; the dense one leaves a rank without any.
KIMI = {
    "hidden": 256, "vocab": 331, "layers": 5, "mixer": "kda*3 mla kda", "ffn": "dense moe*4",
    "residual": {"kind": "block_softmax", "block": 2, "eps": 1e-5},
    "mixers": {"kda": {"heads": 8, "key_dim": 24, "value_dim": 24, "decay": {"rank": 10}},
               "mla": {"heads": 4, "q_rank": 41, "kv_rank": 36, "nope_dim": 20, "rope_dim": 6, "v_dim": 12}},
    "ffns": {"dense": {"width": 9},
             "moe": {"experts": 6, "top_k": 2, "width": 192, "shared_width": 70, "latent": 96}},
}
# hidden 336: a half-filled embedding word, an odd panel; two KV heads, each on two of four ranks
QWEN = {
    "hidden": 336, "vocab": 101, "layers": 2, "mixer": "attention*2", "ffn": "moe*2",
    "mixers": {"attention": {"heads": 8, "kv_heads": 2, "head_dim": 40}},
    "ffns": {"moe": {"experts": 8, "top_k": 2, "width": 38}},
}


def small_plan(folder: Path, base: str, model: dict, ranks: int, **build):
    """The plan of `model_specs/<base>.yaml` with the sizes of `model` (None deletes a key), on 1 or 4 ranks."""
    spec = yaml.safe_load((ROOT / "model_specs" / f"{base}.yaml").read_text())
    spec["model"].pop("parameters", None)
    _merge(spec["model"], model)
    half = max(1, ranks // 2)
    parallel = {"mesh": MESHES[ranks], "expert_parallel": half, "tensor_parallel": ranks // half}
    spec["build"] |= SMALL_BUILD | parallel | build
    path = folder / f"{base}.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    loaded = load_spec(path)
    return make_plan(loaded, build_graph(loaded), load_target(loaded.build.chip))


def _merge(into: dict, over: dict) -> None:
    for key, value in over.items():
        if value is None:
            del into[key]
        elif isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def role_values(model, seed: int = 0, dtype=bfloat16) -> dict[tuple[str, int | None, int | None], np.ndarray]:
    """(role, layer, expert) -> random values, exact in bf16; vectors in f32, as some released ones are."""
    rng = np.random.default_rng(seed)
    out = {}
    for t in tensors(model).values():
        for layer in [None] if t.per == "model" else layers(model, t.owner):
            for expert in range(model.ffns[t.owner].experts) if t.per == "expert" else (None,):
                value = rng.standard_normal(t.shape, np.float32) * np.float32(t.shape[-1] ** -0.5)
                out[t.role, layer, expert] = value.astype(bfloat16).astype(np.float32 if len(t.shape) == 1 else dtype)
    return out


def hub_tensors(model, seed: int = 0, dtype=bfloat16, values=None) -> dict[str, np.ndarray]:
    """Every tensor of the model's checkpoint, laid out as its patterns say: the cuts, backwards."""
    values = values or role_values(model, seed, dtype)
    wanted = {e.name: e for e in expected_of(model)}
    out: dict[str, np.ndarray] = {}
    for (role, layer, expert), value in values.items():
        pattern = parse(model.checkpoint[role])
        e = wanted[pattern.format(layer, expert)]
        axes = [uncut(p.cuts, p.shape) or [Axis(n) for n in p.shape] for p in e.parts]
        shape = tuple(max(a[i].size for a in axes) for i in range(len(axes[0])))
        if e.name not in out:
            out[e.name] = np.full(([e.experts] if e.experts else []) + list(shape), np.nan, value.dtype)
        place = out[e.name][expert] if e.experts else out[e.name]
        turns = sum(c.kind == "T" for c in pattern.cuts) % 2
        place[np.ix_(*picks(pattern.cuts, shape))] = value.T if turns else value
    assert not any(np.isnan(a.astype(np.float32)).any() for a in out.values()), "the patterns leave a part of a tensor to nobody"
    return out


def expert_names(model) -> list[str]:
    """The tensors of routed experts."""
    return [name for t in tensors(model).values() if t.per == "expert" for name in names(model, t)]


def with_mxfp4_experts(model, t: dict[str, np.ndarray], seed: int = 0) -> dict[str, np.ndarray]:
    """The same checkpoint with its experts as random MXFP4 pairs; scales need not be the quantiser's own choice."""
    rng, out = np.random.default_rng(seed + 1), dict(t)
    for name in expert_names(model):
        codes, scales = quantise_mxfp4(out.pop(name).T)
        codes = np.where(rng.random(codes.shape) < 0.2, rng.integers(0, 16, codes.shape), codes).astype(np.uint8)
        stem = name.removesuffix(".weight")
        out[f"{stem}.weight_packed"], out[f"{stem}.weight_scale"] = to_hub(codes, scales)
    return out


def write_safetensors(path: Path, t: dict[str, np.ndarray]) -> None:
    """A safetensors file, without the library: its numpy side knows neither bf16 nor e8m0 in all versions."""
    header, at = {"__metadata__": {"format": "pt"}}, 0
    for name, a in t.items():
        header[name] = {"dtype": HUB[a.dtype.type], "shape": list(a.shape), "data_offsets": [at, at + a.nbytes]}
        at += a.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for a in t.values():
            f.write(np.ascontiguousarray(a).tobytes())


def checkpoint(folder: Path, t: dict[str, np.ndarray]) -> Path:
    """`t` as a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", t)
    return folder


def make(tmp_path, base="kimi_k3", sizes=KIMI, ranks=4, fmt="mxfp4"):
    """A plan, its checkpoint in the format of its experts, and the checkpoint's folder."""
    plan = small_plan(tmp_path, base, sizes, ranks, formats={"experts": fmt}, replicate=[])
    t = hub_tensors(plan.spec.model, seed=ranks)
    if fmt == "mxfp4":
        t = with_mxfp4_experts(plan.spec.model, t)
    return plan, t, checkpoint(tmp_path / "hub", t)


def load(plan, out):
    return [load_packed(out, rank) for rank in range(plan.mesh.ranks)]


def same(a, b):
    """Equal bits, not only equal values."""
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.ascontiguousarray(a).tobytes() == np.ascontiguousarray(b).tobytes()
