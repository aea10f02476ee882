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
from mkgen.spec.formats import FORMATS as STORED
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


def test_biases_of_an_mlp(put):
    made = import_hf(put(LLAMA, mlp_bias=True)).model
    assert made.ffns["dense"].bias and {"dense.gate_bias", "dense.up_bias", "dense.down_bias"} <= made.checkpoint.keys()


def test_contradictions(put):
    why = refusals(put(LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 10000.0}))
    assert "contradict" in why["rope_theta"]


def test_unknown_model_type(put):
    result = CliRunner().invoke(main, ["import-hf", str(put(LLAMA, model_type="lama"))])
    assert result.exit_code == 2 and "llama" in result.output and "model_type" in result.output


def test_every_type_has_a_file():
    assert {"llama", "qwen3", "qwen3_moe", "mixtral"} <= set(known_types())


# -- released configs -----------------------------------------------------------------------------------------------------------

CONFIGS = ROOT / "tests" / "configs"
EVERY_FOURTH = ("no_rope_layer_interval=4",)
RELEASED = {                                     # billions of parameters as published, of the text decoder; the two columns
    "Qwen--Qwen3-235B-A22B": (235.09, "attention*94", "moe*94"),
    "Qwen--Qwen3-30B-A3B-FP8": (30.53, "attention*48", "moe*48"),
    "Qwen--Qwen3-30B-A3B": (30.53, "attention*48", "moe*48"),
    "Qwen--Qwen3-8B": (8.19, "attention*36", "dense*36"),
    "Qwen--Qwen3.5-27B": (26.90, "(gdn*3 attention)*16", "dense*64"),
    "Qwen--Qwen3.5-35B-A3B": (34.66, "(gdn*3 attention)*10", "moe*40"),
    "Qwen--Qwen3.5-397B-A17B": (396.35, "(gdn*3 attention)*15", "moe*60"),
    "deepseek-ai--DeepSeek-V3": (671.03, "attention*61", "dense*3 moe*58"),
    "meta-llama--Llama-4-Maverick-17B-128E-Instruct": (400.71, "(local*3 nope)*12", "(dense moe)*24"),
    "meta-llama--Llama-4-Scout-17B-16E-Instruct": (107.77, "(local*3 nope)*12", "moe*48"),
    "meta-llama--Meta-Llama-3.1-70B": (70.55, "attention*80", "dense*80"),
    "meta-llama--Meta-Llama-3.1-8B": (8.03, "attention*32", "dense*32"),
    "mistralai--Mixtral-8x7B-v0.1": (46.70, "attention*32", "moe*32"),
    "moonshotai--Kimi-K2-Instruct": (1026.41, "attention*61", "dense moe*60"),
    "moonshotai--Kimi-K3": (2779.48, "(kda*3 mla)*23 mla", "dense moe*92"),
    "nvidia--DeepSeek-V3.1-NVFP4": (671.03, "attention*61", "dense*3 moe*58"),
    "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (31.58, None, None),
    "openai--gpt-oss-120b": (116.83, "(local full)*18", "moe*36"),
    "openai--gpt-oss-20b": (20.91, "(local full)*12", "moe*24"),
}
FORMATS = {
    "Qwen--Qwen3-30B-A3B-FP8": {"experts": "fp8_block", "rest": "fp8_block", "embed": "bf16", "head": "bf16", "moe.router": "bf16"},
    "deepseek-ai--DeepSeek-V3": {"experts": "fp8_block", "rest": "fp8_block", "embed": "bf16", "head": "bf16", "moe.router": "bf16"},
    "moonshotai--Kimi-K2-Instruct": {"experts": "fp8_block", "rest": "fp8_block", "embed": "bf16", "head": "bf16", "moe.router": "bf16"},
    "moonshotai--Kimi-K3": {"experts": "mxfp4"},
    "nvidia--DeepSeek-V3.1-NVFP4": {"experts": "nvfp4", "attention.o": "nvfp4",
                                    **{f"{k}{c}": "nvfp4" for k in ("dense.", "moe.shared_") for c in ("gate", "up", "down")}},
    "openai--gpt-oss-120b": {"experts": "mxfp4"},
    "openai--gpt-oss-20b": {"experts": "mxfp4"},
}


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs(name):
    billions, mixer, ffn = RELEASED[name]
    made = import_hf(CONFIGS / f"{name}_config.json", "released", EVERY_FOURTH if "Llama-4" in name else ())
    assert abs(made.parameters / 1e9 / billions - 1) < 1e-3
    assert mixer is None or (made.model.mixer, made.model.ffn) == (mixer, ffn)
    assert made.build.build.formats == FORMATS.get(name, {})
    assert made.record.used and made.record.ignored and not made.record.refused
    assert made.text.startswith(f"# Written by `mkgen import-hf` from {name}_config.json")


def test_every_released_config_is_tested():
    assert {p.name.removesuffix("_config.json") for p in CONFIGS.glob("*_config.json") if "hf_quant" not in p.name} == RELEASED.keys()


