"""mkgen against plain JAX/XLA for the same models and cores: python benchmarks/against_xla.py [-o docs/against_xla.md] [--json]
[--quick]

Compiles both for the chip, ahead of time and one program after another, counts launches and bytes, and sets XLA's estimated
step (static LLO profile) beside the prediction of `mkgen simulate`. Full: about 25 minutes on two idle cores; --quick: one row,
fewer depths and layouts, about 5.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT)]

from mkgen.targets import load_target  # noqa: E402
from rival.chance import DRAWS  # noqa: E402
from rival.cases import Case, layouts, weight_bytes  # noqa: E402
from rival.measure import LAYOUT, Bench, as_dict, step_of  # noqa: E402
from rival.page import page, summary  # noqa: E402

CASES = (
    Case("kimi_k3", 1152, (1, 8), ("build.kv_tile=128",)),
    Case("qwen3_30b_a3b", 2048, (1, 8), full_depth=True),
    Case("qwen3_8_27b", 2048, (1, 8)),
)
DEPTHS, QUICK_DEPTHS = [1, 2, 4, 8], [1, 2, 4]


def measure(bench: Bench, case: Case, rows: int, quick: bool) -> dict:
    """The rival's side of one model and number of rows."""
    spec, began = case.load(), time.strftime("%Y-%m-%d")
    tried = [ep for ep in layouts(spec) if not quick or ep in (1, 2, spec.build.expert_parallel)]
    ep, found = bench.best_layout(case, rows, tried)
    programs = {}
    for program in (bench.unrolled(case, rows, ep, QUICK_DEPTHS if quick else DEPTHS), bench.loop(case, rows, ep)):
        programs[program.form] = as_dict(program) | {"step": step_of(spec, program.full, ep, rows)}
    mean = programs["loop"]["step"]["mean_experts"]
    return {
        "spec": case.spec,
        "rows": rows,
        "context": case.context,
        "ranks": spec.build.ranks,
        "layers": spec.model.layers,
        "expert_parallel": ep,
        "layouts": found,
        "programs": programs,
        "bytes": weight_bytes(case, rows, ep, mean),
        "quick": quick,
        "date": began,
    }


def against(bench: Bench, case: Case, rows: int, theirs: dict) -> dict:
    """With mkgen's side, which is measured in every run."""
    ours = bench.mkgen(case, rows)
    return theirs | {
        "mkgen": ours,
        "floor_ms": 1e3 * ours["streamed_bytes"] / load_target(case.load().build.chip).hbm_bytes_per_s,
    }


def rival_is_right() -> str:
    """Runs the rival's own test; the words for the page, or an end of everything."""
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            str(ROOT / "tests" / "test_rival.py"),
            "-k",
            "reference",
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    if ran.returncode != 0:
        raise SystemExit(f"the rival's numbers are wrong; nothing is compared with it:\n{ran.stdout[-2000:]}")
    words = re.sub(r" in [\d.]+s.*", "", ran.stdout.strip().splitlines()[-1])
    return f"Its logits were held against `mkgen.reference` in this run, float32, small widths, every model in both forms: {words}."


def wanted(given: argparse.Namespace) -> list[tuple[Case, int]]:
    """Those that were asked for, one row first: the large programs come last."""
    chosen = [c for c in CASES if not given.spec or c.spec in given.spec]
    return sorted(((c, rows) for c in chosen for rows in (c.rows[:1] if given.quick else c.rows)), key=lambda of: of[1])


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("-o", "--out", type=Path, help="write the page there")
    asked.add_argument("--json", action="store_true", help="print all figures as JSON instead of the ratios")
    asked.add_argument("--quick", action="store_true", help="one row, fewer depths and layouts")
    asked.add_argument("--spec", nargs="*", choices=[c.spec for c in CASES], help="only these")
    asked.add_argument(
        "--figures", type=Path, help="JSON of the rival's figures: what it has is not measured again, what it lacks is added"
    )
    asked.add_argument("--known", action="store_true", help="only what the figures have: nothing of the rival is measured")
    given = asked.parse_args()
    began = time.perf_counter()
    say = lambda text: print(f"{time.perf_counter() - began:6.0f} s  {text}", file=sys.stderr, flush=True)
    checked = rival_is_right()
    say(checked)
    known = json.loads(given.figures.read_text()) if given.figures and given.figures.exists() else {}
    cases, left = [], []
    with tempfile.TemporaryDirectory(prefix="against-xla-") as scratch:
        bench = Bench(Path(scratch), say)
        for case, rows in wanted(given):
            key = f"{case.spec} {rows}"
            if given.known and key not in known:
                left.append(key)
                continue
            say(f"{case.spec}, {rows} row{'s' * (rows > 1)}")
            theirs = known.get(key) or measure(bench, case, rows, given.quick)
            if given.figures:
                known[key] = theirs
                given.figures.write_text(json.dumps(known, indent=1), encoding="utf-8")
            cases.append(against(bench, case, rows, theirs))
    target = load_target("tpu7x")
    words = ["python benchmarks/against_xla.py", *sys.argv[1:]]
    about = {
        "command": " ".join(words),
        "machine": f"a {os.cpu_count()}-core {platform.machine()} machine",
        "minutes": (time.perf_counter() - began) / 60,
        "jax": version("jax"),
        "libtpu": version("libtpu"),
        "checked": checked,
        "layout": LAYOUT,
        "draws": f"{DRAWS:,}",
        "clock": target.clock_hz / 1e9,
        "hbm": target.hbm_bytes_per_s / 1e12,
    }
    result = {"about": about, "cases": cases, "not_measured": left}
    if given.out:
        given.out.write_text(page(result), encoding="utf-8")
    print(json.dumps(result, indent=1) if given.json else summary(cases))


if __name__ == "__main__":
    main()
