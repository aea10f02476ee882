"""What the proof decodes: sequences just before a tile's edge, and what the reference makes of them.

Rows, as many as the variant has: one a token before the end of its first tile, one before the end of its
second, one inactive, one at position 0, others in between. In the last step the first row is alone, so that some rank may be left
without an expert.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from mkgen.graph.ir import LayerGraph
from mkgen.reference.evaluate import Decoder, Params
from mkgen.spec.model import Build, Spec

CANDIDATES = 16  # tokens that are tried for a row at a time, for wide router gaps and idle ranks
MOST_TRIED = 64  # ... until one of them has no close call
GAP_NOISE = 0.01  # of a router score: bf16 may turn a choice that is closer
GAP_NOISE_TWICE = 0.03  # where messages are rounded as well: rms 0.0075, 99 of 100 below 0.03 in a mini of six routers


def gap_noise(build: Build) -> float:
    """A choice whose router scores are closer than this may go either way. Where messages are rounded as activations are, an
    activation that was rounded behind one is not, as otherwise nearly always, the very number that the reference has.
    """
    return GAP_NOISE_TWICE if build.activations == "bf16" and build.wire == "bf16" else GAP_NOISE


@dataclass
class Step:
    tokens: np.ndarray  # int32 [rows]
    positions: np.ndarray  # int32 [rows], -1: inactive
    logits: np.ndarray  # float32 [rows, vocab]
    chosen: list[np.ndarray]  # per layer with a router: bool [rows, experts]
    gap: np.ndarray  # [rows]: the closest call of any router; inf where there is none


@dataclass
class Scenario:
    """written: tokens each row has seen before the first step. states: before the first step, and after each
    step.
    """

    rows: int
    context: int
    written: list[int]
    states: list[dict[str, np.ndarray]] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def seen(self, row: int, step: int) -> int:
        """Tokens that the row has seen before a step."""
        return self.written[row] + sum(int(s.positions[row] >= 0) for s in self.steps[:step])

    def row(self, row: int) -> Scenario:
        """The same for one row alone: rows do not see each other."""

        def cut(s: Step) -> Step:
            one = slice(row, row + 1)
            return Step(s.tokens[one], s.positions[one], s.logits[one], [c[one] for c in s.chosen], s.gap[one])

        states = [{n: s[:, row : row + 1] for n, s in states.items()} for states in self.states]
        return Scenario(1, self.context, [self.written[row]], states, [cut(s) for s in self.steps])


def run_reference(graph: LayerGraph, params: Params, spec: Spec, steps: int, seed: int = 0) -> Scenario:
    """Prefills token by token, then decodes `steps` steps; the reference rounds where the kernel does."""
    tile, context, vocab = spec.build.kv_tile, spec.build.context, spec.model.vocab
    rows = max(spec.build.rows)
    written = [tile - 1, 2 * tile - 1, tile // 2, 0, 1, tile, tile + 1, 2 * tile - 2][:rows]
    rng = np.random.default_rng(seed)
    decoder = Decoder(graph, params, rows, context, activations=spec.build.activations)
    for t in range(max(written)):
        decoder.step(rng.integers(0, vocab, rows), [t if t < n else -1 for n in written])
    scenario = Scenario(rows, context, written, [_copy(decoder.states)])
    parts, noise = spec.build.expert_parallel, gap_noise(spec.build)
    for n in range(steps):
        alone = n == steps - 1 and steps > 2
        positions = np.array(
            [-1 if row == 2 or alone and row else count + n for row, count in enumerate(written)], np.int32
        )
        tokens = _choose(decoder, positions, rng, vocab, parts, noise, same=n == 0)
        logits = decoder.step(tokens, positions)
        chosen = [c for _, _, c, _ in decoder.notes]
        gap = np.min([np.full(rows, np.inf), *(g for _, _, _, g in decoder.notes)], axis=0)
        gap[positions < 0] = np.inf
        scenario.steps.append(Step(tokens.astype(np.int32), positions, logits, chosen, gap))
        scenario.states.append(_copy(decoder.states))
    return scenario


def _choose(decoder: Decoder, positions, rng, vocab: int, parts: int, noise: float, same: bool) -> np.ndarray:
    """A token for each row, out of a few: first those without a close call, then those that leave most ranks
    idle, in company with the rows before. `same`: the second row takes the first one's token.
    """
    tokens, busy = rng.integers(0, vocab, decoder.rows), None
    if vocab > 1:
        tokens[positions < 0] = 1  # no token of an inactive row is looked up
    for row in np.flatnonzero(positions >= 0):
        most = tokens[:1] if same and row == 1 else some_tokens(rng, vocab)
        notes, tried = [], most[:0]
        while len(tried) < len(most) and not (notes and (closest(notes) >= noise).any()):
            more = most[len(tried) : len(tried) + CANDIDATES]
            seen = _try(decoder, row, int(positions[row]), more)
            if same and row == 0 and seen and decoder.rows > 1 and positions[1] >= 0:  # a wide gap for both
                other = _try(decoder, 1, int(positions[1]), more)
                seen = [(c, np.minimum(g, h)) for (c, g), (_, h) in zip(seen, other)]
            tried = most[: len(tried) + len(more)]
            if not seen:  # no router
                break
            notes = [tuple(np.concatenate(x) for x in zip(*layer)) for layer in zip(notes, seen)] if notes else seen
        if not notes:
            tokens[row] = tried[0]
            continue
        gap = closest(notes)
        groups = np.stack([by_rank(c, parts).any(-1) for c, _ in notes], 1)  # [tried, layers, parts]
        together = groups if busy is None else groups | busy
        idle = (~together).sum((1, 2))
        best = max(range(len(tried)), key=lambda i: (gap[i] >= noise, idle[i], gap[i]))
        tokens[row], busy = tried[best], together[best]
    return tokens


def some_tokens(rng, vocab: int) -> np.ndarray:
    """[MOST_TRIED], in no order; each but once where the vocabulary has as many."""
    return rng.permutation(vocab)[:MOST_TRIED] if vocab >= MOST_TRIED else rng.integers(0, vocab, MOST_TRIED)


def closest(notes) -> np.ndarray:
    """[tried]: the smallest gap of any layer."""
    return np.min([gap for _, gap in notes], axis=0)


def by_rank(chosen: np.ndarray, parts: int) -> np.ndarray:
    """[n, experts] -> [n, parts, experts of a part]; the last parts may be short of experts."""
    local = -(-chosen.shape[1] // parts)
    return np.pad(chosen, ((0, 0), (0, parts * local - chosen.shape[1]))).reshape(len(chosen), parts, local)


def _try(decoder: Decoder, row: int, position: int, tokens: np.ndarray):
    """The routing of one more step of `row`, for each of `tokens` in its place: [(chosen [tokens, experts], gap
    [tokens])] a layer.
    """
    rows, parts = decoder.rows, []
    for at in range(0, len(tokens), rows):  # as many at a time as are compiled for anyway
        some = np.resize(tokens[at : at + rows], rows)
        trial = Decoder(decoder.graph, decoder.params, rows, decoder.context, activations=decoder.activations)
        trial.states = {n: np.repeat(s[:, row : row + 1], rows, axis=1) for n, s in decoder.states.items()}
        trial.step(some, np.full(rows, position))
        parts.append([(chosen, gap) for _, _, chosen, gap in trial.notes])
    return [tuple(np.concatenate(x)[: len(tokens)] for x in zip(*layer)) for layer in zip(*parts)]


def _copy(states: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {n: s.copy() for n, s in states.items()}
