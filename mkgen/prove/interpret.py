"""Pallas's TPU interpreter, with what it finds wrong. The one place that knows its private names and messages."""
from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass, field

from jax._src.pallas.mosaic.interpret import interpret_pallas_call as machine
from jax.experimental.pallas import tpu as pltpu

MODES = ("on_wait", "eager")                  # a missing wait shows in the first, a slot overwritten too early in the second
MESSAGES = 3                                  # of each kind that are kept


def interpret_params(mode: str) -> pltpu.InterpretParams:
    """Race detection on, memory NaN until it is written; `mode`: when copies are carried out."""
    return pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode, uninitialized_memory="nan")


@dataclass
class Findings:
    """Of all kernels run inside one `watch`."""
    races: int = 0
    semaphores: int = 0                       # semaphores found above zero at a kernel's exit
    messages: list[str] = field(default_factory=list)


@contextlib.contextmanager
def watch(findings: Findings):
    """Around one interpreted kernel, to its end: adds its races and left-over semaphores to `findings`."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out):
            yield
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
    finally:
        text = out.getvalue()
        races = re.findall(r"RACE DETECTED\n(.*?)\n\n", text, re.S)
        left = re.findall(r"Semaphore .* non-zero count.*", text)
        found = machine.races is not None and machine.races.races_found
        findings.races += max(len(races), int(found))
        findings.semaphores += len(left)
        findings.messages += ["race: " + _short(r) for r in races[:MESSAGES]] + left[:MESSAGES]


def _short(race: str) -> str:
    """The two accesses, without their clocks."""
    lines = [line.strip() for line in race.split("\n") if "clock:" not in line]
    return " / ".join(lines)[:600]
