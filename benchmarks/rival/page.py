"""The page of the benchmark: the ratios of all cases, then a table for each, and how its figures came about."""

from __future__ import annotations

from pathlib import Path

INTRO = Path(__file__).with_name("intro.md")
NONE = "—"


def page(result: dict) -> str:
    """All of it, as markdown."""
    intro = INTRO.read_text(encoding="utf-8").format(**result["about"])
    left = [f"Not measured for this page (model, rows): {', '.join(result['not_measured'])}.\n"] if result["not_measured"] else []
    return "\n".join([intro + summary(result["cases"]), *left, *map(section, result["cases"])])


# -- words and numbers ---------------------------------------------------------------------------------------------------


def mb(n: float) -> str:
    return f"{n / 1e6:,.1f}" if n < 1e8 else f"{n / 1e6:,.0f}"


def number(n: float) -> str:
    return f"{n:,.0f}"


def seconds(n: float) -> str:
    return f"{n:,.1f}"


def ms(n: float) -> str:
    return f"{n:,.2f}"


def ratio(theirs: float | None, ours: float | None) -> str:
    if not theirs or not ours:
        return NONE
    return f"{theirs / ours:,.2f}" if theirs / ours < 10 else f"{theirs / ours:,.0f}"


def cells(*values: str) -> str:
    return "| " + " | ".join(values) + " |"


def best_of(case: dict) -> dict:
    """The form with the shorter step, of those that have a figure."""
    return min(case["programs"].values(), key=lambda p: p["step"]["ms"] or float("inf"))


# -- the tables ----------------------------------------------------------------------------------------------------------


def summary(cases: list[dict]) -> str:
    head = [
        "model, rows",
        "step",
        "step, XLA's first bound",
        "launches",
        "weight bytes",
        "compile: loop, unrolled",
        "XLA, mkgen, floor: ms",
    ]
    lines = ["## Ratios, plain JAX over mkgen", "", cells(*head), "|---" * len(head) + "|"]
    for case in cases:
        best, ours, told = best_of(case)["step"], case["mkgen"], case["mkgen"]["predicted_ms"]
        cpu = [ratio(case["programs"][form]["full"]["cpu_seconds"], ours["cpu_seconds"]) for form in ("loop", "unrolled")]
        lines.append(
            cells(
                f"{case['spec']}, {case['rows']}",
                ratio(best["ms"], told),
                ratio(best["own_ms"], told),
                ratio(best["launches"], ours["launches"]),
                ratio(case["bytes"]["streamed_bytes"], ours["streamed_bytes"]),
                ", ".join(cpu),
                f"{ms(best['ms'])}, {NONE if told is None else ms(told)}, {ms(case['floor_ms'])}",
            )
        )
    notes = ["", "Floor: the weight bytes that mkgen reads, at the memory's rate. A ratio below 1 is a loss for mkgen."]
    if any(case["mkgen"]["predicted_ms"] is None for case in cases):
        notes.append("This build has no `mkgen simulate`: its column is empty until the same command runs with it.")
    return "\n".join(lines + notes) + "\n"


