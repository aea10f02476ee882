"""The page of the benchmark: one table a model and number of rows, and how each figure came about."""
from __future__ import annotations

INTRO = """# mkgen against plain JAX

Written by `{command}` on {machine}, in {minutes:.0f} minutes; jax {jax}, libtpu {libtpu}. No TPU took part: both sides were compiled ahead of time by the
real TPU compiler, and every step time on this page is an estimate.

The rival (`benchmarks/rival/`) is the decode step of the same spec as a careful user of plain JAX writes it, with `shard_map` over the same
cores. {checked}

* **Fair.** Matrices that read the same input are one product; router without a sort; experts in a loop with a dynamic trip count, each distinct one read
  once; caches written in place; states donated, one array a layer. The unrolled form has one array a layer and family too, which lets XLA prefetch
  across layers; the loop form runs over the schedule's period with stacked weights. Experts lie over the cores in the way that
  is fastest by the estimate below, not in mkgen's. `{layout}` is set: without it XLA relays out whole weight stacks on every step.
* **Formats.** Activations and dense weights bf16. Where the spec stores experts in MXFP4 the rival has them in fp8 with a scale for each 256 rows and column: XLA has
  no product that reads MXFP4 without unpacking all of it to HBM first.
* **Experts.** Rows choose uniformly and independently; each layer waits for its busiest group of cores ({draws} draws, fixed seed). "Mean" figures take the mean group.
* **Step of the rival.** Cycles of libtpu's static LLO profile of every launch (real bundle schedules, its DMA and link model) in the order of the
  schedule, each as often as it runs, at {clock:.1f} GHz. The profile knows one operation at a time; so the memory is shared here: a launch that reads HBM takes it for its bytes at
  {hbm:.1f} TB/s, asynchronous copies move with what is left, and their readers wait for them (`benchmarks/rival/timing.py`; "the profile alone" is
  the plain sum, which can read weights faster than any memory gives them). **It has no gap between launches: a lower bound for XLA.** A gap of 1 µs each
  would add the "launches" column in microseconds. Exchanges cost what mkgen's simulator takes for them, at the cheapest way to do each
  (`benchmarks/rival/exchange.py`), and one dispatch by the host is counted, as for mkgen. The first bound has the profile's own, lower figures
  for exchanges and no dispatch; the second has no exchanges at all. They are kept on the TensorCore, since those on the SparseCore have no figure. Caches that the profiler cannot follow in place are written by a select; where that was
  so, it is said.
* **Step of mkgen.** `mkgen simulate`: every transfer, exchange, dispatch and wait counted, on the same terms.
* **Compile time.** Of the program as a user would compile it, in a process of its own, nothing else asked of the compiler; tracing left out on both
  sides. CPU seconds of all threads; wall seconds depend on what else the machine does.
* **Weights in flight.** Bytes of weights that are on their way to VMEM, or there and not yet read, when a layer ends; the mean over all layers' ends. XLA: from
  the scheduled program, of the deepest that was compiled. mkgen: what its ring holds.

Ratios are the better form of the rival over mkgen.
"""


def mb(n: float) -> str:
    return f"{n / 1e6:,.1f}" if n < 1e8 else f"{n / 1e6:,.0f}"


def page(result: dict) -> str:
    parts = [INTRO.format(**result["about"])]
    parts.append(summary(result["cases"]))
    for case in result["cases"]:
        parts.append(section(case))
    return "\n".join(parts)


def ratio(theirs: float | None, ours: float | None) -> str:
    return f"{theirs / ours:,.2f}" if theirs and ours and theirs / ours < 10 else f"{theirs / ours:,.0f}" if theirs and ours else "—"


def summary(cases: list[dict]) -> str:
    lines = ["## Ratios, plain JAX over mkgen", "",
             "| model, rows | step, estimated | XLA's bound, exchanges as profiled | launches | weight bytes read | compile, CPU s | step of XLA / mkgen / floor, ms |",
             "|---|---|---|---|---|---|---|"]
    for case in cases:
        best, ours = best_of(case), case["mkgen"]
        quickest = min(p["full"]["cpu_seconds"] for p in case["programs"].values())
        told = ours["predicted_ms"]
        lines.append(f"| {case['spec']}, {case['rows']} | {ratio(best['step']['ms'], told)} | {ratio(best['step']['own_ms'], told)} | "
                     f"{ratio(best['step']['launches'], ours['launches'])} | {ratio(case['bytes']['streamed_bytes'], ours['streamed_bytes'])} | "
                     f"{ratio(quickest, ours['cpu_seconds'])} (loop), {ratio(case['programs']['unrolled']['full']['cpu_seconds'], ours['cpu_seconds'])} (unrolled) | "
                     f"{best['step']['ms']:.2f} / {told and f'{told:.2f}' or 'not simulated'} / {case['floor_ms']:.2f} |")
    notes = ["", "Floor: the weight bytes that mkgen reads, at the memory's rate. A ratio below 1 is a loss for mkgen."]
    if any(case["mkgen"]["predicted_ms"] is None for case in cases):
        notes.append("This build has no `mkgen simulate`: its column is empty until the same command runs with it.")
    return "\n".join(lines + notes) + "\n"


def best_of(case: dict) -> dict:
    """The form with the shorter step, of those that have a figure."""
    return min(case["programs"].values(), key=lambda p: p["step"]["ms"] or float("inf"))


