"""The cycles of `mkgen profile` against two others: python benchmarks/profile_check.py SPEC [ROWS [WORD]].

1. One layer, without loops whose trips depend on data: the sum of its pieces against the same scoreboard on the listing of the whole kernel,
where the compiler may overlap what the pieces keep apart. Only for a spec whose layers are all of one kind.
2. Each piece whose name holds WORD against libtpu's own static profiler. Both see the same listings: the steps of each piece in a loop of fixed trips, without copies, whose bandwidth libtpu does not model.
A trip is the difference between two trip counts. libtpu's profiler ends the process on some kernels (loops whose trips depend on
data, and more); such pieces are counted as not comparable.
"""
from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mkgen.cli_base import Asked as Spec
from mkgen.emit.module import write_module
from mkgen.emit.printer import Printer
from mkgen.emit.render import kernel_environment, kernel_text
from mkgen.profile import all_places, ask, canonical, profile_plan
from mkgen.profile.compiling import DUMP, Job
from mkgen.profile.listing import read_listing
from mkgen.profile.pieces import Fork, Turn, complete, cut_plan
from mkgen.profile.pytext import Definitions
from mkgen.profile.scoreboard import Board, cycles_of_loop
from mkgen.prove.compile import PACKAGE, worker_environment

TRIPS = (8, 24)
FLAGS = "--xla_jf_dump_static_llo_profile_to={} --xla_tpu_check_llo_types=false"


def pieces_of(spec: str, rows: int) -> tuple[Job, list]:
    plan = canonical(Spec(spec, (), (), False).plan())
    source = kernel_text(plan)
    kernel = Definitions(source)
    _, pieces = cut_plan(Printer(kernel_environment(plan), plan), plan, kernel)
    work = [replace(p, text=p.steps) for p in pieces if p.steps.strip() and not re.search(r"_(start|finish)\(m, ", p.text)]
    for region in {p.region for p in work}:
        complete([p for p in work if p.region == region], kernel)
    topology, _ = plan.target.topology(plan.mesh.ranks)
    job = Job(source, rows, plan.mesh.ranks, topology, plan.target.vmem_bytes, all_places(plan, rows))
    asked = {a.key: a for a in (ask(p, kernel, job, plan.target.name) for p in work)}
    return job, list(asked.values())


def estimate(job: Job, asked, trips: int, folder: Path) -> tuple[int, Path] | None:
    """(libtpu's cycles, listing) of one piece that turns `trips` times; None if its profiler ends the process."""
    function = asked.function.replace("fori_loop(0, at[0], turn", f"fori_loop(0, {trips}, turn")
    told = {"source": job.source, "rows": job.rows, "ranks": job.ranks, "topology": job.topology, "vmem": job.vmem, "places": job.places,
            "pieces": [{"name": "piece", "function": function, "uses": asked.uses, "barrier": False, "alone": asked.alone}]}
    folder.mkdir()
    (folder / "job.json").write_text(json.dumps(told))
    subprocess.run([sys.executable, "-m", "mkgen.profile.worker", str(folder / "job.json")], stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL, env=worker_environment(folder / "dump", f"{DUMP} {FLAGS.format(folder / 'profile')}"))
    found = list((folder / "profile").glob("piece*.textproto"))
    listing = [p for p in (folder / "dump").glob("*-piece.*final_bundles.txt") if "schedule" not in p.name]
    if not found or not listing:
        return None
    return int(re.search(r"estimated_cycles: (\d+)", found[0].read_text()).group(1)), max(listing)


def layer_of_pieces(spec: str, rows: int) -> float | None:
    """Cycles of one layer; None if layers differ."""
    plan = Spec(spec, (), (), False).plan()
    if len(plan.regions) != 4:
        return None
    profile = profile_plan(plan, rows)

    def cycles(items) -> float:
        total = 0.0
        for item in items:
            if isinstance(item, Turn):
                trips = {"m.rows": rows, "KV_BATCH": max(1, plan.spec.build.kv_slots // 2)}.get(item.loop.trips, item.loop.trips)
                total += cycles(item.body) * int(trips) if str(trips).isdigit() else 0.0
            elif not isinstance(item, Fork):
                total += profile.of(item.piece).all
        return total

    return sum(cycles(profile.items[r.name]) for r in plan.regions.values() if r.role in ("mixer", "ffn"))


def layer_of_kernel(spec: str, rows: int) -> float:
    """Cycles of a turn of the layer loop: the longest loop of the whole kernel's listing."""
    plan = Spec(spec, (), (), False).plan()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_module(plan, folder / PACKAGE)
        topology, _ = plan.target.topology(plan.mesh.ranks)
        job = {"directory": scratch, "package": PACKAGE, "rows": rows, "topology": topology, "ranks": plan.mesh.ranks}
        (folder / "job.json").write_text(json.dumps(job))
        subprocess.run([sys.executable, "-m", "mkgen.prove.worker_compile", str(folder / "job.json"), str(folder / "answer.json")],
                       stderr=subprocess.DEVNULL, env=worker_environment(folder / "dump", DUMP), check=True)
        found = [p for p in (folder / "dump").glob("*_decode.*final_bundles.txt") if "schedule" not in p.name]
        listing = read_listing(max(found))
    layers = max(listing.loops, key=lambda x: x.last - x.first)
    return Board(listing, False).trips(layers)


def main(spec: str, rows: str = "1", word: str = "") -> None:
    pieces = layer_of_pieces(spec, int(rows))
    if pieces is not None:
        kernel = layer_of_kernel(spec, int(rows))
        print(f"a layer without loops that depend on data: pieces {pieces:,.0f} cycles, the whole kernel {kernel:,.0f}, ratio {pieces / kernel:.3f}", flush=True)
    job, asked = pieces_of(spec, int(rows))
    ratios, weights = [], []
    for a in (a for a in asked if word in a.about):
        with tempfile.TemporaryDirectory() as scratch:
            both = [estimate(job, a, trips, Path(scratch) / str(trips)) for trips in TRIPS]
            if None in both:
                print(f"{a.about:40} libtpu's profiler gives nothing")
                continue
            theirs = (both[1][0] - both[0][0]) / (TRIPS[1] - TRIPS[0])
            ours = cycles_of_loop(read_listing(both[1][1])).all
        print(f"{a.about:40} libtpu {theirs:9.1f}   here {ours:9.1f}   ratio {ours / theirs if theirs else 1:6.3f}", flush=True)
        if theirs > 50:
            ratios.append(ours / theirs)
            weights.append(theirs)
    if not ratios:
        return
    total = sum(r * w for r, w in zip(ratios, weights)) / sum(weights)
    print(f"{len(ratios)} of {len(asked)} pieces above 50 cycles compared: median ratio {statistics.median(ratios):.3f}, of the sums {total:.3f}, "
          f"from {min(ratios):.3f} to {max(ratios):.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
