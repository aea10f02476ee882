"""docs/validation.md, from the lines of validation.py."""
from __future__ import annotations

from dataclasses import replace

from handwritten import CHIP, at_most, events_of, step
from validation import DMA, EXCHANGE, Line, fits, gains, lines, load, mean_error, published
from mkgen.targets import Target

GROUPS = {"phases": "Phases", "exchanges": "Exchanges", "steps": "Steps"}
UNITS = {"dma_bytes_per_s": (1e-12, "TB/s"), "dma_descriptor_s": (1e9, "ns"), "exchange_latency_s": (1e6, "us"),
         "exchange_message_s": (1e6, "us"), "exchange_bytes_per_s": (1e-9, "GB/s")}
HEAD = """# Validation of the simulator

Made by `python benchmarks/validation.py -o docs/validation.md`; do not edit. No TPU has been used: the measurements are those that the
authors of three hand-written kernels published, and each prediction is made by the simulator behind `mkgen simulate`, for
a schedule written down as that kernel is described (`benchmarks/handwritten/*.yaml`).

* Cycles of compute come from the TPU compiler's static schedule of the same work, written again (`benchmarks/phases.py`). Where a kernel
  does more than its description says, ours are too few.
* Constants of the chip, with their sources, are in `mkgen/targets/{chip}.yaml`. Marked **fit**: a constant was fitted on this figure or chosen
  by it. All others were used nowhere. Nothing was fitted on the time of a step.
* The page, the model and the constants were committed before the tuner existed.
* Terms are the publications' own: Muse Spark at position {position}, all rows alike (8 distinct experts a layer at any number of rows); Kimi K3 at the
  middle of a run to 1152, independent rows, uniform routing with a fixed seed, {draws} layers drawn, each waiting for its busiest rank.

**Mean absolute error on the {count} figures not used in any fit: {mean:.1%}** ({groups}; without the exchanges {rest:.1%}).
The worst: {worst}.
"""
RULES = """## What the model misses, and the rule that covers it

* **Time that nobody attributes.** Muse Spark's measured layer is {layer_gap:.1f} us longer than ours at 1 row, and its authors leave 5 to 8 us a layer
  unattributed as well. Steps are therefore predicted {muse_bias:.0%} too fast on average for that kernel. The phases do not hide it: exchanges and bytes are
  met, small vector phases (attention, routing) come out at half of what was measured. *Rule: compare schedules in this simulator
  with one another; do not read its milliseconds as a stopwatch's.*
* **Block-diagonal products with few rows, and a product for each tile.** NVFP4 experts at 2 and 4 rows and int8 with separate products are off by
  {nvfp4_2:+.0%}, {nvfp4_4:+.0%} and {int8:+.0%}: we are too fast, and the compiler's schedule does not show why. Drains of the MXU that are exposed at each
  chunk would explain the first two and contradict the figure at 8 rows. It makes {nvfp4_steps:.0%} of those steps. *Rule: a tile's chunk
  products stand in one basic block; of two formulations closer than 25 % neither is preferred.*
* **Number of expert slots.** More than four were measured to be slower (8: {slots_measured:.1f} us a layer), which we see as {slots_predicted:+.1f}: how the DMA engine arbitrates
  between many streams is not known. *Rule: four slots unless a fifth gains more than the error of this page.*
* **Unrolled code.** Experts unrolled in code took 66 / 47 / 85 us a layer where 22 to 34 us of products were in them: instruction fetch, which nothing
  here models. *Rule: loop bodies are shared; only loops of a few small trips are unrolled.*
* **Exchanges beyond 7 peers and beyond a host** have never been published. Each message is taken to cost as much as between 3 and 7 peers,
  so that 31 peers take {big:.1f} us. If it stopped at 7 peers, Kimi K3 would be predicted {few} ms at 1, 2, 4 and 8 rows
  instead of {k3_ours} (measured {k3}). At 1 and 2 rows the measurement is nearer to that: the cost of many messages is more likely
  over- than underestimated, and with it the hand-written Kimi K3. *Rule: a ratio to it is given against its measured time too, and the smaller one
  is claimed; exchanges go in stages of at most 7 peers, whose cost is known.*
* **Real routing.** Uniform routing is assumed. A layer of Kimi K3 then waits for {busiest:.1f} experts on the busiest group at 1 row, where {even:.0f} would be
  even.
* **DMA lanes.** {lanes} descriptors are served at a time, chosen by one effect: refills held back behind the experts were measured to save 14 us a step at 1
  to 4 rows and to cost time at 8. Nothing else was published to pin it down, and it matters; what other numbers would say, Muse Spark with int4:

{lane_table}

  With a lane for each descriptor Muse Spark's steps would come out best, and two measured changes of schedule with the wrong sign: what is missing in a
  step (first point) would be hidden by copies that get in each other's way. *Rule: `hold back` is no reason to prefer a schedule by
  less than 2 us a layer.*
"""


