"""What one core does in a step, as a flat list of events: the simulator replays these and knows nothing else.

`expand.py` makes them of a plan; `handwritten.py` of a published kernel's description. One rank stands for all: it has, in each
layer, the work of the busiest one, and its peers send when it does.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Hashable, Union


@dataclass(frozen=True)
class Where:
    """The place of an event: layer (None: the ends), sub-layer or phase of the step, op."""
    layer: int | None
    region: str
    op: str


@dataclass(frozen=True)
class Work:
    """The core computes, `cycles` by the compiler's static schedule."""
    where: Where
    cycles: float


@dataclass(frozen=True)
class Fetch:
    """Starts a copy between HBM and VMEM. `key` names it for its wait; a copy that is never waited for is finished at the end."""
    where: Where
    key: Hashable
    bytes: int
    stream: str                          # tape | experts | cache | states | embedding | ...: what the bytes are
    writes: bool = False                 # from VMEM to HBM
    descriptors: int = 1


@dataclass(frozen=True)
class Await:
    """The core waits until the copy `key` has arrived."""
    where: Where
    key: Hashable


@dataclass(frozen=True)
class Send:
    """Starts one phase of an exchange: a message of `bytes` to each of `peers` ranks; `factors`: mesh factors they differ in."""
    where: Where
    key: Hashable
    factors: tuple[str, ...]
    peers: int
    bytes: int


@dataclass(frozen=True)
class Receive:
    """The core waits until all messages of the phase `key` have come, and its own have gone."""
    where: Where
    key: Hashable


@dataclass(frozen=True)
class Pause:
    """Time that is neither work nor a wait for a copy: dispatch of the call, the loop that it runs."""
    where: Where
    seconds: float
    why: str


Event = Union[Work, Fetch, Await, Send, Receive, Pause]
