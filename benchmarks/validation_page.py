"""docs/validation.md, from the lines of validation.py and the text in handwritten/validation.md.j2."""

from __future__ import annotations

from dataclasses import replace

from described import HERE, Event, Fetch
from handwritten import CHIP, events_of, step
from jinja2 import Environment, StrictUndefined
from validation import DMA, EXCHANGE, MUSE, Line, fits, gains, lines, load, mean_error, published

from mkgen.targets import Target
from mkgen.targets.exchange import phase_seconds

TITLES = {"phases": "Phases", "exchanges": "Exchanges", "steps": "Steps"}
MARKS = {"fit": "**fit**", "held": "", "none": "not counted"}
UNITS = {
    "dma_bytes_per_s": (1e-12, "TB/s"),
    "dma_descriptor_s": (1e9, "ns"),
    "exchange_latency_s": (1e6, "us"),
    "exchange_message_s": (1e6, "us"),
    "exchange_bytes_per_s": (1e-9, "GB/s"),
}
LANES = 1, 4, 6, 8, 16, 64


def page(target: Target) -> str:
    found, changed = lines(target), gains(target)
    held = [x for x in found if x.use == "held"]
    groups = {g: [x for x in found if x.group == g] for g in TITLES}
    by_what = {x.what: x for x in found}
    muse, k3 = ([x for x in groups["steps"] if x.what.startswith(name)] for name in ("Muse", "Kimi"))
    products = [by_what[f"8 experts, NVFP4, {rows} rows alike"] for rows in (2, 4)]
    unused = [(e, v) for e, v in changed if e.get("use") != "fit"]
    schedule = load("kimi_k3")
    drawn, routed = events_of(schedule, 1), schedule.text["experts"]
    counts = [n for events in drawn for n in expert_counts(events)]
    others = {us: replace(target, exchange_further_message_s=us * 1e-6) for us in (0.0, target.exchange_message_s * 1e6)}
    many = [
        (us, [step(events_of(schedule, rows), t).ms for rows in schedule.text["rows"]], phase_31(t)) for us, t in others.items()
    ]
    values = dict(
        chip=CHIP,
        position=load(MUSE).text["position"],
        draws=len(drawn) * schedule.layer_count(),
        held=held,
        groups=groups,
        titles=TITLES,
        marks=MARKS,
        mean=mean_error,
        of_use=lambda xs, use: [x for x in xs if x.use == use],
        rest=mean_error([x for x in held if x.group != "exchanges"]),
        worst=sorted(held, key=lambda x: -abs(x.error))[:4],
        changed=changed,
        signs=(sum((e["us"] > 0) == (v > 0) for e, v in unused), len(unused)),
        fits=fitted(target),
        layer=next(x for x in found if x.what.startswith("a layer")),
        muse_bias=-sum(x.error for x in muse) / len(muse),
        products=[*products, by_what["dense weights, int8, a product for each K-tile"]],
        products_of_step=share(products, by_what),
        slots=next((e, v) for e, v in changed if e["what"].startswith("8 instead of 4")),
        big=phase_31(target),
        many=[
            (us, slashed(ms), slashed([100 * (ms[n] / k3[n].measured - 1) for n in range(len(k3))]), big) for us, ms, big in many
        ],
        further=target.exchange_further_message_s * 1e6,
        k3_predicted=slashed([x.predicted for x in k3]),
        k3_measured=slashed([x.measured for x in k3]),
        busiest=sum(counts) / len(counts),
        even=routed["top_k"] / routed["groups"],
        lanes=target.dma_lanes,
        lane_rows=lane_rows(target),
        others=published()["others"],
    )
    text = Environment(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)
    return text.from_string((HERE / "validation.md.j2").read_text(encoding="utf-8")).render(values)


def phase_31(target: Target) -> float:
    """us of an exchange with 31 peers, 256 bytes a message."""
    return phase_seconds(target, 31, 256, factors=("host", "chip", "core")) * 1e6


def slashed(values: list[float]) -> str:
    return " / ".join(f"{x:.2f}" for x in values)


def fitted(target: Target) -> list[tuple[list, list]]:
    """For each fit: (name, found, in use, unit) of its constants, and its errors."""
    out = []
    for name, keys in (("dma", DMA), ("exchange", EXCHANGE)):
        whole, errors = fits(target)[name]
        out.append(([(k, *(f"{getattr(t, k) * UNITS[k][0]:.3g}" for t in (whole, target)), UNITS[k][1]) for k in keys], errors))
    return out


def share(experts: list[Line], by_what: dict[str, Line]) -> float:
    """What is missing in the experts, as a part of the measured step that has them with int8 dense weights, 2 and 4 rows."""
    layers = load(MUSE).layer_count()
    steps = [by_what[f"Muse Spark, NVFP4 experts, int8 dense, {rows} rows"] for rows in (2, 4)]
    return sum((e.measured - e.predicted) * layers / 1e3 / s.measured for e, s in zip(experts, steps)) / len(steps)


def lane_rows(target: Target) -> list[tuple[float, ...]]:
    """lanes, steps of 1 and 8 rows in ms, then us a layer: refills held back at 1 and 8 rows, KV tiles early at 1 and 8."""
    schedule = load(MUSE)
    options = {"shipped": {}, "late": {"early": False}, "held": {"defer": True}, "free": {"defer": False}}
    events = {(rows, name): events_of(schedule, rows, **o) for rows in (1, 8) for name, o in options.items()}
    out = []
    for lanes in LANES:
        ms = {key: step(e, replace(target, dma_lanes=lanes)).ms for key, e in events.items()}
        changes = [
            (ms[r, a] - ms[r, b]) * 1e3 / schedule.layer_count()
            for a, b in (("held", "free"), ("shipped", "late"))
            for r in (1, 8)
        ]
        out.append((lanes, ms[1, "shipped"], ms[8, "shipped"], *changes))
    return out


def expert_counts(events: list[Event]) -> list[int]:
    """Experts that each layer fetches."""
    per: dict[int, int] = {}
    for e in events:
        if isinstance(e, Fetch) and e.stream == "experts" and e.key[0].endswith(" up"):
            per[e.where.layer] = per.get(e.where.layer, 0) + 1
    return list(per.values())
