"""Steps of published hand-written kernels in this project's simulator: python benchmarks/handwritten.py [NAME ...] [--json]

Each kernel is a schedule in benchmarks/handwritten/ (described.py says what its words mean), replayed against the same chip, on
the same terms as a plan of mkgen's: uniform routing, a fixed seed, at least 1,000 layers drawn, each waiting for its busiest
rank. Default terms are those of the comparison: independent rows, the last position of the context. `--as-published` takes each
kernel's own: where it stood in its context, and rows that are all alike where they were. A call of the host decodes as many steps as
the kernel's authors let it, 16 or 64, or `--steps`: then each step bears what it would in mkgen's loop. `free` and
`dear`: if messages beyond the seventh of an exchange cost nothing, or as much as the first seven; nothing is published.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from typing import Callable, Sequence

from described import SEED, Event, Reader, Schedule, load

from mkgen.simulate.engine import replay
from mkgen.simulate.expand import call_seconds
from mkgen.simulate.timeline import Timeline
from mkgen.targets import Target, load_target

CHIP = "tpu7x"
DRAWS = 1000  # layers whose experts are drawn, at least
HOST_LATENCY = (1.0, 1.5, 2.0)  # exchanges between hosts, as multiples of those within one
VARIANTS = {  # name -> schedule, context of the comparison, options
    "kimi_k3": ("kimi_k3", 1152, {}),
    "muse_spark_int4": ("muse_spark", 4096, {"identical": False}),
    "muse_spark_nvfp4_int8": ("muse_spark", 4096, {"format": "nvfp4", "dense": "int8", "identical": False}),
    "muse_spark_nvfp4_int8_identical": ("muse_spark", 4096, {"format": "nvfp4", "dense": "int8"}),
    "qwen38_27b": ("qwen38_27b", 2048, {}),
}


@dataclass(frozen=True)
class Step:
    """Means over all drawn steps. ends: seconds outside the layers."""

    seconds: float
    ends: float
    hbm_bytes: float
    hbm_busy: float
    lines: tuple[Timeline, ...]

    @property
    def ms(self) -> float:
        return self.seconds * 1e3


def events_of(schedule: Schedule, rows: int, draws: int = DRAWS, **options) -> list[list[Event]]:
    """The events of as many steps as have `draws` layers; one step if it is the same every time."""
    names = {"rows": rows, "position": schedule.text["position"], **options}
    first = Reader(schedule, names, SEED)
    varies = first.counts is not None and (len(set(first.counts.tolist())) > 1)
    steps = -(-draws // len(first.kinds)) if varies else 1
    return [first.events(), *(Reader(schedule, names, SEED + n).events() for n in range(1, steps))]


def step(events: Sequence[list[Event]], target: Target, **scale) -> Step:
    lines = [replay(e, target, **scale) for e in events]
    ends = [
        sum(s.seconds for s in line.spans if s.track in ("core", "wait", "pause") and s.where.layer is None) for line in lines
    ]

    def mean(values):
        values = list(values)
        return sum(values) / len(values)

    return Step(
        mean(x.seconds for x in lines),
        mean(ends),
        mean(x.hbm_bytes for x in lines),
        mean(x.hbm_busy for x in lines),
        tuple(lines),
    )


def saves(events: Sequence[list[Event]], target: Target, belongs: Callable[[Event], bool]) -> float:
    """Seconds that a step loses when such events are left out."""
    rest = [[e for e in es if not belongs(e)] for es in events]
    return step(events, target).seconds - step(rest, target).seconds


def predicted(name: str, as_published: bool = False, draws: int = DRAWS, steps_a_call: int | None = None) -> dict:
    """{rows: {"ms": {host latency: …}, "ms_free": …, "ms_dear": …, "hbm_gb": …, "hbm_busy": …}} of a variant; free and dear: if messages
    beyond the seventh of an exchange cost nothing, or as much as the first seven. steps_a_call: in place of the kernel's own."""
    schedule_name, context, options = VARIANTS[name]
    schedule, target = load(schedule_name), load_target(CHIP)
    if as_published:
        options = {k: v for k, v in options.items() if k != "identical"}
    else:
        options = {**options, "position": context - 1}
    if steps_a_call is not None:
        options = {**options, "dispatch": sum(call_seconds(target, steps_a_call).values())}
    crosses = "host" in schedule.text["mesh"]
    out = {}
    for rows in schedule.text["rows"]:
        events = events_of(schedule, rows, draws, **options)
        by = {x: step(events, target, host_latency=x) for x in (HOST_LATENCY if crosses else (1.0,))}
        free, dear = (step(events, replace(target, exchange_further_message_s=x)).ms for x in (0.0, target.exchange_message_s))
        out[rows] = {
            "ms": {str(x): round(s.ms, 4) for x, s in by.items()},
            "ms_free": round(free, 4),
            "ms_dear": round(dear, 4),
            "hbm_gb": round(by[1.0].hbm_bytes / 1e9, 3),
            "hbm_busy": round(by[1.0].hbm_busy / by[1.0].seconds, 3),
            "steps": len(events),
        }
    return out


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", choices=[*VARIANTS, []], help="none: all")
    asked.add_argument("--as-published", action="store_true", help="on the terms of the published measurements")
    asked.add_argument("--steps", type=int, metavar="N", help="that one call decodes; the kernel's own if not given")
    asked.add_argument("--json", action="store_true")
    asked = asked.parse_args()
    found = {name: predicted(name, asked.as_published, steps_a_call=asked.steps) for name in asked.names or VARIANTS}
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    print(
        f"{'ms a step, by exchanges between hosts':44}{'rows':>5}"
        + "".join(f"{f'x {h}':>8}" for h in HOST_LATENCY)
        + f"{'free':>8}{'dear':>8}{'HBM GB':>9}{'busy':>7}"
    )
    for name, by_rows in found.items():
        for rows, r in by_rows.items():
            print(
                f"{name:44}{rows:5}"
                + "".join(f"{r['ms'].get(str(h), ''):>8}" if str(h) in r["ms"] else f"{'':8}" for h in HOST_LATENCY)
                + f"{r['ms_free']:8.4}{r['ms_dear']:8.4}{r['hbm_gb']:9.2f}{r['hbm_busy']:7.0%}"
            )


if __name__ == "__main__":
    main()
