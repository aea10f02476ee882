"""The oracle's cases: a flagship spec at the sizes of the case, its weights, its answers, and the bounds of judging.

The spec of a case is the committed YAML with other numbers in the same places: what is proven is the structure that is
built.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from conftest import ROOT
from ml_dtypes import bfloat16
from oracle_weights import make_weights

from mkgen.graph.build import build_graph
from mkgen.pack.wanted import names
from mkgen.reference.evaluate import Decoder
from mkgen.reference.params import TensorParams
from mkgen.spec.load import load_spec
from mkgen.spec.model import Model, Run, Spec
from mkgen.spec.roles import tensors
from mkgen.spec.schedule import expand
from mkgen.spec.validate import validate

FOLDER = Path(__file__).resolve().parent / "oracle"
CASES = ("qwen3_moe-tiny", "qwen3_moe-lane", "kimi_k3-tiny", "kimi_k3-lane")
CONTEXT = 32                                 # of the specs: the oracle's sequences are 21 tokens long
States = dict[str, np.ndarray]               # as `Decoder.states`
WIDE_GAP = 0.02                              # of a router's scores: check.py lets no choice change that is so clear


# -- sizes ------------------------------------------------------------------------------------------------------------

def qwen3_moe(model: Model, c: dict) -> Model:
    """Qwen3-30B-A3B at the sizes of a `Qwen3MoeForCausalLM` config."""
    attention, moe = model.mixers["attention"], model.ffns["moe"]
    attention = replace(attention, heads=c["num_attention_heads"], kv_heads=c["num_key_value_heads"],
                        head_dim=c["head_dim"])
    moe = replace(moe, experts=c["num_local_experts"], top_k=c["num_experts_per_tok"], width=c["moe_intermediate_size"])
    layers = c["num_hidden_layers"]
    return replace(model, hidden=c["hidden_size"], vocab=c["vocab_size"], layers=layers, mixer=f"attention*{layers}",
                   ffn=f"moe*{layers}", mixers={"attention": attention}, ffns={"moe": moe})


def kimi_k3(model: Model, c: dict) -> Model:
    """Kimi K3 at the sizes of its text config; every fourth layer and the last one are MLA, in both."""
    c = c["text_config"]
    kda, mla, dense, moe = model.mixers["kda"], model.mixers["mla"], model.ffns["dense"], model.ffns["moe"]
    linear, heads = c["linear_attn_config"], c["num_attention_heads"]
    kda = replace(kda, heads=linear["num_heads"], key_dim=linear["head_dim"], value_dim=linear["head_dim"],
                  decay=replace(kda.decay, rank=linear["head_dim"]), conv=replace(kda.conv, taps=linear["short_conv_kernel_size"]))
    mla = replace(mla, heads=heads, q_rank=c["q_lora_rank"], kv_rank=c["kv_lora_rank"], nope_dim=c["qk_nope_head_dim"],
                  rope_dim=c["qk_rope_head_dim"], v_dim=c["v_head_dim"])
    dense, width = replace(dense, width=c["intermediate_size"]), c["moe_intermediate_size"]
    moe = replace(moe, experts=c["num_experts"], top_k=c["num_experts_per_token"], width=width,
                  shared_width=width * c["num_shared_experts"], latent=c["routed_expert_hidden_size"])
    layers = c["num_hidden_layers"]
    mixer = f"(kda*3 mla)*{layers // 4} mla"
    assert [n + 1 for n, kind in enumerate(expand(mixer)) if kind == "mla"] == linear["full_attn_layers"]
    return replace(model, hidden=c["hidden_size"], vocab=c["vocab_size"], layers=layers, mixer=mixer,
                   ffn=f"dense moe*{layers - 1}", mixers={"kda": kda, "mla": mla}, ffns={"dense": dense, "moe": moe},
                   residual=replace(model.residual, block=c["attn_res_block_size"]))


# architecture -> spec, sizes, prefix of the tensor names that is not in the oracle's keys
SIZES = {"qwen3_moe": ("qwen3_30b_a3b", qwen3_moe, ""), "kimi_k3": ("kimi_k3", kimi_k3, "language_model.")}


# -- a case -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Answers:
    """What a decoder gave for consecutive tokens. logits [B, T, V]; topk [T, layer, B, k], sorted ids; gap [T, layer,
    B], of a router's scores; states after the last token. before, after: states around a token, where asked for."""
    logits: np.ndarray
    topk: np.ndarray
    gap: np.ndarray
    states: States
    before: list[States] = field(default_factory=list)
    after: list[States] = field(default_factory=list)


