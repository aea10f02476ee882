"""`mkgen compare`: a spec's reference, on a real or random checkpoint, against logits that the model's own code gave.

The recorded file is an .npz with `input_ids` int [B, T] and `logits` float [B, T, vocab] of the same tokens, made in float32; a row is
a sequence from position 0.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.pack.expect import match
from mkgen.pack.hub import Checkpoint
from mkgen.pack.wanted import expected_of, per_head
from mkgen.reference.evaluate import Decoder
from mkgen.reference.params import TensorParams
from mkgen.spec.model import Spec

BOUND = 1e-4                                 # of the largest |logit|: what float32 in another order of sums may differ by


@dataclass(frozen=True)
class Comparison:
    """error: worst |d logits|. bound: what was allowed. at: [sequence, position, token] of the worst. first_bad: the first
    position that is out of bounds, in any sequence; None if there is none. same_choice: share of positions with the same argmax."""
    error: float
    bound: float
    at: tuple[int, int, int]
    first_bad: int | None
    same_choice: float

    @property
    def good(self) -> bool:
        return self.error <= self.bound


def compare(spec: Spec, folder: Path, recorded: Path, bound: float | None = None,
            tell: Callable[[int, int], None] = lambda done, total: None) -> Comparison:
    """Decodes the recorded tokens one at a time in float32, all sequences side by side. bound: of |d logits|; None: BOUND of the
    largest logit. Raises MkgenError for a file that is not as it should be, and for tensors that are not those of the spec: one that
    no role takes is a part of the model that the spec forgot."""
    ids, logits = read(recorded, spec.model.vocab)
    graph, checkpoint = build_graph(spec), Checkpoint(folder)
    narrow = per_head(w for sub in graph.sublayers() for op in sub.ops for w in op.weights())
    match(expected_of(spec.model, narrow), checkpoint, spec.model.ignore)
    decoder = Decoder(graph, TensorParams(checkpoint, spec.model.checkpoint), len(ids), ids.shape[1], exact=True)
    found = []
    for t in range(ids.shape[1]):
        found.append(decoder.step(ids[:, t], np.full(len(ids), t, np.int32)))
        tell(t + 1, ids.shape[1])
    have = np.stack(found, 1)
    error = np.abs(have - logits)
    bound = float(np.abs(logits).max() * BOUND) if bound is None else bound
    bad = np.flatnonzero((error > bound).any((0, 2)))
    return Comparison(float(error.max()), bound, tuple(int(i) for i in np.unravel_index(error.argmax(), error.shape)),
                      int(bad[0]) if len(bad) else None, float((have.argmax(-1) == logits.argmax(-1)).mean()))


def read(recorded: Path, vocab: int) -> tuple[np.ndarray, np.ndarray]:
    """(input_ids [B, T], logits [B, T, vocab])."""
    try:
        with np.load(recorded) as file:
            ids, logits = file["input_ids"], file["logits"]
    except (OSError, ValueError, KeyError) as error:
        raise MkgenError(f"{recorded}: not a recording: {error}\n  why: an .npz with input_ids [B, T] and logits [B, T, vocab] is needed\n"
                         f"  fix: make it with numpy.savez, see docs/add_a_model.md") from None
    if ids.ndim != 2 or logits.shape != (*ids.shape, vocab):
        raise MkgenError(f"{recorded}: input_ids {list(ids.shape)} and logits {list(logits.shape)}\n  why: the spec's vocab is {vocab}, and each "
                         f"token has its logits\n  fix: record [B, T] and [B, T, {vocab}]")
    return ids.astype(np.int32), logits.astype(np.float32)
