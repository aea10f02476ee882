"""An oracle's folder through importer and reference: config.json and tensors in, the distance to its logits out.

    python tests/hub_case.py FOLDER…              each as make_oracle.py writes it: config.json, model.safetensors, io.npz, meta.json
    python tests/hub_case.py --keep DIR FOLDER…   and keeps what is needed to do it again without the weights in DIR
"""
from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mkgen.graph.build import build_graph                          # noqa: E402
from mkgen.importing import Imported, import_hf                    # noqa: E402
from mkgen.importing.importer import identifier                    # noqa: E402
from mkgen.reference.evaluate import Decoder                       # noqa: E402
from mkgen.reference.params import TensorParams                    # noqa: E402
from mkgen.spec.model import Build, Spec                           # noqa: E402

CONTEXT, TILE = 32, 16                       # the oracle's sequences are 21 tokens long


@dataclass(frozen=True)
class Result:
    """error: worst |d logits| over prompt and decode. routing: the chosen experts are the oracle's, where it tells."""
    imported: Imported
    error: float
    bound: float
    argmax: bool
    routing: bool | None

    @property
    def good(self) -> bool:
        return self.error <= self.bound and self.argmax and self.routing is not False


def spec_of(made: Imported, rows: int) -> Spec:
    """The imported model on one core."""
    build = Build("tpu7x", {"core": 1}, rows=(rows,), context=CONTEXT, kv_tile=TILE, block_kib=128, ring_depth=4, expert_slots=2, kv_slots=4)
    return Spec(made.model, build, "imported")


def imported(folder: Path, tensors: dict[str, np.ndarray], settings: tuple[str, ...] = ()) -> Imported:
    """The folder's config, held against the names of its tensors."""
    return import_hf(folder / "config.json", identifier(folder.name), settings, model_only=True, names=tensors)


@dataclass(frozen=True)
class Decoded:
    """All tokens through the float32 reference. chosen [token][layer] [B, k]; before: its states before some tokens."""
    imported: Imported
    params: TensorParams
    logits: np.ndarray                       # [B, T, V]
    chosen: list
    before: dict[int, dict[str, np.ndarray]]


def decode(folder: Path, tensors: dict[str, np.ndarray], made: Imported | None = None, keep: tuple[int, ...] = ()) -> Decoded:
    """Decodes the oracle's tokens one at a time, all sequences side by side."""
    made = made or imported(folder, tensors)
    ids, params = np.load(folder / "io.npz")["input_ids"], TensorParams(tensors, made.model.checkpoint)
    decoder = Decoder(build_graph(spec_of(made, len(ids))), params, len(ids), CONTEXT, exact=True)
    logits, chosen, before = [], [], {}
    for t in range(ids.shape[1]):
        if t in keep:
            before[t] = {n: s.copy() for n, s in decoder.states.items()}
        logits.append(decoder.step(ids[:, t], np.full(len(ids), t, np.int32)))
        chosen.append([np.stack([np.flatnonzero(row) for row in c]) for _, _, c, _ in decoder.notes])
    return Decoded(made, params, np.stack(logits, 1), chosen, before)


@lru_cache(maxsize=None)
def kept(folder: Path) -> Decoded:
    """Of a kept folder; once for all tests, since it takes seconds."""
    from oracle_tensors import make
    return decode(folder, make(folder), keep=(TILE - 1, TILE))


def judged(folder: Path, have: Decoded) -> Result:
    """What was decoded against the oracle's answers."""
    io, meta = np.load(folder / "io.npz"), json.loads((folder / "meta.json").read_text())
    want = np.concatenate([io["prefill_logits"], io["logits"][:, 1:]], 1)
    return Result(have.imported, float(np.abs(have.logits - want).max()), fp32_bound(meta),
                  bool((have.logits.argmax(-1) == want.argmax(-1)).all()), same_experts(folder, have.chosen, meta["prompt_len"]))


def run(folder: Path, tensors: dict[str, np.ndarray], made: Imported | None = None) -> Result:
    return judged(folder, decode(folder, tensors, made))


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


def keep(folder: Path, tensors: dict[str, np.ndarray], out: Path) -> None:
    """Everything but the weights, which `oracle_tensors` makes again."""
    from oracle_tensors import make, spelled, table
    meta = json.loads((folder / "meta.json").read_text())
    out.mkdir(parents=True, exist_ok=True)
    kept = ("case", "size", "seed", "model_class", "prompt_len", "decode_steps", "cache_vs_full_maxabs", "fp32_vs_fp64_maxabs",
            "params", "versions")
    (out / "meta.json").write_text(json.dumps({k: meta[k] for k in kept}, indent=1) + "\n")
    (out / "config.json").write_text((folder / "config.json").read_text())
    lines = table(tensors, (meta["case"], meta["size"], meta["seed"]))
    (out / "tensors.json").write_text("[" + ",\n ".join(map(json.dumps, lines)) + "]\n")
    np.savez_compressed(out / "io.npz", **np.load(folder / "io.npz"))
    if (folder / "routing.npz").is_file():
        np.savez_compressed(out / "routing.npz", topk=np.load(folder / "routing.npz")["topk"])
    made = make(out)
    constants = {n for pattern, layers, experts, _, rule in lines if rule == "constant" for n in spelled(pattern, layers, experts)}
    assert made.keys() == tensors.keys()
    assert all((made[n].astype(np.float32) == a).all() for n, a in tensors.items() if n not in constants), folder


def main(folders: list[str]) -> int:
    from mkgen.pack.hub import Checkpoint
    target = Path(folders[1]) if folders[:1] == ["--keep"] else None
    bad = 0
    for folder in map(Path, folders[2:] if target else folders):
        try:
            checkpoint = Checkpoint(folder)
            tensors = {name: checkpoint.read(name) for name in checkpoint.names}
            if target:
                keep(folder, tensors, target / folder.name)
            began, r = time.perf_counter(), run(folder, tensors)
            line = (f"error {r.error:.1e} of {r.bound:.1e}, argmax {'as theirs' if r.argmax else 'OTHERS'}, "
                    f"experts {'-' if r.routing is None else 'as theirs' if r.routing else 'OTHERS'}, {time.perf_counter() - began:.1f} s")
            print(f"{'pass' if r.good else 'FAIL'} {folder.name}: {line}", flush=True)
            bad += not r.good
        except Exception as error:
            bad += 1
            print(f"FAIL {folder.name}: {type(error).__name__} {str(error)[:600]}", flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
