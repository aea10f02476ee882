"""Pallas's TPU interpreter, with what it finds wrong. The one place that knows its private names and messages.

Its race detector compares each access with all earlier ones of the buffer, one by one in Python: most of a
proof's time. The same test is done here for all of them at once; nothing is left out.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import dataclass, field

import numpy as np
from jax._src import source_info_util
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as machine
from jax._src.pallas.mosaic.interpret import race_detection_state as detector
from jax.experimental.pallas import tpu as pltpu

MODES = ("on_wait", "eager")  # the first shows a missing wait, the second a slot overwritten too early
MESSAGES = 3  # of each kind that are kept


def interpret_params() -> pltpu.InterpretParams:
    """Race detection on, memory NaN until it is written. When copies are carried out is said to `watch`: one
    compiled kernel serves both modes.
    """
    return pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")


@dataclass
class Findings:
    """Of all kernels run inside one `watch`."""

    races: int = 0
    semaphores: int = 0  # semaphores found above zero at a kernel's exit
    messages: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watch(findings: Findings, mode: str):
    """Around one interpreted kernel, to its end: adds its races and left-over semaphores to `findings`."""
    out, Memory.mode = io.StringIO(), mode
    try:
        with contextlib.redirect_stdout(out):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    finally:
        text = out.getvalue()
        sys.stderr.write(text if len(text) < 2000 else text[:2000] + "...\n")
        races = re.findall(r"RACE DETECTED\n(.*?)\n\n", text, re.DOTALL)
        left = re.findall(r"Semaphore .* non-zero count.*", text)
        found = machine.races is not None and machine.races.races_found
        findings.races += max(len(races), int(found))
        findings.semaphores += len(left)
        findings.messages += ["race: " + _short(r) for r in races[:MESSAGES]] + left[:MESSAGES]


class History:
    """All reads, or all writes, of one buffer: who, when (a vector clock), where."""

    def __init__(self, size: int):
        self.clocks, self.accesses = np.zeros((64, size), np.int32), []

    def add(self, clock: np.ndarray, access: tuple) -> None:
        n = len(self.accesses)
        if n == len(self.clocks):
            self.clocks = np.concatenate([self.clocks, np.zeros_like(self.clocks)])
        self.clocks[n] = clock
        self.accesses.append(access)

    def race_with(self, clock: np.ndarray, where: tuple) -> tuple | None:
        """The first access that is neither before nor after `clock`, and overlaps."""
        clocks = self.clocks[: len(self.accesses)]
        ordered = (clocks <= clock).all(1) ^ (clocks >= clock).all(1)  # equal clocks: both, so no order
        for i in np.flatnonzero(~ordered):
            if detector._ranges_overlap(where, self.accesses[i][0]):
                return self.accesses[i]
        return None


class Races(detector.RaceDetectionState):
    """The interpreter's own detector, its answer unchanged."""

    def check_read(self, device_id, local_core_id, clock, buffer_key, rnge, source_info=None):
        self._check("read", ("write",), (rnge, device_id, source_info), clock, buffer_key)

    def check_write(self, device_id, local_core_id, clock, buffer_key, rnge, source_info=None):
        self._check("write", ("write", "read"), (rnge, device_id, source_info), clock, buffer_key)

    def _check(self, kind: str, against: tuple[str, ...], access: tuple, clock, key) -> None:
        with self.lock:
            histories = self.__dict__.setdefault("histories", {})
            for other in against:
                history = histories.get((other, key))
                found = history and history.race_with(clock, access[0])
                if found:
                    self.races_found = True
                    print(f"RACE DETECTED\n  {_access(kind, key, access)}\n  {_access(other, key, found)}\n")
            histories.setdefault((kind, key), History(len(clock))).add(clock, access)


def _access(kind: str, key: tuple, access: tuple) -> str:
    where, device, source = access
    frame = source_info_util.summarize(source) if source is not None else "pallas_call"
    return f"{kind} of {key}[{where}] from {device}, {frame}"


class Memory(machine.memory.SharedMemory):
    """The interpreter's memory, with the mode of the moment instead of the one it was compiled with."""

    mode = MODES[0]

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.dma_execution_mode = Memory.mode


machine.RaceDetectionState = Races
machine.memory.SharedMemory = Memory


def _short(race: str) -> str:
    return " / ".join(line.strip() for line in race.split("\n"))[:600]
