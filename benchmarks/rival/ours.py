"""mkgen's own commands, and what its plan says of weights under way."""

from __future__ import annotations

import json
import subprocess
import sys

from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.plan.tape import ROW_BYTES
from mkgen.spec.load import load_spec
from mkgen.targets import load_target
from rival.cases import ROOT, Case


class Refused(Exception):
    """A command that gave no answer, with its words."""


def in_flight(case: Case, rows: int) -> dict:
    """mkgen: bytes of the tape that stand in the ring, or are on their way there, when a layer ends; mean and most over the
    layers."""

    spec = load_spec(case.path, sets=(*case.all_sets, f"build.rows=[{rows}]"))
    plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
    sizes, consumed, last, ends = plan.chunk_table()[1::2], 0, None, []
    for layer, region in plan.sequence():
        if last is not None and layer != last:
            ends.append(int(sizes[consumed : consumed + plan.ring_depth].sum()) * ROW_BYTES)
        last, consumed = layer, consumed + len(region.chunks)
    return {"in_flight_mean_bytes": sum(ends) / len(ends), "in_flight_most_bytes": max(ends)}


def command(case: Case, rows: int, name: str, optional: bool = False) -> dict:
    """A command of mkgen, its JSON; an optional one that this build does not have gives nothing."""
    sets = [word for s in case.all_sets for word in ("--set", s)]
    ran = subprocess.run(
        [sys.executable, "-m", "mkgen", name, case.path, *sets, "--rows", str(rows), "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
    )
    if optional and "No such command" in ran.stderr:
        return {}
    if ran.returncode not in (0, 1) or not ran.stdout.strip():
        raise Refused(f"mkgen {name} {case.spec}: {ran.stderr.strip()[-400:]}")
    return json.loads(ran.stdout)


def find(said: dict, key: str, rows: int) -> float | None:
    """A figure of the variant of that many rows, or of the whole answer."""
    return said.get("variants", {}).get(str(rows), {}).get(key, said.get(key))