def test_a_hybrid_of_single_sublayers():
    model = import_hf(CONFIGS / "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16_config.json").model
    pattern = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
    assert "".join({"mamba": "M", "attention": "*", None: "E"}[run.mixer] for run in model.schedule) == pattern
    assert model.checkpoint["mixer.norm"] == model.checkpoint["ffn.norm"]


COMMITTED = {"gpt_oss_120b": "openai--gpt-oss-120b", "gpt_oss_20b": "openai--gpt-oss-20b", "kimi_k3": "moonshotai--Kimi-K3",
             "llama3_1_70b": "meta-llama--Meta-Llama-3.1-70B", "llama3_1_8b": "meta-llama--Meta-Llama-3.1-8B",
             "llama4_scout": "meta-llama--Llama-4-Scout-17B-16E-Instruct", "mixtral_8x7b": "mistralai--Mixtral-8x7B-v0.1",
             "nemotron3_nano_30b_a3b": "nvidia--NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "qwen3_235b_a22b": "Qwen--Qwen3-235B-A22B",
             "qwen3_30b_a3b": "Qwen--Qwen3-30B-A3B", "qwen3_5_397b_a17b": "Qwen--Qwen3.5-397B-A17B", "qwen3_8b": "Qwen--Qwen3-8B"}


@pytest.mark.parametrize("name", COMMITTED)
def test_the_specs_of_the_repository_are_what_the_importer_writes(name):
    """Written by hand from other sources: layer by layer the same kinds, the same ends, the same tensors (kinds may be named
    otherwise)."""
    ours = load_spec(ROOT / "model_specs" / f"{name}.yaml").model
    made = import_hf(CONFIGS / f"{COMMITTED[name]}_config.json", name, EVERY_FOURTH if "llama4" in name else (), model_only=True).model
    for key in ("hidden", "vocab", "layers", "residual", "norm", "final_norm", "embed_scale", "tied_head", "logit_scale"):
        assert getattr(made, key) == getattr(ours, key), key
    for mine, theirs in zip(made.schedule, ours.schedule):
        assert mine.mixer is theirs.mixer is None or made.mixers[mine.mixer] == ours.mixers[theirs.mixer]
        assert mine.ffn is theirs.ffn is None or made.ffns[mine.ffn] == ours.ffns[theirs.ffn]
    assert sorted(made.checkpoint.values()) == sorted(ours.checkpoint.values())


# -- nothing is guessed --------------------------------------------------------------------------------------------------------------

def released(name: str, **more) -> dict:
    config = json.loads((CONFIGS / f"{name}_config.json").read_text())
    inner = config.get("text_config", config)
    for key, value in more.items():
        inner.pop(key, None)
        if value is not ...:
            inner[key] = value
    return config


@pytest.mark.parametrize("name, keys, named", [
    ("openai--gpt-oss-20b", ["layer_types"], "layer_types"),
    ("meta-llama--Llama-4-Scout-17B-16E-Instruct", [], "no_rope_layers"),
    ("Qwen--Qwen3.5-27B", ["layer_types", "full_attention_interval"], "layer_types"),
    ("Qwen--Qwen3-30B-A3B", ["decoder_sparse_step"], "decoder_sparse_step"),
    ("deepseek-ai--DeepSeek-V3", ["first_k_dense_replace"], "first_k_dense_replace"),
    ("moonshotai--Kimi-K3", ["linear_attn_config"], "linear_attn_config"),
])
def test_a_schedule_is_never_guessed(put, name, keys, named):
    why = refusals(put(released(name, **dict.fromkeys(keys, ...))))
    assert any(key.endswith(named) for key in why), why


def test_what_the_user_says_is_written_down(put):
    config = put(released("openai--gpt-oss-20b", layer_types=...))
    with pytest.raises(ImportRefused) as error:
        import_hf(config)
    hint = next(r.fix for r in error.value.record.refused if r.key == "layer_types").split("--given ")[1].replace("'", "")
    made = import_hf(config, settings=(hint,))
    assert made.model.mixer == "(local full)*12" and f"# Said by the user, not by the config: {hint}." in made.text


def test_layers_counted_from_one(put):
    lists = released("moonshotai--Kimi-K3")["text_config"]["linear_attn_config"]
    for change in ({"kda_layers": [n for n in lists["kda_layers"] if n != 7]}, {"full_attn_layers": [*lists["full_attn_layers"], 7]},
                   {"full_attn_layers": [0, *lists["full_attn_layers"][1:]]}):
        why = refusals(put(released("moonshotai--Kimi-K3", linear_attn_config=lists | change)))
        assert any("counted from 1" in w for w in why.values()), why


