"""Hand-written kernels as schedules, and the page that holds the simulator against their measurements."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

from described import Expression, Reader, _Load, _Mark, cycles_table, draw, evaluate, load, refilled  # noqa: E402
from handwritten import CHIP, events_of, predicted, step  # noqa: E402
from validation import DMA, EXCHANGE, fits, published, seconds_of  # noqa: E402

from mkgen.simulate.events import Await, Fetch, Where, Work  # noqa: E402
from mkgen.targets import load_target  # noqa: E402

PAGE = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
TARGET = load_target(CHIP)


def page_rows(title: str) -> dict[str, tuple[str, float, float, str]]:
    """what -> (measured, predicted, error, use) of the table under a title."""
    section = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    cells = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in section.split("\n")
        if line.startswith("| ") and "---" not in line
    ]
    return {c[0]: (c[1], float(c[2]), float(c[3].rstrip("%")) / 100, c[4]) for c in cells if len(c) == 5 and c[0]}


def test_phases_and_exchanges_of_the_page_come_out_again():
    for group, title in (("phases", "Phases"), ("exchanges", "Exchanges")):
        shown = page_rows(title)
        assert set(shown) == {e["what"] for e in published()[group]}
        for entry in published()[group]:
            _, predicted, error, use = shown[entry["what"]]
            us = seconds_of(entry["predict"], TARGET) * 1e6
            assert us == pytest.approx(predicted, abs=0.0051), entry["what"]
            assert error == pytest.approx(us / entry["us"] - 1, abs=0.0006), entry["what"]
            assert (use == "**fit**") == (entry["use"] == "fit")


def test_both_sides_bear_a_call_alike():
    """The schedules' own terms are 16 and 64 steps a call, without the loop's trip; asked for, they are mkgen's."""
    own, one, many = (predicted("qwen38_27b", steps_a_call=n)[1]["ms"]["1.0"] for n in (None, 1, 16))
    assert one - own == pytest.approx(TARGET.host_dispatch_s * 15 / 16 * 1e3, abs=2e-4)
    assert many - own == pytest.approx(TARGET.loop_trip_s * 1e3, abs=2e-4)


def test_steps_of_the_page_come_out_again():
    shown = page_rows("Steps")
    for entry in published()["steps"]:
        schedule = load(entry["predict"]["schedule"])
        for rows, ms in entry["ms"].items():
            _, predicted, error, _ = shown[f"{entry['what']}, {rows} row{'s' * (rows > 1)}"]
            assert error == pytest.approx(predicted / ms - 1, abs=0.001)
            if schedule.name != "kimi_k3":  # whose eleven steps are left to the slow test
                assert step(events_of(schedule, rows, **entry["predict"].get("options", {})), TARGET).ms == pytest.approx(
                    predicted, abs=0.00051
                )


def test_the_mean_error_is_that_of_the_tables():
    held = [row[2] for title in ("Phases", "Exchanges", "Steps") for row in page_rows(title).values() if not row[3]]
    stated = re.search(r"Mean absolute error on the (\d+) figures not used in any fit: ([\d.]+)%", PAGE)
    assert (
        len(held)
        == int(stated.group(1))
        == sum(len(e.get("ms", [1])) for g in ("phases", "exchanges", "steps") for e in published()[g] if e["use"] == "held")
    )
    assert sum(map(abs, held)) / len(held) * 100 == pytest.approx(float(stated.group(2)), abs=0.11)


def test_the_constants_are_what_the_fits_give():
    found = fits(TARGET)
    for name, keys in (("dma", DMA), ("exchange", EXCHANGE)):
        for key in keys:
            assert getattr(found[name][0], key) == pytest.approx(getattr(TARGET, key), rel=0.01), key
        assert all(abs(left_out) < 0.08 for _, _, left_out in found[name][1])


def test_no_step_is_in_a_fit_and_steps_that_an_assumption_was_changed_for_are_not_counted():
    assert all("fit" not in e for e in published()["steps"])
    assert [e["predict"]["schedule"] for e in published()["steps"] if e["use"] == "fit"] == ["kimi_k3"]
    assert all("fit" not in e for g in ("phases", "exchanges") for e in published()[g] if e["use"] == "held")


def test_a_worse_chip_is_a_worse_page():
    """The errors are worked out, not typed: other constants give others."""
    other = replace(TARGET, exchange_message_s=2 * TARGET.exchange_message_s)
    entry = next(e for e in published()["exchanges"] if e["what"].startswith("by pairs") and "bf16" in e["what"])
    assert seconds_of(entry["predict"], other) > 1.1 * seconds_of(entry["predict"], TARGET)


@pytest.mark.slow
def test_the_whole_page_comes_out_again():
    from validation_page import page

    assert page(TARGET) == PAGE