def lane_table(target: Target) -> str:
    schedule = load("muse_spark")
    events = {(rows, name): events_of(schedule, rows, **options) for rows in (1, 8)
              for name, options in (("as shipped", {}), ("kv late", {"early": False}), ("held", {"defer": True}), ("not held", {"defer": False}))}
    out = ["| lanes | step, 1 row | step, 8 rows | held back, 1 row (-0.2) | held back, 8 rows (slower) | KV early, 1 row (-4.5) | KV early, 8 rows (-5.0) |", "|---:|---:|---:|---:|---:|---:|---:|"]
    for lanes in (1, 4, 6, 8, 16, 64):
        ms = {k: step(e, replace(target, dma_lanes=lanes)).ms for k, e in events.items()}
        layer = 1e3 / schedule.layer_count()
        held = [(ms[r, "held"] - ms[r, "not held"]) * layer for r in (1, 8)]
        early = [(ms[r, "as shipped"] - ms[r, "kv late"]) * layer for r in (1, 8)]
        out.append(f"| {lanes} | {ms[1, 'as shipped']:.3f} | {ms[8, 'as shipped']:.3f} | " + " | ".join(f"{x:+.1f}" for x in (*held, *early)) + " |")
    return "\n".join("  " + line for line in out)


def nvfp4_share(by_what: dict[str, Line]) -> float:
    """What the missing time of the experts is of the step that has them, 2 and 4 rows, int8 dense."""
    layers = load("muse_spark").layer_count()
    shares = []
    for rows in (2, 4):
        experts, whole = by_what[f"8 experts, NVFP4, {rows} rows alike"], by_what[f"Muse Spark, NVFP4 experts, int8 dense, {rows} rows"]
        shares.append((experts.measured - experts.predicted) * layers / 1e3 / whole.measured)
    return sum(shares) / len(shares)



def table(found: list[Line]) -> list[str]:
    out = ["| | measured | predicted | error | |", "|---|---:|---:|---:|---|"]
    for x in found:
        digits = 3 if x.unit == "ms" or x.measured < 1 else 2
        out.append(f"| {x.what} | {x.given} | {x.predicted:.{digits}f} | {x.error:+.1%} | {'**fit**' if x.use == 'fit' else 'not counted' if x.use == 'none' else ''} |")
    return out


def mean_text(found: list[Line]) -> str:
    held = [x for x in found if x.use == "held"]
    return f"{len(held)} of {len(found)} not used in a fit, mean absolute error {mean_error(held):.1%}"


def fit_tables(target: Target) -> list[str]:
    out = ["## Fits", "", "Repeated while this page is made; the constants in use are these, rounded. The last column is the error on a figure that was left out.", ""]
    for name, keys in (("dma", DMA), ("exchange", EXCHANGE)):
        whole, errors = fits(target)[name]
        out.append("* " + ", ".join(f"`{k}` {getattr(whole, k) * UNITS[k][0]:.3g} {UNITS[k][1]} (in use: {getattr(target, k) * UNITS[k][0]:.3g})" for k in keys))
        out += ["", "| | fitted | left out |", "|---|---:|---:|", *(f"| {what} | {a:+.1%} | {b:+.1%} |" for what, a, b in errors), ""]
    return out


