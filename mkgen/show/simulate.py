"""What `profile` and `simulate` say."""
from __future__ import annotations

from typing import Any

from mkgen import show
from mkgen.plan.plan import Plan
from mkgen.profile import Profile
from mkgen.simulate.draws import draw_experts
from mkgen.simulate.events import Work
from mkgen.simulate.expand import Expansion
from mkgen.simulate.predict import Prediction

WAITS = 12                               # lines of what is waited for


# -- profile ------------------------------------------------------------------------------------------------------------

def profiled(made: Plan, profiles: dict[int, Profile], as_json: bool) -> None:
    """Cycles of a step by region and op, one table a rows variant; experts as one draw has them."""
    clock = made.target.clock_hz
    lines = {rows: cycles_by_op(made, rows, p) for rows, p in profiles.items()}
    if as_json:
        show.put_json({"clock_hz": clock, "variants": {str(rows): {
            "cycles": sum(each * times for _, _, times, each in found), "pieces": len(profiles[rows].pieces), "compiled": profiles[rows].new,
            "ops": [{"region": region, "op": op, "times": times, "cycles": each, "us": each / clock * 1e6} for region, op, times, each in found]}
            for rows, found in lines.items()}})
        return
    out = show.console()
    for rows, found in lines.items():
        total = sum(each * times for _, _, times, each in found)
        t = show.table(f"{made.spec.model.name}, {show.several(rows, 'row')}: compute of a step, {total / clock * 1e6:,.1f} us at {clock / 1e9:.2f} GHz",
                       "region", "op", ">times", ">cycles each", ">us each", ">us in all", ">share, %")
        for region, op, times, each in found:
            t.add_row(region, op, show.number(times), show.number(each), f"{each / clock * 1e6:.3f}", f"{each * times / clock * 1e6:,.1f}",
                      show.percent(each * times, total))
        out.print(t)
        out.print(f"{len(profiles[rows].pieces)} pieces of work, {profiles[rows].new} compiled now, the others known; at context {made.spec.build.context}, "
                  "experts of the busiest rank, one draw")
        out.print()


def cycles_by_op(made: Plan, rows: int, profile: Profile) -> list[tuple[str, str, int, float]]:
    """(region, op, runs of the region in a step, cycles of one run: the mean), in the order of the step."""
    drawn = draw_experts(made, rows, 1)[0].tolist()
    sums: dict[tuple[str, str], float] = {}
    for e in Expansion(made, rows, profile).step(drawn):
        if isinstance(e, Work):
            key = e.where.region, e.where.op
            sums[key] = sums.get(key, 0.0) + e.cycles
    runs: dict[str, int] = {}
    for _, region in made.sequence():
        runs[region.name] = runs.get(region.name, 0) + 1
    return [(region, op, runs.get(region, 1), cycles / runs.get(region, 1)) for (region, op), cycles in sums.items()]


# -- simulate -----------------------------------------------------------------------------------------------------------

def simulated(made: Plan, found: dict[tuple[int, float], Prediction], probes: dict[int, dict], findings: list, as_json: bool) -> None:
    """found: (rows, scale of the latency between hosts) -> prediction."""
    word = show.verdict(not findings)
    if as_json:
        show.put_json(as_dict(found, probes, findings, word))
        return
    out = show.console()
    for finding in findings:
        out.print(f"finding: {finding}")
    out.print(summary(made, found, word))
    first = min(scale for _, scale in found)
    for (rows, scale), p in found.items():
        if scale == first:
            for section in (budget(p), kinds(p), waits(p), *([changes(p, probes[rows])] if rows in probes else [])):
                out.print()
                out.print(section)
    out.print()
    one = next(iter(found.values()))
    call = f", {one.steps_a_call} steps a call" if one.steps_a_call > 1 else ""
    out.print(f"terms: {one.tokens} rows at context {one.context}{call}, uniform routing, {one.draws:,} layers drawn, each waits for its busiest rank; predicted, not measured")
    out.print("verdict of the checker:", show.coloured(word))


