"""Chips as data: one YAML per chip, every number with its mark (measured, spec or assumed) and its source.

The files are read through `importlib.resources`, so that they are found in a wheel too.
"""
from __future__ import annotations

from dataclasses import dataclass, fields
from importlib.resources import files
from typing import Any, get_type_hints

import yaml

from mkgen.errors import MkgenError, did_you_mean

MARKS = ("measured", "spec", "assumed")


class UnknownChip(MkgenError):
    """There is no target file of that name."""


@dataclass(frozen=True)
class Fact:
    """A number, how far it can be trusted, and where it comes from."""
    value: Any
    mark: str
    source: str


@dataclass(frozen=True)
class Target:
    """What a chip can do, per TensorCore unless said otherwise; in bytes, seconds, hertz and cycles."""
    name: str
    cores_per_chip: int
    chips_per_host: int
    topologies: dict[int, str]                   # devices -> topology name for the ahead-of-time compiler
    vmem_bytes: int
    vmem_usable_bytes: int
    smem_bytes: int
    dma_semaphores: int                          # the most that a kernel can declare
    hbm_bytes: int
    hbm_bytes_per_s: float                       # reached, many copies outstanding
    hbm_bytes_per_s_nominal: float
    dma_bytes_per_s: float                       # time = bytes / dma_bytes_per_s + descriptors * the next
    dma_descriptor_s: float
    dma_latency_s: float
    dma_lanes: int                               # descriptors that are served at a time, in equal parts
    clock_hz: float
    link_bytes_per_s: float                      # to another chip, each direction
    link_latency_s: float
    sibling_bytes_per_s: float                   # to the other core of the same chip
    sibling_latency_s: float
    exchange_latency_s: float                    # a phase: latency + hypot(messages, bytes / bytes_per_s): exchange.py
    exchange_message_s: float                    # each of the first 7 messages
    exchange_further_message_s: float            # each of the others
    exchange_bytes_per_s: float
    host_dispatch_s: float                       # of a call, however many steps it decodes
    loop_trip_s: float                           # of a step in a call of several, beside the kernel
    mxus_per_core: int
    mxu_shape: tuple[int, int]                   # rows (K), columns (N) of one weight tile
    mxu_push_cycles: dict[str, int]              # weight type -> cycles to push one tile
    mxu_rows_cycles: int                         # for 16 rows of the left operand
    mxu_drain_cycles: int
    sublanes: int
    lanes: int
    facts: dict[str, Fact]                       # the same numbers with mark and source, by field name

    @property
    def max_ranks(self) -> int:
        """Devices of the largest topology known for this chip."""
        return max(self.topologies)

    @property
    def max_hosts(self) -> int:
        """Hosts of the largest topology, at least one."""
        return max(1, self.max_ranks // (self.cores_per_chip * self.chips_per_host))

    def topology(self, ranks: int) -> tuple[str, int]:
        """The smallest topology that holds `ranks` devices: its name and its number of devices."""
        fitting = [devices for devices in self.topologies if devices >= ranks]
        if not fitting:
            raise MkgenError(f"{self.name}: {ranks} devices; the largest known topology has {self.max_ranks}")
        return self.topologies[min(fitting)], min(fitting)

    def mark(self, name: str) -> str:
        """How far a number can be trusted: measured, spec or assumed."""
        return self.facts[name].mark


def known_targets() -> tuple[str, ...]:
    """The names of all chips that there is a file for."""
    names = (entry.name for entry in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def load_target(name: str) -> Target:
    """Read a chip. Raises `UnknownChip` if there is no such file, `MkgenError` if it is not complete."""
    if name not in known_targets():
        raise UnknownChip(f"unknown chip {name!r}: {did_you_mean(name, known_targets())}")
    raw = yaml.safe_load(files(__name__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    hints = get_type_hints(Target)
    wanted = {f.name for f in fields(Target)} - {"name", "facts"}
    if set(raw) != wanted:
        lacks, extra = sorted(wanted - set(raw)), sorted(set(raw) - wanted)
        raise MkgenError(f"{name}.yaml: missing {lacks}, unknown {extra}")
    facts, values = {}, {}
    for key, entry in raw.items():
        if set(entry) != {"value", "mark", "source"} or entry["mark"] not in MARKS or not entry["source"]:
            raise MkgenError(f"{name}.yaml: {key} needs value, source and a mark out of {', '.join(MARKS)}")
        value = entry["value"]
        if hints[key] in (int, float):
            value = hints[key](value)
        elif isinstance(value, list):
            value = tuple(value)
        values[key], facts[key] = value, Fact(value, entry["mark"], entry["source"])
    return Target(name=name, facts=facts, **values)
