"""Cuts of stored tensors: there and back, what they refuse, and the checks of a spec that has them."""
import numpy as np
import pytest
import yaml
from test_spec import KIMI, QWEN, problems

from mkgen.spec.checkpoint import Axis, BadPattern, parse, picks, uncut
from mkgen.spec.load import load_spec

ROLE = (6, 5)


@pytest.mark.parametrize("cuts, role, stored", [
    ("", (6, 5), (6, 5)), ("T", (6, 5), (5, 6)), ("rows 2:8", (6, 5), (9, 5)), ("each 4 1:3", (6, 5), (12, 5)),
    ("T | rows 0:6", (6, 5), (5, 11)), ("T | each 2 1:2", (6, 5), (5, 12)), ("each 5 0:2 | T", (6, 4), (10, 6)),
    ("rows 4:16 | each 4 2:4", (6, 5), (20, 5)), ("each 4 0:3 | rows 3:9", (6, 5), (12, 5)), ("each 3 0:1", (6,), (18,))])
def test_the_way_back_from_a_role(cuts, role, stored):
    """`uncut` allows the tensor that was cut, `picks` names the elements that `take` takes."""
    pattern = parse("w | " + cuts if cuts else "w")
    axes = uncut(pattern.cuts, role)
    assert len(axes) == len(stored) and all(a.fits(n) for a, n in zip(axes, stored))
    tensor = np.arange(np.prod(stored)).reshape(stored)
    want = tensor[np.ix_(*picks(pattern.cuts, stored))]
    if sum(c.kind == "T" for c in pattern.cuts) % 2:
        want = want.T
    assert want.shape == role and np.array_equal(pattern.take(tensor), want)


def test_an_axis_that_is_cut_out_is_open_at_the_end():
    assert uncut(parse("w | T | rows 2:8").cuts, ROLE) == (Axis(5), Axis(8, False))
    assert uncut(parse("w | each 2 0:1 | rows 0:6").cuts, ROLE) == (Axis(12, False), Axis(5))
    assert uncut(parse("w | reshape").cuts, ROLE) is None


@pytest.mark.parametrize("cuts, role", [("rows 0:5", (6, 5)), ("each 8 0:4", (6, 5)), ("T", (6,)),
                                        ("rows 0:8 | each 2 0:1", (6, 5)), ("each 4 0:2 | rows 0:4", (6, 5))])
def test_cuts_that_cannot_give_the_role(cuts, role):
    with pytest.raises(BadPattern):
        uncut(parse("w | " + cuts).cuts, role)


@pytest.mark.parametrize("cuts, stored", [("rows 2:8", (7, 5)), ("each 4 1:3", (10, 5))])
def test_cuts_that_do_not_fit_the_tensor(cuts, stored):
    with pytest.raises(BadPattern, match="does not fit"):
        picks(parse("w | " + cuts).cuts, stored)


def test_what_is_no_pattern():
    for text in ("w | row 0:3", "w | rows 3:3", "w | each 2 1:3", "w | reshape | T"):
        with pytest.raises(BadPattern):
            parse(text)


# -- in a spec -------------------------------------------------------------------------------------------------------

def with_patterns(tmp_path, ignore=None, **patterns):
    """A committed spec with other patterns, by the last word of the role."""
    spec = yaml.safe_load(QWEN.read_text())
    names = spec["model"]["checkpoint"]
    for role in list(names):
        names[role] = patterns.get(role.rpartition(".")[2], names[role])
    if ignore:
        spec["model"]["ignore"] = ignore
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec, sort_keys=False))
    return path


FUSED = "model.layers.{layer}.self_attn.qkv.weight"
EXPERTS = "model.layers.{layer}.mlp.experts.gate_up"


def test_a_fused_checkpoint_is_a_spec(tmp_path):
    path = with_patterns(tmp_path, q=FUSED + " | rows 0:4096", k=FUSED + " | rows 4096:4608", v=FUSED + " | rows 4608:5120",
                         expert_gate=EXPERTS + " | T | each 2 0:1", expert_up=EXPERTS + " | T | each 2 1:2",
                         ignore=["model.visual.*", "mtp.*"])
    assert load_spec(path).model.ignore == ("model.visual.*", "mtp.*")


@pytest.mark.parametrize("patterns, words", [
    ({"q": FUSED + " | rows 0:4096", "k": FUSED + " | rows 4095:4607"}, "cuts overlap"),
    ({"expert_gate": EXPERTS + " | T | each 2 0:1", "expert_up": EXPERTS + " | T | rows 0:768"}, "cuts overlap"),
    ({"q": FUSED, "k": FUSED + " | rows 4096:4608"}, "cuts overlap"),
    ({"q": FUSED, "k": FUSED}, "have the same tensor"),
    ({"q": FUSED + " | rows 0:4000"}, "takes 4000 rows, not 4096"),
    ({"q_norm": "model.layers.{layer}.q_norm | T"}, "this is a vector"),
    ({"ignore": ["model.layers.47.mlp.gate.*"]}, "model.layers.47.mlp.gate.weight"),
])
def test_patterns_that_cannot_be(tmp_path, patterns, words):
    path = with_patterns(tmp_path, **patterns)
    found = problems(path)
    assert len(found) == 1 and words in found[0].what + found[0].why and found[0].line > 1


def test_ignoring_layers_that_the_model_has_not(tmp_path):
    assert load_spec(with_patterns(tmp_path, ignore=["model.layers.48.*"])).model.ignore
    assert not load_spec(KIMI).model.ignore
