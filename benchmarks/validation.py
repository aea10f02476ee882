"""Predictions beside every published time of the hand-written kernels: python benchmarks/validation.py [-o docs/validation.md]

Measurements are in handwritten/published.yaml, schedules beside it, constants in mkgen/targets/tpu7x.yaml. Nothing here is fitted
while the page is made; the fits that gave the constants are repeated, whole and with each point left out, and must come out where
the constants are.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from described import HERE, Reader, cycles_table, load
from handwritten import CHIP, events_of, saves, step
from scipy.optimize import least_squares

from mkgen.simulate.engine import replay
from mkgen.simulate.events import Receive, Send, Work
from mkgen.targets import Target, load_target
from mkgen.targets.exchange import phase_seconds

TURNS = 4, 12  # a phase is turned so often; the difference counts
MUSE = "muse_spark"
DMA = "dma_bytes_per_s", "dma_descriptor_s"
EXCHANGE = "exchange_latency_s", "exchange_message_s", "exchange_bytes_per_s"


@dataclass(frozen=True)
class Line:
    """A measurement beside its prediction, both in `unit`."""

    group: str
    what: str
    unit: str
    measured: float | None
    predicted: float
    use: str  # fit | held | none
    given: str  # the measurement as published

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@cache
def published() -> dict[str, list[dict]]:
    return yaml.safe_load((HERE / "published.yaml").read_text())


# -- predictions ---------------------------------------------------------------------------------------------------------------


def turn(schedule_name: str, name: str, target: Target, rows: int, options: dict, copies: bool) -> float:
    """Seconds of one turn of a phase among others."""
    schedule = load(schedule_name)
    took = []
    for turns in TURNS:
        reader = Reader(schedule, {"rows": rows, "position": schedule.text["position"], "experts": 8, **options})
        events = reader.events([{"prime": "ring"}, {"repeat": turns, "do": schedule.text["phases"][name]}])
        took.append(replay([e for e in events if not (copies and isinstance(e, Work))], target).seconds)
    return (took[1] - took[0]) / (TURNS[1] - TURNS[0])


def part(name: str, target: Target, rows: int, options: dict) -> float:
    """Seconds that a part of a layer adds to a step; of a whole layer; of the ends."""
    schedule = load(MUSE)
    events = events_of(schedule, rows, **options)
    whole, layers = step(events, target), schedule.layer_count()
    if name == "ends":
        return whole.ends
    if name == "layer":
        return (whole.seconds - whole.ends) / layers
    if name == "exchange":
        return saves(events, target, lambda e: isinstance(e, (Send, Receive)) and e.where.layer is not None) / layers
    ops = schedule.text["parts"][name]
    return saves(events, target, lambda e: e.where.op in ops or e.where.op.split(" ")[0] in ops) / layers


def rounds(entries: list, target: Target) -> float:
    return sum(phase_seconds(target, peers, size, factors=tuple(factors.split())) for factors, peers, size in entries)


def seconds_of(how: dict[str, Any], target: Target) -> float:
    options = how.get("options", {})
    match how:
        case {"phase": name}:
            return turn(MUSE, name, target, how.get("rows", 1), options, how.get("copies", False))
        case {"part": name}:
            return part(name, target, how.get("rows", 1), options)
        case {"rounds": entries}:
            return rounds(entries, target)
        case {"cycles": name}:
            return cycles_table()[name] / how["of"] / target.clock_hz
    raise ValueError(f"no way to predict {how}")


def lines(target: Target) -> list[Line]:
    """All but the gains."""
    out = []
    for group in ("phases", "exchanges"):
        for entry in published()[group]:
            out.append(
                Line(
                    group,
                    entry["what"],
                    "us",
                    entry["us"],
                    seconds_of(entry["predict"], target) * 1e6,
                    entry["use"],
                    entry.get("range", f"{entry['us']:g}"),
                )
            )
    for entry in published()["steps"]:
        schedule = load(entry["predict"]["schedule"])
        for rows, ms in entry["ms"].items():
            took = step(events_of(schedule, rows, **entry["predict"].get("options", {})), target)
            out.append(
                Line(
                    "steps",
                    f"{entry['what']}, {rows} row{'s' * (rows > 1)}",
                    "ms",
                    ms,
                    took.ms,
                    entry["use"],
                    entry.get("range", f"{ms:g}"),
                )
            )
    return out


def gains(target: Target) -> list[tuple[dict, float]]:
    """(entry, predicted us a layer)."""
    schedule = load(MUSE)
    known: dict[str, float] = {}

    def seconds(rows: int, options: dict) -> float:
        key = f"{rows} {options}"
        if key not in known:
            known[key] = step(events_of(schedule, rows, **options), target).seconds
        return known[key]

    return [
        (
            e,
            (seconds(e["predict"]["rows"], e["predict"]["after"]) - seconds(e["predict"]["rows"], e["predict"]["before"]))
            * 1e6
            / schedule.layer_count(),
        )
        for e in published()["gains"]
    ]


def mean_error(found: list[Line]) -> float:
    return sum(abs(x.error) for x in found) / len(found)


# -- the fits, again -----------------------------------------------------------------------------------------------------------


def fit_dma(entries: list[dict], target: Target) -> Target:
    """bytes / rate + descriptors * cost, least squares of the relative errors."""
    rows = np.array([[e["bytes"] / e["us"], e["descriptors"] / e["us"]] for e in entries]) * 1e6
    inverse, cost = np.linalg.lstsq(rows, np.ones(len(entries)), rcond=None)[0]
    return replace(target, dma_bytes_per_s=1 / inverse, dma_descriptor_s=cost)


def predict_dma(entry: dict, target: Target) -> float:
    return (entry["bytes"] / target.dma_bytes_per_s + entry["descriptors"] * target.dma_descriptor_s) * 1e6


def fit_exchange(entries: list[dict], target: Target) -> Target:
    """The three constants of a phase, least squares of the logarithms."""

    def with_(x):
        return replace(target, **dict(zip(EXCHANGE, (x[0] * 1e-6, x[1] * 1e-6, x[2] * 1e9))))

    def errors(x):
        return [np.log(rounds(e["predict"]["rounds"], with_(x)) * 1e6 / e["us"]) for e in entries]

    return with_(least_squares(errors, [1.5, 0.3, 71.0]).x)


def fits(target: Target) -> dict[str, tuple[Target, list[tuple[str, float, float]]]]:
    """name of the fit -> (constants fitted on all, [(what, error, error when left out)])."""
    out = {}
    for name, group, fit, predict in (
        ("dma", "phases", fit_dma, predict_dma),
        ("exchange", "exchanges", fit_exchange, lambda e, t: rounds(e["predict"]["rounds"], t) * 1e6),
    ):
        entries = [e for e in published()[group] if e.get("fit") == name]
        whole = fit(entries, target)
        without = [fit(entries[:n] + entries[n + 1 :], target) for n in range(len(entries))]
        out[name] = (
            whole,
            [(e["what"], predict(e, whole) / e["us"] - 1, predict(e, t) / e["us"] - 1) for e, t in zip(entries, without)],
        )
    return out


def main() -> None:
    from validation_page import page

    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("-o", type=Path, help="none: prints it")
    asked = asked.parse_args()
    text = page(load_target(CHIP))
    if asked.o:
        asked.o.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