def summary(made: Plan, found: dict[tuple[int, float], Prediction], word: str):
    t = show.table(f"{made.spec.model.name} on {made.mesh.ranks} {made.target.name} cores: a step, predicted", ">rows", ">host latency", ">step, ms",
                   ">+-", ">floor, ms", ">tokens/s", ">HBM busy, %", ">experts a layer", "verdict")
    for (rows, scale), p in found.items():
        t.add_row(str(rows), f"x {scale:g}", f"{p.predicted_ms:.3f}", f"{p.spread_ms:.3f}", f"{p.floor_ms:.3f}", show.number(p.tokens_per_s),
                  f"{100 * p.hbm_busy:.1f}", f"{p.experts:.2f}" if p.experts else "-", show.coloured(word))
    return t


def budget(p: Prediction):
    total = sum(p.budget.values())
    t = show.table(f"{show.several(p.rows, 'row')}: where the step goes", "what", ">us", ">share, %")
    for what, us in p.budget.items():
        t.add_row(what, f"{us:,.1f}", show.percent(us, total))
    t.add_row("step", f"{total:,.1f}", "")
    return t


def kinds(p: Prediction):
    t = show.table(f"{show.several(p.rows, 'row')}: by sub-layer", "sub-layer", "role", ">times", ">us each", ">compute", ">waits", ">us in all", ">share, %")
    for k in p.kinds:
        t.add_row(k.name, k.role, str(k.times), f"{k.each_us:,.2f}", f"{k.work_us / k.times:,.2f}", f"{k.wait_us / k.times:,.2f}", f"{k.us:,.1f}",
                  show.percent(k.us, p.predicted_ms * 1e3))
    return t


def waits(p: Prediction):
    t = show.table(f"{show.several(p.rows, 'row')}: the longest waits", "sub-layer", "at", "for", ">us in all", ">share, %")
    for (region, op, what), us in list(p.waits.items())[:WAITS]:
        t.add_row(region, op, what, f"{us:,.1f}", show.percent(us, p.predicted_ms * 1e3))
    return t


def changes(p: Prediction, probes: dict[str, float | str]):
    t = show.table(f"{show.several(p.rows, 'row')}: what would change it", "what if", ">us", ">share, %", "")
    for what, us in probes.items():
        numbers = (f"{us:+,.1f}", show.percent(us, p.predicted_ms * 1e3), "") if not isinstance(us, str) else ("-", "", us)
        t.add_row(what, *numbers)
    return t


def as_dict(found: dict[tuple[int, float], Prediction], probes: dict[int, dict], findings: list, word: str) -> dict[str, Any]:
    """The first prediction, and all of them under `predictions`."""
    every = [one(p, scale, probes.get(rows)) for (rows, scale), p in found.items()]
    return {"verdict": word, "findings": [str(f) for f in findings], **every[0], "predictions": every}


def one(p: Prediction, scale: float, probes: dict | None) -> dict[str, Any]:
    return {
        "rows": p.rows, "context": p.context, "tokens": p.tokens, "host_latency": scale, "predicted_ms": p.predicted_ms, "spread_ms": p.spread_ms,
        "floor_ms": p.floor_ms, "tokens_per_s": p.tokens_per_s, "hbm_busy": p.hbm_busy, "hbm_bytes": p.hbm_bytes, "experts": p.experts,
        "steps": p.steps, "steps_a_call": p.steps_a_call, "draws": p.draws, "budget": p.budget,
        "kinds": [{"name": k.name, "role": k.role, "times": k.times, "us": k.us, "work_us": k.work_us, "wait_us": k.wait_us} for k in p.kinds],
        "waits": [{"region": region, "op": op, "for": what, "us": us} for (region, op, what), us in p.waits.items()],
        **({"sensitivity": probes} if probes else {}),
    }
