"""Whole architectures: an oracle's config.json becomes a spec, its checkpoint the weights of a generated kernel.

`test_cases.py` holds the float32 reference against the oracle; here the kernel is held against the reference, and its logits against
the oracle's as check.py does. Every case runs with float32 activations on a sharded mesh: a token at position 0 with memory and
states full of NaN, then freely over a tile's edge from the reference's states. Those that round in ways of their own run with bf16
activations on one core as well, each step from the reference's states: at these sizes a few roundings turn a router.
"""
from __future__ import annotations

import numpy as np
import pytest
from case_kernel import FOLDER, CaseKernel, HubCase
from hub_case import TILE

from mkgen.prove.compare import LOGITS
from mkgen.prove.scenario import GAP_NOISE

CASES = sorted(p.name.removesuffix("-tiny") for p in FOLDER.iterdir())
ROUNDED = ("cohere2_moe", "deepseek_v3", "gemma2", "gemma3", "gpt_oss", "granite_hybrid", "kimi_linear", "llama4", "minimax_m1",
           "mixtral", "nemotron_h", "qwen3_next")
RANKS = {"mixtral": 4, "granite_hybrid": 3, "gemma2": 3}       # of the sharded mesh, elsewhere 2
FREE = range(TILE - 1, TILE + 1)
AGREE = {"f32": 0.005, "bf16": LOGITS}       # of the logits' range, between kernel and reference
ORACLE = 0.05                                # of the range too: caches are bf16 always

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case(request):
    return HubCase(FOLDER / f"{request.param}-tiny")


def each(names):
    return pytest.mark.parametrize("case", names, indirect=True, scope="module")


def step(case: HubCase, kernel: CaseKernel, decoder, t: int, state: dict, excused: np.ndarray) -> tuple[np.ndarray, dict]:
    """One step of the kernel beside the reference's -> which rows had a close call that went the other way, states."""
    logits, token, state = kernel.run(case.ids[:, t], case.positions(t), state)
    want, oracle = decoder.step(case.ids[:, t], case.positions(t)), case.oracle[:, t]
    gap = np.min([np.full(case.batch, np.inf), *(g for *_, g in decoder.notes)], axis=0)
    error, off = np.abs(logits - want).max(-1) / np.ptp(want, axis=-1), np.abs(logits - oracle).max(-1) / np.ptp(oracle, axis=-1)
    print(f"{case.name} token {t}: {error.max():.1e} of the range, {off.max():.1e} from the oracle")
    agree = error <= AGREE[decoder.activations]
    excused = excused | (gap < GAP_NOISE) & ~agree
    assert (agree | excused).all(), f"token {t}: {error} of the logits' range"
    assert (token == logits[:, :case.model.usable_vocab or None].argmax(-1)).all()
    assert ((off <= ORACLE) | excused).all(), f"token {t}: {off} of the range from the oracle"
    return excused, state


@each(CASES)
def test_float32_activations_on_a_mesh(case):
    kernel, decoder = CaseKernel(case, RANKS.get(case.name.removesuffix("-tiny"), 2), "f32"), case.decoder(activations="f32")
    excused, _ = step(case, kernel, decoder, 0, kernel.rubbish(decoder.states), np.zeros(case.batch, bool))
    decoder.states = case.stored(decoder, FREE.start)
    state = kernel.state(decoder.states, FREE.start)
    for t in FREE:
        excused, state = step(case, kernel, decoder, t, state, excused)
    assert not excused.all()


@each(ROUNDED)
def test_bf16_activations_on_one_core(case):
    kernel, decoder, excused = CaseKernel(case, 1, "bf16"), case.decoder(), []
    for t in FREE:
        decoder.states = case.stored(decoder, t)
        excused.append(step(case, kernel, decoder, t, kernel.state(decoder.states, t), np.zeros(case.batch, bool))[0])
    assert np.mean(excused) <= 0.5