# -- bad input ------------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("change, key, word", [
    ({"layer_types": ["sliding_attention"] * 23}, "layer_types", "23 entries"),
    ({"layer_types": ["odd_attention"] * 24}, "layer_types", "odd_attention"),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0]}}, "rope_scaling.rope_type", "longrope"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "surprise": 1}},
     "rope_scaling.surprise", "does not read"),
    ({"attention_bias": False}, "attention_bias", "False"),
    ({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}, "quantization_config.quant_method", "bitsandbytes"),
    ({"new_attention_kind": True}, "new_attention_kind", "does not read"),
    ({"num_experts": 33}, "num_local_experts", "contradict"),
])
def test_refusals_name_the_key(put, change, key, word):
    why = refusals(put(released("openai--gpt-oss-20b", **change)))
    assert key in why and word in why[key], why


def test_wrong_files(tmp_path):
    for text, word in (("{", "JSON"), ("[]", "object"), ('{"hidden_size": 1}', "model_type"), ('{"model_type": "llama", "model_type": "x"}', "twice")):
        (tmp_path / "config.json").write_text(text)
        result = CliRunner().invoke(main, ["import-hf", str(tmp_path)])
        assert result.exit_code == 2 and word in result.output, result.output
    assert CliRunner().invoke(main, ["import-hf", str(tmp_path / "absent.json")]).exit_code == 2


def test_a_wrong_value_names_the_key_it_came_from(put):
    why = refusals(put(LLAMA, vocab_size="many"))
    assert "vocab_size" in why[""]


@pytest.mark.parametrize("name", [t for t in known_types() if t in ("deepseek_v32", "gemma3n", "jamba", "longcat_flash", "deepseek_v4")])
def test_what_a_spec_cannot_express_is_said_so(put, name):
    why = refusals(put({"model_type": name, "hidden_size": 64}))
    assert list(why) == ["model_type"] and name in why["model_type"] and len(why["model_type"]) > 60


# -- stored formats -----------------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("config, formats", [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}, {"rest": "int4_g128_f16"}),
    ({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", "modules_to_not_convert": ["o_proj"]},
     {"rest": "int4_g64_zero_f16", "attention.o": "bf16"}),
    ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": None}, {"rest": "fp8"}),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head", "re:.*mlp.*"], "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}}}},
     {f"attention.{c}": "int4_g32" for c in "qkvo"}),
    ({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}}}}, {"rest": "fp8"}),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head", "*self_attn*"]},
     {f"dense.{c}": "nvfp4" for c in ("gate", "up", "down")}),
])
def test_formats(put, config, formats):
    made = import_hf(put(LLAMA, tie_word_embeddings=False, quantization_config=config))
    have = made.build.build.formats
    per_role = {r: have.get(r, have.get("rest", "bf16")) for r in made.model.checkpoint if not r.endswith("norm")}
    assert all(f in STORED for f in have.values())
    want = {r: formats.get(r, formats.get("rest", "bf16") if r not in ("embed", "head") else "bf16") for r in per_role}
    assert per_role == want


@pytest.mark.parametrize("config, key", [
    ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, "quantization_config.desc_act"),
    ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "quantization_config"),
    ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "quantization_config.weight_block_size"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.2.mlp.up_proj"]}, "quantization_config"),
])
def test_formats_that_cannot_be_stored(put, config, key):
    assert key in refusals(put(LLAMA, quantization_config=config))
    assert import_hf(put(LLAMA, quantization_config=config), model_only=True).build is None


# -- a checkpoint beside the config --------------------------------------------------------------------------------------------------------

def test_the_tensors_that_lie_beside_the_config_must_all_be_used(put):
    path = put(LLAMA)
    made = import_hf(path, model_only=True)
    names = [p.format(layer=i) for role, p in made.model.checkpoint.items() for i in (range(4) if "{layer}" in p else [None])]
    index = path.with_name("model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names, "model.layers.0.self_attn.rotary_emb.inv_freq"], "a")}))
    assert import_hf(path).model.ignore == ("*rotary_emb.inv_freq",)
    index.write_text(json.dumps({"weight_map": dict.fromkeys([*names[1:], "model.layers.3.self_attn.q_norm.weight"], "a")}))
    why = " ".join(r.why for r in pytest.raises(ImportRefused, import_hf, path).value.record.refused)
    assert "model.layers.3.self_attn.q_norm.weight" in why and names[0] in why


def test_json(put, tmp_path):
    out = tmp_path / "a.yaml"
    result = CliRunner().invoke(main, ["import-hf", str(put(LLAMA)), "-o", str(out), "--json"])
    said = json.loads(result.output)
    assert said["verdict"] == "pass" and said["used"]["hidden_size"] == 256 and "architectures" in said["ignored"]
    result = CliRunner().invoke(main, ["import-hf", str(put(LLAMA, odd=1)), "--json"])
    assert result.exit_code == 2 and json.loads(result.output)["refused"][0]["key"] == "odd"
    assert CliRunner().invoke(main, ["import-hf", str(put(LLAMA)), "-o", str(out)]).exit_code == 2     # it exists
