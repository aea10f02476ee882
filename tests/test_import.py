"""config.json to spec: what is written, what is refused, and that no key is passed over."""
from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import ROOT

from mkgen.cli import main
from mkgen.importing import ImportRefused, import_hf
from mkgen.importing.render import known_types
from mkgen.spec.load import load_spec

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 512, "vocab_size": 1000,
         "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
         "rope_theta": 500000.0, "tie_word_embeddings": True, "attention_bias": False, "max_position_embeddings": 4096}


@pytest.fixture
def put(tmp_path):
    def write(config: dict, **more) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps({k: v for k, v in {**config, **more}.items() if v is not ...}))
        return path
    return write


def refusals(path: Path, **more) -> dict[str, str]:
    with pytest.raises(ImportRefused) as error:
        import_hf(path, **more)
    return {r.key: r.why for r in error.value.record.refused}


def test_a_spec_as_a_person_writes_it(put, tmp_path):
    out = tmp_path / "small.yaml"
    result = CliRunner().invoke(main, ["import-hf", str(put(LLAMA)), "-o", str(out)])
    assert result.exit_code == 0, result.output
    text = out.read_text()
    for line in ("  name: small", "  tied_head: true", "  mixer: attention*4", "      rope: {base: 500000.0}", "  mesh: {core: 1}"):
        assert line in text.splitlines(), text
    for absent in ("bias", "q_norm", "head:", "scaling", "window", "null", "lm_head"):
        assert absent not in text.split("build:")[0].replace("tied_head:", ""), text
    assert load_spec(out).model.mixers["attention"].head_dim == 64


def test_all_refusals_at_once(put):
    why = refusals(put(LLAMA, mystery=3, hidden_act="relu", intermediate_size=..., rope_scaling={"rope_type": "spiral", "factor": 2.0},
                       num_key_value_heads=3))
    assert {"mystery", "hidden_act", "intermediate_size", "rope_scaling.rope_type", "rope_scaling.factor"} <= why.keys()
    assert "spiral" in why["rope_scaling.rope_type"]


def test_the_flagship_is_what_the_importer_writes():
    ours = load_spec(ROOT / "model_specs" / "qwen3_30b_a3b.yaml").model
    config = ROOT / "tests" / "oracle" / "qwen3_moe-tiny" / "config.json"
    made = import_hf(config).model
    assert made.mixers["attention"].qk_norm == ours.mixers["attention"].qk_norm and made.ffns["moe"].router == ours.ffns["moe"].router
    assert {r.replace("attention.", "") for r in made.checkpoint} == {r.replace("attention.", "") for r in ours.checkpoint}
    assert list(made.checkpoint.values()) == list(ours.checkpoint.values())


def test_both_dialects_say_the_same(put):
    old = put(LLAMA, rope_scaling={"type": "linear", "factor": 4.0})
    first = import_hf(old).model
    new = put(LLAMA, rope_theta=..., rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500000.0})
    assert import_hf(new).model == first
    assert first.mixers["attention"].rope.scaling.kind == "linear"


def test_contradictions(put):
    why = refusals(put(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    assert "contradict" in why["rope_theta"]


def test_unknown_model_type(put):
    result = CliRunner().invoke(main, ["import-hf", str(put(LLAMA, model_type="lama"))])
    assert result.exit_code == 2 and "llama" in result.output and "model_type" in result.output


def test_every_type_has_a_file():
    assert {"llama", "qwen3", "qwen3_moe", "mixtral"} <= set(known_types())