# -- the schedules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, options, gigabytes",
    [
        ("muse_spark", {}, 7.02),
        ("muse_spark", {"format": "nvfp4", "dense": "int8"}, 4.70),
        ("qwen38_27b", {}, 6.95),
        ("kimi_k3", {}, 8.4),
    ],
)
def test_bytes_of_a_step_are_those_of_the_description(name, options, gigabytes):
    """One row; the sums were made from the shapes, before there was a schedule."""
    schedule = load(name)
    read = [
        e
        for e in Reader(schedule, {"rows": 1, "position": schedule.text["position"], **options}).events()
        if isinstance(e, Fetch) and not e.writes
    ]
    assert sum(e.bytes for e in read) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_all_that_is_waited_for_was_started_and_weights_are_all_waited_for():
    for name in ("muse_spark", "qwen38_27b", "kimi_k3"):
        schedule = load(name)
        for rows in schedule.text["rows"]:
            events = Reader(schedule, {"rows": rows, "position": schedule.text["position"]}).events()
            waited = {e.key for e in events if isinstance(e, Await)}
            assert not [e.key for e in events if isinstance(e, Fetch) and e.stream in ("tape", "experts") and e.key not in waited]
            assert step([events], TARGET).seconds > 0  # a wait without a start would raise


def test_the_busiest_group_has_as_many_experts_as_another_simulation_found():
    for rows, mean in ((1, 4.2), (2, 6.9), (4, 11.8), (8, 20.3)):
        assert draw(896, 16, rows, 8, 1500, seed=3).mean() == pytest.approx(mean, abs=0.15)
    assert (draw(256, 8, 1, 1, 50, seed=1) == 8).all() and draw(256, 8, 8, 1, 50, seed=1).max() <= 64


def test_a_ring_is_refilled_as_it_is_consumed_and_holds():
    at = Where(0, "a", "b")
    loads = [_Load(at, n, 1, 1.0) for n in range(6)]

    def order(items, banks=2):
        return "".join(
            {Fetch: "f", Await: "w", Work: "c"}[type(e)] + (str(e.key[1]) if not isinstance(e, Work) else "")
            for e in refilled(items, banks)
        )

    assert order([_Mark(at, "prime"), *loads[:4]]) == "f0f1w0cf2w1cf3w2cw3c"
    assert (
        order([_Mark(at, "prime"), loads[0], _Mark(at, "hold"), loads[1], _Mark(at, "release"), *loads[2:4]])
        == "f0f1w0cf2w1cf3w2cw3c"
    )
    # a hold longer than the ring is deep does not stop it: what is needed next is started
    assert order([_Mark(at, "prime"), _Mark(at, "hold"), *loads[:4], _Mark(at, "release")]) == "f0f1w0cw1cf2w2cf3w3c"


def test_expressions_know_names_and_nothing_else():
    names = {"rows": 4, "half": Expression("rows / 2"), "kind": "rows"}
    assert evaluate("max(half, 1) * 3 if kind == 'rows' else 0", names) == 6.0
    assert evaluate("boundary_8192_{rows}", names) == evaluate("boundary_8192_4", {})
    for bad in ("__import__('os')", "rows.real", "[1][0]", "lambda: 1"):
        with pytest.raises((ValueError, KeyError)):
            evaluate(bad, names)


@pytest.mark.slow
def test_cycles_of_a_phase_come_out_again():
    """By the TPU compiler that is installed; the file says what another version might change."""
    import subprocess

    names = ["bf16_1024x1024x1", "argmax_896_1", "int4_expert"]
    made = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "phases.py"), *names],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": ""},
    )
    found = {
        line.split()[1]: float(line.split()[0])
        for line in made.stdout.splitlines()
        if len(line.split()) > 2 and line.split()[1] in names
    }
    assert set(found) == set(names), made.stdout + made.stderr[-2000:]
    for name in names:
        assert found[name] == pytest.approx(cycles_table()[name], rel=0.02), name


def test_steps_for_the_comparison():
    found = predicted("qwen38_27b")
    assert set(found) == {1} and set(found[1]["ms"]) == {"1.0"} and found[1]["steps"] == 1
    assert found[1]["ms"]["1.0"] == pytest.approx(found[1]["ms_free"]) == found[1]["ms_dear"]  # nothing with more than 7 peers
    assert 0.8 < found[1]["hbm_busy"] < 1
    far = predicted("kimi_k3", draws=1)
    for rows in (1, 8):
        assert far[rows]["ms"]["1.0"] < far[rows]["ms"]["1.5"] < far[rows]["ms"]["2.0"]
        assert far[rows]["ms_free"] <= far[rows]["ms"]["1.0"] < far[rows]["ms_dear"]
    assert far[1]["ms_free"] < far[1]["ms"]["1.0"]  # at 8 rows the one with 31 peers is hidden
