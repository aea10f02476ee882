"""A timeline as trace events (the JSON format of Chrome's tracing, which Perfetto reads): `mkgen trace`.

Core, layers, links and each stream of HBM copies are threads; copies that overlap lie on threads of their own, so that the
slices of one thread never do. A flow arrow goes from the start of a copy to where the core wants it, and from that of an
exchange's phase to the wait that it ended. Counters: bytes under way by stream. Times are microseconds.
"""
from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from pathlib import Path
from typing import Any

from mkgen.plan.plan import Plan
from mkgen.show.report.lanes import Bar, bars, layer_bands, tick
from mkgen.simulate.timeline import Timeline

PID = 1
LAYERS = "layers"
COLOURS = {"core": "thread_state_running", "wait": "thread_state_iowait", "pause": "grey"}      # names that both viewers know


def write(path: Path, plan: Plan, rows: int, timeline: Timeline, told: dict[str, Any], needed: tuple[float, ...] = ()) -> int:
    """Writes the file, compressed where its name ends in .gz; gives the number of events. told: what the head says besides."""
    made = trace(plan, rows, timeline, told, needed)
    text = json.dumps(made, separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return len(made["traceEvents"])


def trace(plan: Plan, rows: int, timeline: Timeline, told: dict[str, Any], needed: tuple[float, ...] = ()) -> dict[str, Any]:
    """The object of the format: events in order of time, behind those that name processes and threads."""
    drawn = bars(timeline, needed)
    threads = thread_ids(drawn)
    events: list[dict[str, Any]] = []
    for begin, end, layer, region in layer_bands(timeline):
        events.append(slice_(name_of(layer, region), "layer", begin, end, 0, {"layer": layer, "sub-layer": region}))
    for bar in drawn:
        events += bar_events(bar, threads)
    events += arrows(drawn, threads) + counters(drawn)
    events.sort(key=lambda e: (e["ts"], -e.get("dur", 0.0)))
    return {"traceEvents": names(plan, rows, threads) + events, "displayTimeUnit": "ns",
            "otherData": {"model": plan.spec.model.name, "chip": plan.target.name, "ranks": plan.mesh.ranks, "rows": rows,
                          "context": plan.spec.build.context, **told}}


def name_of(layer: int | None, region: str) -> str:
    return region if layer is None else f"{layer} {region}"


def thread_ids(drawn: list[Bar]) -> dict[tuple[str, int], int]:
    """(group, lane) -> thread id: the core, the links, then the streams by name; 0 is for the layers."""
    groups = sorted({b.group for b in drawn}, key=lambda g: (g != "core", g != "link", g))
    lanes = {g: 1 + max(b.lane for b in drawn if b.group == g) for g in groups}
    order = [(g, lane) for g in groups for lane in range(lanes[g])]
    return {key: 1 + i for i, key in enumerate(order)}


def names(plan: Plan, rows: int, threads: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """Metadata: what the process and its threads are called, and in which order they stand."""
    out = [meta("process_name", 0, {"name": f"{plan.spec.model.name}, one core of {plan.mesh.ranks}, {rows} row{'s' * (rows != 1)}"})]
    lanes = {group: max(lane for g, lane in threads if g == group) for group, _ in threads}
    for (group, lane), tid in {(LAYERS, 0): 0, **threads}.items():
        out.append(meta("thread_name", tid, {"name": group if not lanes.get(group) else f"{group} {lane}"}))
        out.append(meta("thread_sort_index", tid, {"sort_index": tid}))
    return out


def meta(name: str, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": PID, "tid": tid, "ts": 0, "args": args}


def slice_(name: str, category: str, begin: float, end: float, tid: int, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    at = stamp(begin)
    return {"ph": "X", "name": name, "cat": category, "ts": at, "dur": round(stamp(end) - at, 3), "pid": PID, "tid": tid, "args": args, **more}


def stamp(seconds: float) -> float:
    """Whole nanoseconds, in microseconds."""
    return tick(seconds) / 1e3


def bar_events(bar: Bar, threads: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """The slice of a span."""
    s, tid = bar.span, threads[bar.group, bar.lane]
    args: dict[str, Any] = {"op": s.where.op, "sub-layer": s.where.region, "layer": s.where.layer}
    if s.bytes:
        args["bytes"] = s.bytes
    if s.track == "hbm":
        args["memory alone, us"] = stamp(s.served)
        if bar.needed >= 0:
            args["arrives before it is needed, us"] = stamp(bar.needed - s.end)
    title = {"core": s.what, "wait": f"wait for {s.what}", "pause": s.what, "hbm": f"{s.what} {s.where.op}"}.get(s.track, f"exchange {s.what} {s.where.op}")
    more = {"cname": COLOURS[s.track]} if s.track in COLOURS else {}
    return [slice_(title, s.track, s.begin, s.end, tid, args, **more)]


def arrows(drawn: list[Bar], threads: dict[tuple[str, int], int]) -> list[dict[str, Any]]:
    """From each copy to the slice in which the core comes to its wait, from each phase of an exchange to the wait that it ended."""
    core = [b for b in drawn if b.group == "core"]
    at = [tick(b.span.begin) for b in core]
    ends: list[tuple[int, Bar, Bar]] = [(i, drawn[b.ended], b) for i, b in enumerate(drawn) if b.ended >= 0]
    tied = {id(cause) for _, cause, _ in ends}
    for i, b in enumerate(drawn):
        if b.needed >= 0 and id(b) not in tied:
            ends.append((i, b, core[max(0, bisect_right(at, tick(b.needed)) - 1)]))
    out = []
    for i, cause, effect in ends:
        shared = {"name": "arrives", "cat": "flow", "id": i, "pid": PID}
        when = max(effect.span.begin, min(cause.needed, effect.span.end)) if cause.needed >= 0 else effect.span.begin
        out.append({"ph": "s", "ts": stamp(cause.span.begin), "tid": threads[cause.group, cause.lane], **shared})
        out.append({"ph": "f", "bp": "e", "ts": stamp(when), "tid": threads[effect.group, effect.lane], **shared})
    return out


def counters(drawn: list[Bar]) -> list[dict[str, Any]]:
    """Bytes of the copies under way, whenever they change."""
    marks: dict[float, dict[str, int]] = {}
    for b in drawn:
        if b.span.track == "hbm":
            for at, sign in ((b.span.begin, 1), (b.span.end, -1)):
                now = marks.setdefault(stamp(at), {})
                now[b.span.what] = now.get(b.span.what, 0) + sign * b.span.bytes
    sums = {b.span.what: 0 for b in drawn if b.span.track == "hbm"}
    out = []
    for at in sorted(marks):
        sums = {k: v + marks[at].get(k, 0) for k, v in sums.items()}
        out.append({"ph": "C", "name": "HBM bytes under way", "ts": at, "pid": PID, "tid": 0, "args": sums})
    return out
