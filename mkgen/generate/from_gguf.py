"""A GGUF file -> a hub-style folder: config.json, model.safetensors (float32), tokenizer.json.

What the file's architecture calls its tensors, and how its tokenizer cuts text, is data: `model_specs/hub/gguf.yaml`.
"""
from __future__ import annotations

import json
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import yaml

from mkgen.errors import MkgenError
from mkgen.generate.extras import need
from mkgen.generate.data import hub_file


def convert(path: Path, folder: Path) -> Path:
    """Writes the folder, whole or not at all, and returns it. Values are dequantised exactly as GGUF defines them.

    Raises MkgenError for a file that is no GGUF, or whose architecture, tensors or tokenizer are not in the table."""
    gguf = need("gguf", "read a GGUF file")
    try:
        reader = gguf.GGUFReader(path)
    except (OSError, ValueError) as error:
        raise MkgenError(f"{path}: not a GGUF file: {error}") from None
    table = yaml.safe_load(hub_file("gguf.yaml").read_text())
    arch = _entry(path, table["architectures"], _field(path, reader, "general.architecture"), "architecture")
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        config = _config(path, reader, arch)
        tensors = _tensors(path, reader, arch, gguf)
        config["tie_word_embeddings"] = arch["tensors"]["output.weight"] not in tensors
        (scratch / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        _tokenizer(path, reader, table["pre_tokenizers"]).save(str(scratch / "tokenizer.json"))
        from safetensors.numpy import save_file
        save_file(tensors, scratch / "model.safetensors", {"format": "pt"})
        scratch.chmod(0o755)
        scratch.replace(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _field(path: Path, reader, key: str):
    field = reader.get_field(key)
    if field is None:
        raise MkgenError(f"{path}: no {key} in its header\n  why: it is needed to name the model's parts\n  fix: use a complete GGUF file")
    return field.contents()


def _entry(path: Path, table: dict, name: str, what: str) -> dict:
    if name not in table:
        raise MkgenError(f"{path}: {what} {name!r} is not known\n  why: model_specs/hub/gguf.yaml has {', '.join(table)}\n"
                         f"  fix: add it there, or start from a folder with safetensors")
    return table[name]


def _config(path: Path, reader, arch: dict) -> dict:
    prefix = _field(path, reader, "general.architecture")
    config = {"model_type": arch["model_type"]}
    for key, name in arch["config"].items():
        value = _field(path, reader, f"{prefix}.{key}")
        config[name] = float(f"{value:.7g}") if isinstance(value, float) else value      # stored as float32
    for key in ("bos", "eos"):
        field = reader.get_field(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            config[f"{key}_token_id"] = field.contents()
    return config


def _tensors(path: Path, reader, arch: dict, gguf) -> dict[str, np.ndarray]:
    prefix = _field(path, reader, "general.architecture")
    out, unknown = {}, []
    for t in reader.tensors:
        block = re.match(r"blk\.(\d+)\.", t.name)
        pattern = re.sub(r"^blk\.\d+\.", "blk.{n}.", t.name)
        if pattern not in arch["tensors"]:
            unknown.append(t.name)
            continue
        w = gguf.dequantize(t.data, t.tensor_type).astype(np.float32)
        part = pattern.split(".")[-2]
        if part in arch["paired"]:
            w = halves(w, _field(path, reader, f"{prefix}.{arch['paired'][part]}"))
        out[arch["tensors"][pattern].format(n=block and block[1])] = np.ascontiguousarray(w)
    if unknown:
        raise MkgenError(f"{path}: {len(unknown)} tensors have no name in model_specs/hub/gguf.yaml, first {unknown[0]}\n"
                         f"  why: a tensor is never left out\n  fix: add its name there")
    return out


def halves(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from rotated pairs (2j, 2j + 1) to halves (j, j + head_dim / 2)."""
    return w.reshape(heads, -1, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def _tokenizer(path: Path, reader, rules: dict):
    """The byte-level BPE tokenizer that the header describes."""
    tk = need("tokenizers", "make a tokenizer from a GGUF file")
    kind = _field(path, reader, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise MkgenError(f"{path}: a tokenizer of kind {kind!r}\n  why: only byte-level BPE (gpt2) is read from GGUF\n"
                         f"  fix: start from a folder with tokenizer.json")
    rule = _entry(path, rules, _field(path, reader, "tokenizer.ggml.pre"), "pre-tokenizer")
    tokens = _field(path, reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in _field(path, reader, "tokenizer.ggml.merges")]
    out = tk.Tokenizer(tk.models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    bytewise = tk.pre_tokenizers.ByteLevel(add_prefix_space=False)
    digits = [tk.pre_tokenizers.Digits(individual_digits=True)] if rule["digits"] else []
    out.pre_tokenizer = tk.pre_tokenizers.Sequence([*digits, bytewise])
    out.decoder = tk.decoders.ByteLevel()
    kinds = _field(path, reader, "tokenizer.ggml.token_type")
    out.add_special_tokens([tk.AddedToken(t, special=True, normalized=False) for t, k in zip(tokens, kinds) if k == 3])   # control
    return out
