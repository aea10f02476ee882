"""An oracle's folder through importer and reference: config.json and tensors in, the distance to its logits out.

    python tests/hub_case.py FOLDER…       each as make_oracle.py writes it: config.json, model.safetensors, io.npz, meta.json
"""
from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkgen.graph.build import build_graph                          # noqa: E402
from mkgen.importing import Imported, import_hf                    # noqa: E402
from mkgen.importing.importer import identifier                    # noqa: E402
from mkgen.reference.evaluate import Decoder                       # noqa: E402
from mkgen.reference.params import TensorParams                    # noqa: E402
from mkgen.spec.model import Build, Spec                           # noqa: E402

CONTEXT = 32                                 # the oracle's sequences are 21 tokens long


@dataclass(frozen=True)
class Result:
    """error: worst |d logits| over prompt and decode. routing: the chosen experts are the oracle's, where it tells."""
    imported: Imported
    error: float
    bound: float
    argmax: bool
    routing: bool | None
    seconds: float

    @property
    def good(self) -> bool:
        return self.error <= self.bound and self.argmax and self.routing is not False


def spec_of(made: Imported, rows: int) -> Spec:
    """The imported model on one core."""
    build = Build("tpu7x", {"core": 1}, rows=(rows,), context=CONTEXT, kv_tile=16, block_kib=128, ring_depth=4, expert_slots=2, kv_slots=4)
    return Spec(made.model, build, "imported")


def run(folder: Path, tensors: dict[str, np.ndarray]) -> Result:
    """Decodes the oracle's tokens one at a time, all sequences side by side, in float32."""
    began = time.perf_counter()
    made = import_hf(folder / "config.json", identifier(folder.name), model_only=True, names=tensors)
    io, meta = np.load(folder / "io.npz"), json.loads((folder / "meta.json").read_text())
    ids, prompt = io["input_ids"], meta["prompt_len"]
    decoder = Decoder(build_graph(spec_of(made, len(ids))), TensorParams(tensors, made.model.checkpoint), len(ids), CONTEXT, exact=True)
    logits, chosen = [], []
    for t in range(ids.shape[1]):
        logits.append(decoder.step(ids[:, t], np.full(len(ids), t, np.int32)))
        chosen.append([np.stack([np.flatnonzero(row) for row in c]) for _, _, c, _ in decoder.notes])
    have, want = np.stack(logits, 1), np.concatenate([io["prefill_logits"], io["logits"][:, 1:]], 1)
    return Result(made, float(np.abs(have - want).max()), fp32_bound(meta), bool((have.argmax(-1) == want.argmax(-1)).all()),
                  same_experts(folder, chosen, prompt), time.perf_counter() - began)


def same_experts(folder: Path, chosen: list, prompt: int) -> bool | None:
    """None where the oracle has no list of them for each of our layers."""
    file = folder / "routing.npz"
    if not file.is_file() or not chosen[0]:
        return None
    want, have = np.load(file)["topk"], np.array(chosen[prompt - 1:])
    return bool((have == want).all()) if have.shape == want.shape else None


def fp32_bound(meta: dict) -> float:
    """Of |d logits|: 30 times the oracle's own noise, never below 1e-4."""
    return max(1e-4, 30 * max(meta.get("cache_vs_full_maxabs") or 0, meta.get("fp32_vs_fp64_maxabs") or 0))


def main(folders: list[str]) -> int:
    from mkgen.pack.hub import Checkpoint
    bad = 0
    for folder in map(Path, folders):
        try:
            checkpoint = Checkpoint(folder)
            r = run(folder, {name: checkpoint.read(name) for name in checkpoint.names})
            line = (f"error {r.error:.1e} of {r.bound:.1e}, argmax {'as theirs' if r.argmax else 'OTHERS'}, "
                    f"experts {'-' if r.routing is None else 'as theirs' if r.routing else 'OTHERS'}, {r.seconds:.1f} s")
            print(f"{'pass' if r.good else 'FAIL'} {folder.name}: {line}", flush=True)
            bad += not r.good
        except Exception as error:
            bad += 1
            print(f"FAIL {folder.name}: {type(error).__name__} {str(error)[:600]}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
