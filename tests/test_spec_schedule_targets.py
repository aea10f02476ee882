"""The run-length schedule grammar, and the chips that are data."""

from __future__ import annotations

import pytest

from mkgen.errors import MkgenError
from mkgen.spec import schedule
from mkgen.targets import MARKS, UnknownChip, known_targets, load_target


@pytest.mark.parametrize(
    "text", ["kda", "-", "kda*3 mla", "(kda*3 mla)*23 mla", "-*2 (a b (c*2 -)*3)*4", "a*1", "(a*2)*3"]
)
def test_schedule_round_trip(text):
    tree = schedule.parse(text)
    assert schedule.to_text(tree) == text and schedule.parse(schedule.to_text(tree)) == tree
    assert len(schedule.expand(tree)) == schedule.length(tree)
    assert set(filter(None, schedule.expand(text))) == set(schedule.names(tree))


def test_schedule_meaning():
    assert schedule.expand("(a*2 -)*2 b") == ("a", "a", None, "a", "a", None, "b")
    assert schedule.parse("(a  b) * 2") == (schedule.Repeat((schedule.Name("a"), schedule.Name("b")), 2),)
    assert schedule.parse("(a b) c") == schedule.parse("a b c"), "brackets without a count group nothing"


@pytest.mark.parametrize(
    "text, column",
    [
        ("", 1),
        ("a)", 2),
        ("(a", 1),
        ("a*", 3),
        ("a*0", 3),
        ("*3", 1),
        ("3", 1),
        ("a b$", 4),
        ("()", 2),
        ("a-b", 2),
        ("a*3b", 4),
        ("a*2*3", 4),
        ("a*99999999999999", 1),
        ("(" * 99 + "a", 18),
        ("a,b", 2),
    ],
)
def test_schedule_mistakes_name_the_column(text, column):
    with pytest.raises(schedule.ScheduleError) as caught:
        schedule.parse(text)
    assert caught.value.column == column, str(caught.value)


@pytest.mark.parametrize("name", known_targets())
def test_targets(name):
    target = load_target(name)
    assert {fact.mark for fact in target.facts.values()} <= set(MARKS)
    assert (
        target.vmem_usable_bytes < target.vmem_bytes
        and target.hbm_bytes_per_s < target.hbm_bytes_per_s_nominal
    )
    assert target.topology(target.max_ranks)[1] == target.max_ranks
    with pytest.raises(MkgenError):
        target.topology(target.max_ranks + 1)


def test_unknown_target_names_the_known_ones():
    with pytest.raises(UnknownChip, match="did you mean 'tpu7x'"):
        load_target("tpu7")
