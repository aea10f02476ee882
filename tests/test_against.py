"""`mkgen compare`: a spec against recorded logits, from the command line."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hubs import checkpoint
from oracle_tensors import make

from mkgen.cli import main

CASE = Path(__file__).resolve().parent / "oracle" / "hub" / "qwen3-tiny"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint, its spec as the importer writes it, and a recording of six tokens."""
    at = tmp_path_factory.mktemp("hub")
    checkpoint(at, {name: w.astype(np.float32) for name, w in make(CASE).items()})
    io = np.load(CASE / "io.npz")
    np.savez(at / "io.npz", input_ids=io["input_ids"][:, :6], logits=io["prefill_logits"][:, :6])
    got = CliRunner().invoke(main, ["import-hf", str(CASE / "config.json"), "-o", str(at / "spec.yaml")])
    assert got.exit_code == 0, got.output
    return at


def run(folder, spec="spec.yaml", recorded="io.npz", *more):
    return CliRunner().invoke(main, ["compare", str(folder / spec), "--from", str(folder), "--logits", str(folder / recorded), *more])


def test_the_right_spec_passes(folder):
    got = run(folder, "spec.yaml", "io.npz", "--json")
    said = json.loads(got.stdout)
    assert got.exit_code == 0 and said["verdict"] == "pass" and said["error"] < 1e-5 and said["same_choice"] == 1.0


def test_a_wrong_number_fails_and_says_where(folder):
    text = (folder / "spec.yaml").read_text()
    wrong = text.replace("base: 1000000", "base: 500000")
    assert wrong != text
    (folder / "wrong.yaml").write_text(wrong)
    got = run(folder, "wrong.yaml")
    assert got.exit_code == 1 and "first position out of bounds: " in got.output and "verdict: fail" in got.output


def test_tensors_that_the_spec_forgot_or_misnames(folder):
    text = (folder / "spec.yaml").read_text()
    forgot = "".join(line for line in text.splitlines(True) if "q_norm: " not in line and "k_norm: " not in line)
    for wrong, words in ((text.replace("mlp.up_proj", "mlp.fc1"), ("missing", "mlp.fc1.weight", "extra", "mlp.up_proj.weight")),
                         (forgot, ("extra", "q_norm.weight"))):
        (folder / "wrong.yaml").write_text(wrong)
        got = run(folder, "wrong.yaml")
        assert got.exit_code == 2 and all(word in got.output for word in words), got.output


def test_recordings_that_are_none(folder):
    (folder / "text.npz").write_text("no archive")
    np.savez(folder / "narrow.npz", input_ids=np.zeros((1, 2), int), logits=np.zeros((1, 2, 3)))
    for name, words in (("text.npz", "not a recording"), ("narrow.npz", "the spec's vocab is")):
        got = run(folder, "spec.yaml", name)
        assert got.exit_code == 2 and words in got.output