def section(case: dict) -> str:
    ours, forms, best = case["mkgen"], case["programs"], best_of(case)
    told = ours["predicted_ms"]

    def row(label: str, text, mine: float | None, of) -> str:
        theirs = [of(forms[form]) for form in ("unrolled", "loop")]
        return cells(label, *(NONE if x is None else text(x) for x in (*theirs, mine)), ratio(of(best), mine))

    title = f"## {case['spec']}, {case['rows']} row{'s' * (case['rows'] > 1)}, context {case['context']}, {case['ranks']} cores"
    lines = [
        title,
        "",
        cells("", "unrolled", "loop", "mkgen", "ratio"),
        "|---" * 5 + "|",
        row("step, estimated ms", ms, told, lambda p: p["step"]["ms"]),
        row("the same, mean experts", ms, None, lambda p: p["step"]["mean_ms"]),
        row("bound: exchanges as profiled, no dispatch", ms, told, lambda p: p["step"]["own_ms"]),
        row("bound: exchanges free, no dispatch", ms, told, lambda p: p["step"]["free_exchanges_ms"]),
        row("plain sum of the profile", ms, told, lambda p: p["step"]["profile_ms"]),
        row("launches a step", number, ours["launches"], lambda p: p["step"]["launches"]),
        row("of these exchanges between cores", number, ours["collectives"], lambda p: p["full"]["collectives"]),
        row("weights read a step and core, MB", mb, ours["streamed_bytes"], lambda p: case["bytes"]["streamed_bytes"]),
        row(
            "weights and states held a core, MB", mb, ours["argument_bytes"], lambda p: forms["loop"]["full"]["argument_bytes"]
        ),
        row(
            "weights in flight at a layer's end, MB",
            mb,
            ours["in_flight_mean_bytes"],
            lambda p: p["full"]["in_flight_mean_bytes"],
        ),
        row("compile, CPU s", seconds, ours["cpu_seconds"], lambda p: p["full"]["cpu_seconds"]),
        row("compile, wall s on this machine", seconds, ours["compile_seconds"], lambda p: p["full"]["compile_seconds"]),
        row("program, MB", mb, ours["code_bytes"], lambda p: p["full"]["code_bytes"]),
        "",
    ]
    if case["layouts"]:
        tried = ", ".join(f"{f['expert_parallel']}: {f['cycles']:,.0f}" for f in case["layouts"])
        lines.append(
            f"Experts of the rival over {case['expert_parallel']} groups of cores; cycles of two layers and the ends "
            f"by number of groups: {tried}. Distinct experts a layer: {best['step']['busiest_experts']:.1f} on the busiest group, "
            f"{best['step']['mean_experts']:.1f} on the mean one.\n"
        )
    made = f"Rival measured on {case['date']}{', --quick' * case['quick']}; mkgen's checker: {ours['verdict']}."
    return "\n".join([*lines, depths(forms["unrolled"], case["layers"]), *doubtful(forms), made, ""])


def depths(p: dict, layers: int) -> str:
    """What was compiled of the unrolled form, and what full depth makes of it."""
    deep = f"{layers}, {'extrapolated' if p['extrapolated'] else 'compiled'}"
    lines = [
        cells("layers of the unrolled form", *(str(d["layers"]) for d in p["depths"]), deep),
        "|---" * (len(p["depths"]) + 2) + "|",
    ]
    for label, key, text, scale in (
        ("compile, CPU s", "cpu_seconds", seconds, 1),
        ("cycles, thousand", "cycles", number, 1000),
        ("launches without experts", "launches_fixed", number, 1),
    ):
        lines.append(cells(label, *(text(d[key] / scale) if key in d else NONE for d in [*p["depths"], p["full"]])))
    off = p["worst_residual"]
    said = (
        "Extrapolated by least squares: what the ends cost, and so much a layer of each kind. "
        f"Largest residual at the depths compiled: CPU seconds {off['cpu_seconds']:.0%}, cycles {off.get('cycles', 0):.1%}, launches {off['launches_fixed']:.1%}."
    )
    if "full depth" in off:
        off = off["full depth"]
        said += (
            " Against the program of all layers, which the table above shows, it is off by "
            f"{off['cpu_seconds']:+.0%} of CPU seconds, "
            f"{off.get('cycles', 0):+.1%} of cycles, {off['launches_fixed']:+.1%} of launches."
        )
    return "\n".join([*lines, "", said, ""])


def doubtful(forms: dict) -> list[str]:
    """What the reader has to know of how a figure was come by."""
    out = []
    for name, p in forms.items():
        every = [*p["depths"], p["full"]]
        if any(d["masked_write"] for d in every):
            out.append(f"{name}: profiled with caches written by a select, which the profiler can follow.\n")
        if p["full"].get("profiler"):
            why = p["full"]["profiler"].split("failed: ")[-1][:120]
            out.append(f"{name}: libtpu's profiler aborts on it ({why}), so it has no step time.\n")
        left = {k for d in every for k in d.get("without_figure", ())}
        if left:
            out.append(f"{name}: without a figure in the profile, and counted as nothing: {', '.join(sorted(left))}.\n")
        if any(d["untold_loops"] for d in every):
            out.append(f"{name}: loops of XLA's own, whose trips its text does not tell, are counted once.\n")
        if p["full"].get("copied_bytes", 0) > 1e6:
            out.append(f"{name}: copies within HBM write {mb(p['full']['copied_bytes'])} MB a step.\n")
    return out
