"""The page: every part's data, and the templates that lay it out."""
from __future__ import annotations

import json

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from mkgen.check import examined
from mkgen.emit.render import template_dir
from mkgen.plan.figures import figures
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.plan.runs import Times, fold
from mkgen.show.report import budget, experts, graphs, traffic
from mkgen.show.report.exchanges import exchanges
from mkgen.show.report.forecast import Forecast
from mkgen.show.report.lives import vmem
from mkgen.show.report.spans import canvas, region_columns
from mkgen.show.report.text import FILTERS, pct

USES = (*budget.ORDER,)                  # they have a colour of their own
KINDS = 8                                # colours of layer kinds


def page(plan: Plan, rows: int, findings: list, forecast: Forecast | None, missing: str = "") -> str:
    """The HTML text. rows: the variant shown. missing: why there is no forecast."""
    env = Environment(loader=FileSystemLoader(template_dir() / "report"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                      autoescape=select_autoescape(default_for_string=True, default=True))
    env.filters.update(FILTERS)
    env.globals.update(pct=pct, colour=colour)
    return env.get_template("page.html.j2").render(**context(plan, rows, findings, forecast, missing))


def context(plan: Plan, rows: int, findings: list, forecast: Forecast | None, missing: str) -> dict:
    """Everything that the templates read."""
    build, kinds = plan.spec.build, kind_colours(plan)
    found, memory = exchanges(plan, rows), vmem(plan, rows)
    timed = None
    if forecast:
        shown = budget.whole(forecast.timeline)
        timed = {"parts": shown, "uses": [p.what for p in shown], "regions": budget.by_region(plan, forecast.timeline),
                 "ops": budget.by_op(forecast.timeline)}
    return {
        "plan": plan, "spec": plan.spec, "build": build, "target": plan.target, "rows": rows, "figures": figures(plan, rows),
        "hash": layout_hash(plan),
        "mesh": " × ".join(f"{name} {size}" for name, size in build.mesh.items()), "findings": findings, "verdict": "fail" if findings else "pass",
        "examined": examined(plan), "forecast": forecast, "missing": missing, "timed": timed, "kinds": kinds, "columns": columns(plan),
        "drawings": graphs.drawings(plan, rows, found), "exchanges": found, "box": (graphs.BOX, graphs.HIGH),
        "vmem": memory, "regions_at": region_columns(memory.places), "families": traffic.per_family(plan, rows),
        "tape": {name: traffic.tape_of(plan.regions[name]) for name in kinds}, "held": traffic.held(plan, rows),
        "imbalance": [experts.imbalance(plan, image, rows) for image in plan.experts],
        "data": script(canvas(plan, forecast.timeline, memory, forecast.needed)) if forecast else None,
    }


def colour(what: str) -> str:
    """The class of a use of time or a stream."""
    return f"u-{what}" if what in USES else "u-other"


def kind_colours(plan: Plan) -> dict[str, str]:
    """Sub-layer -> class of its colour, in the order in which layers first run them; the ends have none."""
    order = dict.fromkeys(r.name for _, r in plan.sequence())
    inner = [n for n in order if plan.regions[n].role in ("mixer", "ffn")]
    return {n: f"k{inner.index(n) % KINDS}" if n in inner else "k-end" for n in order}


def columns(plan: Plan) -> dict[str, list]:
    """The schedule's columns folded into runs: mixer, ffn."""
    mixers, ffns = zip(*plan.graph.layers)
    return {"mixer": nest(fold(mixers)), "ffn": nest(fold(ffns))}


def nest(items: tuple) -> list:
    """`Times` as {count, body} and names, for the template's recursion."""
    return [{"count": x.count, "body": nest(x.body)} if isinstance(x, Times) else {"count": 0, "name": x or "–"} for x in items]


def script(data: dict) -> Markup:
    """JSON that may stand inside a script element."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