def gain_table(found: list[tuple[dict, float]]) -> list[str]:
    out = ["## Changes", "", "What the authors gained or lost by one change of the kernel, us a layer (negative: faster); differences of two predicted steps. A difference of two near",
           "figures has no meaningful relative error, so these are not in the mean above.", "", "| | measured | predicted | |", "|---|---:|---:|---|"]
    for entry, value in found:
        out.append(f"| {entry['what']} | {entry.get('us', 'slower')} | {value:+.2f} | {'**fit**' if entry.get('use') == 'fit' else ''} |")
    right = [(e, v) for e, v in found if e.get("use") != "fit"]
    out += ["", f"Sign right in {sum((e['us'] > 0) == (v > 0) for e, v in right)} of {len(right)} that were not used."]
    return out


def page(target: Target) -> str:
    found, changed = lines(target), gains(target)
    held = [x for x in found if x.use == "held"]
    by_group = {g: [x for x in found if x.group == g] for g in GROUPS}
    by_what = {x.what: x for x in found}
    k3 = load("kimi_k3")
    few = [step([at_most(7, e) for e in events_of(k3, rows)], target).ms for rows in k3.text["rows"]]
    drawn = events_of(k3, 1)
    routed = k3.text["experts"]
    muse = [x for x in by_group["steps"] if x.what.startswith("Muse")]
    layer = next(x for x in found if x.what.startswith("a layer"))
    gain = {e["what"]: (e, v) for e, v in changed}
    slots = next(v for k, v in gain.items() if k.startswith("8 instead of 4"))
    counts = [n for es in drawn for n in expert_counts(es)]
    worst = sorted(held, key=lambda x: -abs(x.error))[:4]
    text = [HEAD.format(chip=CHIP, position=load("muse_spark").text["position"], draws=len(drawn) * k3.layer_count(), count=len(held), mean=mean_error(held),
                        groups="; ".join(f"{GROUPS[g].lower()}: {mean_error([x for x in xs if x.use == 'held']):.1%}" for g, xs in by_group.items()),
                        rest=mean_error([x for x in held if x.group != "exchanges"]), worst="; ".join(f"{x.what} {x.error:+.0%}" for x in worst))]
    for group, title in GROUPS.items():
        text += [f"## {title}", "", f"{'ms' if group == 'steps' else 'us'}; {mean_text(by_group[group])}.", "", *table(by_group[group]), ""]
        if group == "phases":
            text += ["Parts of a layer (experts, exchanges, attention, routing) are what a step loses when they are left out, as ablations are made.", ""]
    text += [*gain_table(changed), "", *fit_tables(target)]
    text += [RULES.format(
        layer_gap=layer.measured - layer.predicted, muse_bias=-sum(x.error for x in muse) / len(muse),
        nvfp4_steps=nvfp4_share(by_what), nvfp4_2=by_what["8 experts, NVFP4, 2 rows alike"].error, nvfp4_4=by_what["8 experts, NVFP4, 4 rows alike"].error,
        int8=by_what["dense weights, int8, a product for each K-tile"].error, slots_measured=slots[0]["us"], slots_predicted=slots[1],
        big=big_exchange(target), few=" / ".join(f"{x:.2f}" for x in few), k3=" / ".join(f"{x.measured:.2f}" for x in by_group["steps"] if x.what.startswith("Kimi")),
        k3_ours=" / ".join(f"{x.predicted:.2f}" for x in by_group["steps"] if x.what.startswith("Kimi")),
        busiest=sum(counts) / len(counts), even=routed["top_k"] / routed["groups"], lanes=target.dma_lanes, lane_table=lane_table(target))]
    text += ["## Published, not predicted", "", "| | why |", "|---|---|", *(f"| {e['what']} | {e['why']} |" for e in published()["others"]), ""]
    return "\n".join(text)


def expert_counts(events: list) -> list[int]:
    """Experts that each layer multiplies with."""
    per: dict[int, int] = {}
    for e in events:
        if isinstance(getattr(e, "key", None), tuple) and str(e.key[0]).endswith(" up") and hasattr(e, "stream"):
            per[e.where.layer] = per.get(e.where.layer, 0) + 1
    return list(per.values())


def big_exchange(target: Target) -> float:
    """us of a phase with 31 peers, at 256 bytes a message."""
    from mkgen.targets.exchange import phase_seconds
    return phase_seconds(target, 31, 256, factors=("host", "chip", "core")) * 1e6
