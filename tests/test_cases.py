"""Every model type of the oracle through importer and reference: its config, its tensors' names, its logits, in float32.

One test a case: config.json becomes a spec that is valid for a build on one core; every tensor of the checkpoint has a role and
every role a tensor; the reference decodes all tokens through its caches. See oracle/README.md.
"""
from __future__ import annotations

from pathlib import Path

import hub_case
import pytest
from oracle_tensors import make

from mkgen.spec.validate import validate

FOLDER = Path(__file__).resolve().parent / "oracle" / "hub"


@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.iterdir()))
def test_case(name):
    folder = FOLDER / name
    tensors = make(folder)
    spec = hub_case.spec_of(hub_case.imported(folder, tensors), 2)
    problems = [str(p) for p in validate(spec)]
    assert not problems
    r = hub_case.judged(folder, hub_case.kept(folder))
    assert r.error <= r.bound and r.argmax and r.routing is not False, r


def test_a_wrong_spec_is_noticed():
    """The bound is sharp: a rope base that is off by a tenth is outside."""
    folder = FOLDER / "llama3-tiny"
    made = hub_case.imported(folder, make(folder), ("rope_parameters=" + '{"rope_type": "llama3", "rope_theta": 550000.0, "factor": 8.0, '
                             '"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8}',))
    wrong = hub_case.run(folder, make(folder), made)
    assert wrong.error > 30 * wrong.bound
