"""Cycles of the compute of published hand-written kernels: python benchmarks/phases.py [NAME ...] [-o FILE]

Each phase is written again from its description, with its operands in VMEM, compiled for the chip as the body of a loop, and
its bundles are replayed as `mkgen profile` does it: cycles of the compiler's static schedule for one trip, not of a chip.
The schedules in benchmarks/handwritten/ take their cycles from the file that this writes. A phase is ours, not theirs: where
theirs does more than its description says, these cycles are too few.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import phases_products  # noqa: F401  declares
import phases_vectors  # noqa: F401
import yaml
from phases_kit import PHASES, measure

OUT = Path(__file__).resolve().parent / "handwritten" / "cycles.yaml"


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("names", nargs="*", help="regular expressions; none: all")
    asked.add_argument("-o", type=Path, help=f"writes them there, beside what the file has (the schedules read {OUT.name})")
    asked = asked.parse_args()
    names = [n for n in PHASES if not asked.names or any(re.fullmatch(p, n) for p in asked.names)]
    found = yaml.safe_load(asked.o.read_text()) if asked.o and asked.o.exists() else {}
    for name in names:
        try:
            found[name] = {"cycles": round(measure(name)), "what": PHASES[name][0]}
            print(f"{found[name]['cycles']:8}  {name:28} {PHASES[name][0]}", flush=True)
        except Exception as error:
            print(f"{'failed':>8}  {name:28} {str(error).splitlines()[0][:160]}", flush=True)
    if asked.o:
        head = "# Cycles of one trip of each phase, by the compiler's static schedule (libtpu 0.0.52):\n"
        head += "# python benchmarks/phases.py -o benchmarks/handwritten/cycles.yaml\n"
        asked.o.write_text(
            head + "".join(f'{n}: {{cycles: {v["cycles"]}, what: "{v["what"]}"}}\n' for n, v in sorted(found.items()))
        )


if __name__ == "__main__":
    main()
