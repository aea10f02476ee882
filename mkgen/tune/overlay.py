"""The build that was found as a file: a `build:` with a comment for each decision, which `--overlay` puts over the spec."""
from __future__ import annotations

from dataclasses import dataclass, fields

import yaml

from mkgen.spec.model import Build
from mkgen.tune.decisions import Decision, microseconds
from mkgen.tune.trial import Trial


@dataclass(frozen=True)
class Result:
    """All that is said about a search. base, best: confirmed with many draws; alone: rows -> ms of a module for these rows alone."""
    spec: str
    overlay: str
    base: Trial
    best: Trial
    decisions: list[Decision]
    alone: dict[int, float]
    tried: int
    predicted: int
    refusals: dict[str, int]
    converged: bool
    kicks: int
    seconds: float
    repack: bool
    terms: str
    verdict: str


def changed_keys(build: Build, file: Build) -> dict[str, object]:
    """Keys of the build that the spec's file does not have so."""
    pairs = {f.name: (getattr(build, f.name), getattr(file, f.name)) for f in fields(Build)}
    return {name: plain(new) for name, (new, old) in pairs.items() if new != old}


def plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def overlay_text(file: Build, base: Trial, best: Trial, decisions: list[Decision], repack: bool, terms: str) -> str:
    """file: the build as it stands in the spec's file, without overlays and options."""
    keys = changed_keys(best.build, file)
    began = "the build that the search began with" if changed_keys(base.build, file).keys() - {"rows"} else "the spec's own build"
    out = ["# Made by `mkgen tune`: put it over the spec with --overlay.", f"# {terms}"]
    out += [f"# {r} row{'s' * (r > 1)}: {base.ms[r]:.3f} ms predicted with {began}, {ms:.3f} ms with this one (checker: pass)"
            for r, ms in best.ms.items()]
    out.append("# Weights have to be packed again: the layout is another than that of the spec's own build." if repack else
               "# Weights that were packed for the spec's own build serve.")
    out.append("build:" if keys else "build: {}")
    said: set[str] = set()
    for key, value in keys.items():
        about = [d for d in decisions if d.changed and key in d.keys and d.name not in said]
        said |= {d.name for d in about}
        out += [f"  # {line(d)}" for d in about]
        out.append(f"  {key}: {flow(value)}")
    kept = [d for d in decisions if d.name not in said]
    return "\n".join([*out, *(["# Kept:"] if kept else []), *(f"# {line(d)}" for d in kept), ""])


def flow(value: object) -> str:
    """On one line."""
    if not isinstance(value, (list, dict)):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10_000).strip()


def line(d: Decision) -> str:
    """`ring_depth: 18 instead of 14 gains 3.1 us; best alternative 16: +0.4 us`."""
    first = f"{d.name}: {d.chosen}"
    if d.changed:
        first += f" instead of {d.own}, " + (f"which would take {microseconds(d.gained)}" if d.gained else f"which cannot be had here ({d.why})")
    return first + ("; best alternative " + f"{d.alternative}: {microseconds(d.costs)}" if d.costs else "; alternatives: none tried that may run")