def section(case: dict) -> str:
    ours, forms = case["mkgen"], case["programs"]
    unrolled, loop = forms["unrolled"], forms["loop"]
    best = best_of(case)

    def row(label: str, of, mine, text, both=None) -> str:
        theirs = [of(p) for p in (unrolled, loop)]
        value = lambda x: "—" if x is None else text(x)
        pick = both if both is not None else (of(best))
        return f"| {label} | {value(theirs[0])} | {value(theirs[1])} | {value(mine)} | {ratio(pick, mine)} |"

    number, seconds, ms = (lambda x: f"{x:,.0f}"), (lambda x: f"{x:,.1f}"), (lambda x: f"{x:,.2f}")
    lines = [f"## {case['spec']}, {case['rows']} row{'s' * (case['rows'] > 1)}, context {case['context']}, {case['ranks']} cores", "",
             "| | unrolled | loop | mkgen | ratio |", "|---|---|---|---|---|",
             row("step, estimated ms", lambda p: p["step"]["ms"], ours["predicted_ms"], ms),
             row("the same, mean experts", lambda p: p["step"]["mean_ms"], None, ms),
             row("bound: exchanges as profiled, no dispatch", lambda p: p["step"]["own_ms"], ours["predicted_ms"], ms),
             row("bound: exchanges free, no dispatch", lambda p: p["step"]["free_exchanges_ms"], ours["predicted_ms"], ms),
             row("plain sum of the profile", lambda p: p["step"]["profile_ms"], ours["predicted_ms"], ms),
             row("launches a step", lambda p: p["step"]["launches"], ours["launches"], number),
             row("of these exchanges between cores", lambda p: p["full"]["collectives"], ours["collectives"], number),
             row("weights read a step and core, MB", lambda p: case["bytes"]["streamed_bytes"], ours["streamed_bytes"], mb),
             row("weights and states held a core, MB", lambda p: loop["full"]["argument_bytes"], ours["argument_bytes"], mb),
             row("weights in flight at a layer's end, MB", lambda p: p["full"]["in_flight_mean_bytes"], ours["in_flight_mean_bytes"], mb),
             row("compile, CPU s", lambda p: p["full"]["cpu_seconds"], ours["cpu_seconds"], seconds),
             row("compile, wall s on this machine", lambda p: p["full"]["compile_seconds"], ours["compile_seconds"], seconds),
             row("program, MB", lambda p: p["full"]["code_bytes"], ours["code_bytes"], mb), ""]
    if case["layouts"]:
        tried = ", ".join(f"{f['expert_parallel']}: {f['cycles']:,.0f}" for f in case["layouts"])
        lines.append(f"Experts of the rival over {case['expert_parallel']} groups of cores, the best of (cycles of two layers and the ends) {tried}; "
                     f"{best['step']['busiest_experts']:.1f} distinct experts on the busiest group, {best['step']['mean_experts']:.1f} on the mean one.\n")
    lines.append(depths(unrolled, case["layers"]))
    doubts = doubtful(forms)
    return "\n".join(lines + doubts + [f"mkgen: checker {ours['verdict']}; floor of its bytes {case['floor_ms']:.2f} ms.", ""])


def depths(p: dict, layers: int) -> str:
    head = "| layers of the unrolled form | " + " | ".join(str(d["layers"]) for d in p["depths"]) + f" | {layers}, {'extrapolated' if p['extrapolated'] else 'compiled'} |"
    lines = [head, "|---" * (len(p["depths"]) + 2) + "|"]
    for label, key, text in (("compile, CPU s", "cpu_seconds", "{:,.1f}"), ("cycles, thousand", "cycles", "{:,.0f}"), ("launches without experts", "launches_fixed", "{:,.0f}")):
        scale = 1e3 if "thousand" in label else 1
        lines.append(f"| {label} | " + " | ".join((text.format(d[key] / scale) if key in d else "—") for d in [*p["depths"], p["full"]]) + " |")
    residual = p["worst_residual"]
    said = ("Extrapolated by least squares: what the ends cost, and so much a layer of each kind. Largest residual at the depths compiled: CPU seconds "
            f"{residual['cpu_seconds']:.0%}, cycles {residual.get('cycles', 0):.1%}, launches {residual['launches_fixed']:.1%}.")
    if "full depth" in residual:
        off = residual["full depth"]
        said += f" Against the program of all layers it is off by {off['cpu_seconds']:+.0%} of CPU seconds, {off.get('cycles', 0):+.1%} of cycles, {off['launches_fixed']:+.1%} of launches."
    return "\n".join([*lines, "", said, ""])


def doubtful(forms: dict) -> list[str]:
    """What the reader has to know of how a figure was come by."""
    out = []
    for name, p in forms.items():
        every = [*p["depths"], p["full"]]
        if any(d["masked_write"] for d in every):
            out.append(f"{name}: profiled with caches written by a select.\n")
        if p["full"].get("profiler"):
            out.append(f"{name}: libtpu's profiler aborts on it ({p['full']['profiler'].split('failed: ')[-1][:120]}), so it has no step time.\n")
        left = {k for d in every for k in d.get("without_figure", ())}
        if left:
            out.append(f"{name}: without a figure in the profile, and counted as nothing: {', '.join(sorted(left))}.\n")
        if any(d["untold_loops"] for d in every):
            out.append(f"{name}: loops of XLA's own, whose trips its text does not tell, are counted once.\n")
        if p["full"].get("copied_bytes"):
            out.append(f"{name}: copies within HBM write {mb(p['full']['copied_bytes'])} MB a step.\n")
    return out