class Case:
    """One folder of answers. Arrays are the oracle's: B sequences of `prompt` tokens and N decode steps."""

    def __init__(self, name: str):
        self.name, self.folder = name, FOLDER / name
        self.config, self.meta = (json.loads((self.folder / f"{n}.json").read_text()) for n in ("config", "meta"))
        arrays = (dict(np.load(self.folder / f"{n}.npz")) for n in ("io", "routing", "cache_final"))
        self.io, self.routing, self.cache = arrays
        self.ids = self.io["input_ids"]
        self.batch, self.tokens = self.ids.shape
        self.prompt, self.steps = self.meta["prompt_len"], self.meta["decode_steps"]
        self.key = (self.meta["case"], self.meta["size"], self.meta["seed"])
        self.base, self.sizes, self.prefix = SIZES[self.meta["case"]]

    def spec(self, **build) -> Spec:
        """The flagship's spec at the case's sizes, for one core unless `build` says otherwise; it is valid."""
        flagship = load_spec(ROOT / "model_specs" / f"{self.base}.yaml")
        model = self.sizes(flagship.model, self.config)
        runs = tuple(Run(*run) for run in zip(expand(model.mixer), expand(model.ffn), strict=True))
        model = replace(model, schedule=runs, parameters=self.meta["params"])
        small = {"mesh": {"core": 1}, "expert_parallel": 1, "tensor_parallel": 1, "formats": {"experts": "bf16"},
                 "rows": (self.batch,), "context": CONTEXT, "kv_tile": 16, "block_kib": 128, "ring_depth": 4,
                 "expert_slots": 2, "kv_slots": 4}
        spec = replace(flagship, model=model, build=replace(flagship.build, **(small | build)))
        assert not validate(spec), validate(spec)
        return spec

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Hub name -> bf16 array: a checkpoint as the oracle read it."""
        model = self.spec().model
        shapes = {name: t.shape for t in tensors(model).values() for name in names(model, t)}
        return make_weights(self.key, shapes, self.prefix)

    def positions(self, t: int) -> np.ndarray:
        return np.full(self.batch, t, np.int32)

    def decoder(self, weights: dict[str, np.ndarray], exact: bool) -> Decoder:
        spec = self.spec()
        return Decoder(build_graph(spec), TensorParams(weights, spec.model.checkpoint), self.batch, CONTEXT, exact)

    def decode(self, weights: dict[str, np.ndarray], exact: bool) -> Answers:
        """The reference over all tokens, one at a time, all sequences side by side. `before` starts at the last token
        of the prompt."""
        decoder, steps, before = self.decoder(weights, exact), [], []
        for t in range(self.tokens):
            if t >= self.prompt - 1:
                before.append({n: s.copy() for n, s in decoder.states.items()})
            steps.append(one_step(decoder, self.ids[:, t], self.positions(t)))
        return collected(steps, decoder.states, before)

    def single_steps(self, weights: dict[str, np.ndarray], exact: Answers) -> Answers:
        """The rounded reference on the last prompt token and each decoded one, every time from the states of the exact
        one (caches rounded to bf16, as they are stored)."""
        decoder, steps, before, after = self.decoder(weights, exact=False), [], [], []
        cached = {s.name for sub in decoder.graph.sublayers() for op in sub.ops for s in op.states() if s.positional}
        for t, states in enumerate(exact.before, self.prompt - 1):
            stored = {n: states[n].astype(bfloat16).astype(np.float32) for n in cached}
            before.append(states | stored)
            decoder.states = {n: s.copy() for n, s in before[-1].items()}
            steps.append(one_step(decoder, self.ids[:, t], self.positions(t)))
            after.append(decoder.states)
        return collected(steps, after[-1], before, after)

    @cached_property
    def exact(self) -> Answers:
        """The reference in float32."""
        return self.decode(self.weights, exact=True)


def one_step(decoder: Decoder, tokens: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, list, list]:
    logits = decoder.step(tokens, positions)
    topk = [np.stack([np.flatnonzero(row) for row in chosen]) for _, _, chosen, _ in decoder.notes]
    return logits, topk, [gap for *_, gap in decoder.notes]


def collected(steps: list[tuple], states: States, *around: list[States]) -> Answers:
    logits, topk, gap = zip(*steps)
    return Answers(np.stack(logits, 1), np.array(topk), np.array(gap), states, *around)


@lru_cache
def load_case(name: str) -> Case:
    """One for all tests, since what it computes takes seconds."""
    return Case(name)


# -- judging: as check.py does ----------------------------------------------------------------------------------------

def fp32_bound(meta: dict) -> float:
    """Of |d logits|: 30 times the oracle's own noise, never below 1e-4."""
    noise = max(meta.get("cache_vs_full_maxabs") or 0, meta.get("fp32_vs_fp64_maxabs") or 0)
    return max(1e-4, 30 * noise)


def judge_bf16(case: Case, logits: np.ndarray, topk: np.ndarray, known: np.ndarray,
               forced: bool) -> tuple[float, float, float]:
    """logits [B, N + 1, V], topk [N + 1, layer, B, k] -> (worst |d logits|, bound, share of the positions that count).

    A choice of experts that the oracle's gap calls clear must be the oracle's. After one that differs, or that is not
    `known` (bool [N + 1, B]: `topk` is that of these logits), a sequence goes its own way and counts no more: for good,
    or if it starts each step from the oracle's states (`forced`), for the rest of the step."""
    error = np.abs(logits.astype(np.float64) - case.io["logits"]).max(-1).T        # [step, B]
    same = (np.sort(topk, -1) == case.routing["topk"]).all(-1)                     # [step, layer, B]
    judged, close = np.ones_like(same), case.routing["gap"] <= WIDE_GAP
    if forced:                                                                     # layers up to the first that differs
        judged[:, 1:] = np.logical_and.accumulate(same, axis=1)[:, :-1]
    assert (same | ~judged | close).all(), "other experts, although the oracle's gap is wide"
    use = same.all(1) & known
    use = use if forced else np.logical_and.accumulate(use, axis=0)
    assert use.any(), "no position is left to compare"
    return float(error[use].max()), max(0.15, 0.05 * case.meta["logits_absmax"]), float(use.mean())
