"""The report's page and the trace: nothing from outside, every buffer, the plan's own numbers, and events by the format's rules."""
from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser

import pytest
from click.testing import CliRunner

from conftest import ROOT, plan_of
from mkgen.check.findings import Finding
from mkgen.check.rules import RULES
from mkgen.cli import main
from mkgen.plan.figures import figures
from mkgen.plan.regions import Step, walk
from mkgen.profile.compiling import NotProfiled
from mkgen.show import look
from mkgen.show import trace as events
from mkgen.show.report import budget, experts, traffic
from mkgen.show.report.exchanges import exchanges
from mkgen.show.report.forecast import Change, Forecast
from mkgen.show.report.graphs import drawings
from mkgen.show.report.lanes import bars, layer_bands, memory_busy
from mkgen.show.report.lives import vmem
from mkgen.show.report.needs import NEVER, needs
from mkgen.show.report.page import page
from synthetic import step, timeline

KIMI, QWEN = (str(ROOT / "model_specs" / f"{name}.yaml") for name in ("kimi_k3", "qwen3_30b_a3b"))


class Page(HTMLParser):
    """Elements with their attributes, text by element, and whether every element is closed."""

    VOID = {"meta", "col", "br", "input", "link", "img"}

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))

    def ids(self) -> set[str]:
        return {a["id"] for _, a in self.tags if "id" in a}

    def text(self) -> str:
        return " ".join(" ".join(d for tag, d in self.texts if tag not in ("script", "style")).split())


@pytest.fixture(scope="module")
def kimi():
    """(plan, timeline of 1 row, page)"""
    plan = plan_of("kimi_k3")
    made = timeline(plan, 1)
    told = Forecast(made, made.seconds * 1e3, 1.25, "for a test", (Change("something else", 0.987), Change("another", 0.0, "no room for it")), ("A note.",),
                    needed=needs(step(plan, 1), made, plan.target))
    return plan, made, page(plan, 1, [], told)


@pytest.fixture(scope="module")
def data(kimi):
    found = re.search(r'<script type="application/json" id="spans">(.*?)</script>', kimi[2], re.S)
    return json.loads(found[1])


# -- the page as a file ------------------------------------------------------------------------------------------------


def test_the_page_is_whole_and_asks_for_nothing_from_outside(kimi):
    html = kimi[2]
    parsed = Page(html)
    assert not re.search(r"(https?:)?//[\w.-]+\.\w{2,}", html), "an address of the network"
    assert not re.search(r"@import|@font-face|url\(|\bfetch\(|XMLHttpRequest|import\(", html)
    for tag, attrs in parsed.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed") and not {"src", "srcset", "xlink:href"} & set(attrs), (tag, attrs)
        assert not attrs.get("href") or attrs["href"].startswith("#") and attrs["href"][1:] in parsed.ids(), attrs
    assert len(html) < 5e6


def test_what_the_script_looks_for_is_there(kimi):
    wanted = set(re.findall(r'getElementById\("([\w-]+)"\)', kimi[2]))
    assert {"spans", "lanes", "overview"} <= wanted <= Page(kimi[2]).ids()


def test_text_of_a_plan_cannot_break_the_page():
    plan = plan_of("qwen3_30b_a3b")
    finding = Finding("<b>rule", "</script>", "a & b", "<img>")
    html = page(plan, 1, [finding], None, "</p><script>")
    text = Page(html).text()
    assert "<b>rule" in text and "</script>" in text and "</p><script>" in text and "<img>" in text


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, rows", [("kimi_k3", 1), ("kimi_k3", 8), ("qwen3_30b_a3b", 8), ("gpt_oss_120b", 1)])
def test_every_buffer_is_there_with_its_bytes(name, rows):
    plan = plan_of(name)
    parsed = Page(page(plan, rows, [], None, "not asked for"))
    text, found = parsed.text(), vmem(plan, rows)
    assert {x.name: x.bytes for x in found.lives} == plan.vmem(rows)
    for x in found.lives:
        assert f"{x.name} {x.type} {x.bytes:,}" in text, x.name
    assert found.planned == sum(plan.vmem(rows).values()) == figures(plan, rows)["planned_vmem_bytes"]
    assert found.budget == plan.target.vmem_usable_bytes - plan.spec.build.spill_kib * 1024
    assert "not asked for" in text and "tokens/s" not in text, "no speed without a prediction"


@pytest.mark.parametrize("rows", [1, 8])
def test_bytes_are_those_of_the_plan(kimi, rows):
    plan, told = kimi[0], figures(kimi[0], rows)
    lines = traffic.per_family(plan, rows)
    assert round(sum(f.bytes.copied for f in lines)) == told["streamed_bytes_per_step"]
    assert round(sum(f.bytes.true for f in lines)) == told["true_bytes_per_step"]
    assert round(sum(f.bytes.replicated for f in lines)) == told["replicated_bytes"]
    assert sum(b for _, b, _ in traffic.held(plan, rows)) == told["bytes_per_core"]
    for region in plan.regions.values():
        pieces = traffic.tape_of(region)
        assert sum(p.bytes for p in pieces) == region.rows * 512 and sum(p.chunks for p in pieces) == len(region.chunks)
    assert f"{sum(f.bytes.copied for f in lines) / 1e6:,.1f}" in Page(page(plan, rows, [], None, "-")).text()


def test_the_speed_stands_beside_the_verdict(kimi):
    plan, made, html = kimi
    text = Page(html).text()
    ms = made.seconds * 1e3
    assert f"Predicted step {ms:.3f} ms {1e3 / ms:,.0f} tokens/s (checker: pass)" in text
    assert "Floor 1.250 ms" in text and f"something else 0.987 {1e3 * (ms - 0.987):.1f}" in text and "A note." in text and "another no room for it" in text
    refused = Page(page(plan, 1, [Finding("flight", "moe", "a slot is late", "it is read")], Forecast(made, ms, 1.25, "x"))).text()
    assert all(f"{name} {0 if name != 'flight' else 1} {why}" in refused for name, why in RULES.items())
    assert "tokens/s of a plan that is refused" in refused and "a slot is late" in refused and "✗ fail" in refused and "checker: pass" not in refused


def test_the_budget_adds_up_to_the_step(kimi):
    plan, made, html = kimi
    assert sum(p.seconds for p in budget.whole(made)) == pytest.approx(made.seconds, rel=1e-9)
    rows = budget.by_region(plan, made)
    assert sum(r.seconds for r in rows) == pytest.approx(made.seconds, rel=1e-9)
    assert sum(r.bytes for r in rows) == made.hbm_bytes
    text = Page(html).text()
    for r in rows:
        assert f"{r.name} {r.runs} {r.seconds / r.runs * 1e6:,.1f} {r.seconds * 1e3:,.3f}" in text
    for p in budget.whole(made):
        assert f"{p.seconds * 1e6:,.1f} µs" in text


# -- lives -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi_k3", "qwen3_30b_a3b", "gpt_oss_120b"])
def test_a_buffer_lives_wherever_a_step_reads_or_writes_it(name):
    plan = plan_of(name)
    found = vmem(plan, 1)
    live = {(region, op): {x.name for x in found.lives if x.live[i]} for i, (region, op) in enumerate(found.places)}
    together = {}
    for i, key in enumerate(found.places):           # an op may have several places: it has what any of them has
        together.setdefault(key, set()).update(x.name for x in found.lives if x.live[i])
    for region in plan.regions.values():
        for n in (n for n in walk(region.body) if isinstance(n, Step)):
            touched = {b for b in (*n.reads, *n.writes) if plan.buffers.get(b) and plan.buffers[b].space in ("vmem", "out")}
            assert touched <= together[region.name, n.op], (region.name, n.op)
    assert live and found.peak == max(found.totals) <= found.planned
    assert all(sum(x.bytes for x in found.lives if x.live[i]) == t for i, t in enumerate(found.totals))


def test_lives_end_where_the_value_does(kimi):
    found = vmem(kimi[0], 1)
    at = {x.name: {found.places[i] for i, on in enumerate(x.live) if on} for x in found.lives}
    everywhere = set(found.places)
    assert at["ring"] == everywhere
    assert {r for r, _ in at["expert_slot"]} == {"moe"} and {r for r, _ in at["cache_tiles"]} == {"mla"}
    assert {r for r, _ in at["running"]} >= {"kda", "mla", "moe", "dense"}, "the residual stream is carried"
    assert {r for r, _ in at["logits"]} == {"end"} and {r for r, _ in at["kv_a_whole"]} == {"mla"}
    assert ("moe", "ffn_mixture") in at["h"] and ("moe", "moe.add") not in at["h"], "not read after the shared experts"


# -- graph, exchanges, experts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["kimi_k3", "qwen3_30b_a3b", "gpt_oss_120b", "nemotron3_nano_30b_a3b"])
def test_every_op_has_a_box_of_its_own(name):
    plan = plan_of(name)
    subs = {s.name: s for s in plan.graph.sublayers()}
    found = exchanges(plan, 1)
    for d in drawings(plan, 1, found):
        assert {x for b in d.boxes for x in b.exchanges} == {x for x in found if x.region == d.name}
        boxes = [b for b in d.boxes if b.kind != "carried"]
        assert len(boxes) == len(subs[d.name].ops)
        for i, a in enumerate(d.boxes):
            assert 0 <= a.x and a.x + 120 <= d.width and 0 <= a.y and a.y + 40 <= d.height
            assert not any(abs(a.x - b.x) < 120 and abs(a.y - b.y) < 40 for b in d.boxes[:i]), f"{a.name} lies on another box"
        if any(b.kind == "carried" for b in d.boxes):
            assert any(e.carried for e in d.edges)


def test_exchanges_are_the_plan_s(kimi):
    from mkgen.show.nest import collectives
    plan = kimi[0]
    for rows in (1, 8):
        found = exchanges(plan, rows)
        phases = {(x.region, x.runs): sum(len(y.phases) for y in found if y.region == x.region) for x in found}
        counted = {}
        for (region, *_), (count, layers) in collectives(plan).items():
            counted[region, layers] = counted.get((region, layers), 0) + count
        assert phases == counted
        ops = {op.name for s in plan.graph.sublayers() for op in s.ops}
        assert all(set(x.after) <= ops and x.after and x.seconds > 0 for x in found)
    eight, one = (sum(p.message_bytes for x in exchanges(plan, n) for p in x.phases) for n in (8, 1))
    assert eight == 8 * one


def test_the_busiest_group_has_more_than_the_mean(kimi):
    plan = kimi[0]
    one, eight = (experts.imbalance(plan, plan.experts[0], rows) for rows in (1, 8))
    assert one.mean == pytest.approx(4.0) and one.groups == 4
    assert 6.0 < one.busiest < 6.3, "of 16 experts in 4 groups"
    assert eight.busiest > eight.mean and sum(s for _, s in eight.share) == pytest.approx(1.0)
    assert experts.imbalance(plan, plan.experts[0], 1) == one, "a fixed seed"


# -- the timeline on the page ------------------------------------------------------------------------------------------


def test_the_canvas_has_every_span(kimi, data):
    plan, made, _ = kimi
    assert len({len(data[k]) for k in "bdtglwornysef"}) == 1 and len(data["b"]) == len(made.spans)
    assert all(b >= 0 for b in data["b"][1:]) and all(d >= 0 for d in data["d"])
    spans = sorted(made.spans, key=lambda s: (s.begin, s.end))
    for i in range(0, len(spans), 97):
        s = spans[i]
        assert data["tracks"][data["t"][i]] == s.track and data["ops"][data["o"][i]] == s.where.op and data["y"][i] == s.bytes
        assert sum(data["b"][:i + 1]) == round(s.begin * 1e9) and data["n"][i] == (-1 if s.where.layer is None else s.where.layer)
    assert data["end"] == round(made.seconds * 1e9)


def test_windows_show_a_turn_and_its_back_edge(kimi, data):
    plan = kimi[0]
    kinds = {" + ".join(k for k in kind if k) for kind in plan.graph.layers}
    assert {w["label"] for w in data["windows"]} == kinds
    layers = {layer: (b, e) for b, e, layer, r in data["bands"] if layer >= 0}
    for w in data["windows"]:
        assert w["b"] < layers[w["layer"]][1] and w["e"] >= layers.get(w["layer"] + 1, layers[w["layer"]])[1]


def test_lanes_never_overlap_and_waits_know_their_end(kimi):
    plan, made, _ = kimi
    last, drawn = {}, bars(made, needs(step(plan, 1), made, plan.target))
    for b in drawn:
        key = (b.group, b.lane)
        assert round(last.get(key, 0) * 1e9) <= round(b.span.begin * 1e9)
        last[key] = b.until
    waits = [b for b in drawn if b.span.track == "wait" and b.span.what != "drain"]
    assert waits and all(b.ended >= 0 for b in waits)
    assert all(abs(drawn[b.ended].span.end - b.span.end) < 2e-9 for b in waits)
    stretches = memory_busy(made, kimi[0].target.dma_latency_s)
    assert sum(b - a for a, b in stretches) == pytest.approx(made.hbm_busy, rel=1e-4), "served without a pause while copies are there"
    assert all(a[1] < b[0] for a, b in zip(stretches, stretches[1:]))
    bands = layer_bands(made)
    assert [b[2:] for b in bands if b[2] is not None] == [(n, k) for n, pair in enumerate(kimi[0].graph.layers) for k in pair if k]


def test_a_copy_is_needed_where_its_wait_stands(kimi):
    """Held against the replay: a wait for a stream begins when the copy is needed, and a copy in time has no wait."""
    plan, made, _ = kimi
    wanted = needs(step(plan, 1), made, plan.target)
    copies = made.track("hbm")
    assert len(wanted) == len(copies)
    late = sorted((n, s.end) for n, s in zip(wanted, copies) if n != NEVER and s.end - n > 1e-9)
    waits = sorted((s.begin, s.end) for s in made.track("wait") if s.what not in ("exchange", "drain"))
    assert late and [t for pair in late for t in pair] == pytest.approx([t for pair in waits for t in pair], abs=1e-9)
    assert all(n >= s.begin for n, s in zip(wanted, copies) if n != NEVER)
    ring = [b for b in bars(made, wanted) if b.group == "hbm tape"]
    assert max(b.lane for b in ring) + 1 == plan.ring_depth, "a lane a slot: all are taken at once, never more"
    with pytest.raises(ValueError):
        needs(step(plan, 1)[:100], made, plan.target)


def test_live_bytes_follow_the_core(kimi, data):
    plan = kimi[0]
    found = vmem(plan, 1)
    times, values = data["live"]
    assert times == sorted(times) and set(values) <= set(found.totals) and max(values) == found.peak
    at = dict(zip(found.places, found.totals))
    spans = sorted((s for s in kimi[1].spans if s.track == "core" and s.where.op in ("moe.experts", "kda.recurrence")), key=lambda s: s.begin)
    for s in spans[::37]:
        now = values[max(i for i, t in enumerate(times) if t <= round(s.begin * 1e9))]
        assert now <= at[s.where.region, s.where.op] or s.where.op == "moe.experts"
        assert s.where.op != "moe.experts" or now > at["kda", "kda.recurrence"], "the slots of experts are taken"


# -- the trace ---------------------------------------------------------------------------------------------------------


def check_events(made: dict) -> None:
    """The rules of the trace event format for the phases that are used: M, X, s, f, C."""
    assert json.loads(json.dumps(made)) == made and made["displayTimeUnit"] in ("ms", "ns")
    slices, flows, named, last = {}, {}, set(), 0.0
    for e in made["traceEvents"]:
        assert {"ph", "name", "pid", "tid", "ts"} <= set(e) and isinstance(e["name"], str) and isinstance(e["pid"], int) and isinstance(e["tid"], int)
        assert isinstance(e["ts"], (int, float)) and e["ts"] >= 0
        if e["ph"] == "M":
            assert e["name"] in ("process_name", "thread_name", "thread_sort_index") and e["args"]
            named.add((e["name"], e["tid"]))
            continue
        assert e["ts"] >= last, "in order of time"
        last = e["ts"]
        if e["ph"] == "X":
            assert e["dur"] >= 0 and ("thread_name", e["tid"]) in named and isinstance(e["args"], dict)
            slices.setdefault(e["tid"], []).append((e["ts"], e["ts"] + e["dur"]))
        elif e["ph"] in "sf":
            flows.setdefault((e["cat"], e["name"], e["id"]), {})[e["ph"]] = e
        else:
            assert e["ph"] == "C" and all(isinstance(v, (int, float)) and v >= 0 for v in e["args"].values())
    for tid, found in slices.items():
        for (_, a), (b, _) in zip(found, found[1:]):
            assert a <= b + 1e-6, f"slices of thread {tid} overlap at {b}"
    for key, ends in flows.items():
        assert set(ends) == {"s", "f"} and ends["s"]["ts"] <= ends["f"]["ts"] and ends["f"]["bp"] == "e", key
        for e in ends.values():
            assert any(a <= e["ts"] <= b for a, b in slices[e["tid"]]), f"{key} is tied to no slice"


def test_the_trace_keeps_the_format_s_rules(kimi):
    plan, made, _ = kimi
    wanted = needs(step(plan, 1), made, plan.target)
    told = events.trace(plan, 1, made, {"verdict of the checker": "pass"}, wanted)
    check_events(told)
    found = [e for e in told["traceEvents"] if e["ph"] == "X" and e["cat"] != "layer"]
    assert len(found) == len(made.spans)
    assert sum(e["args"].get("bytes", 0) for e in found if e["cat"] == "hbm") == made.hbm_bytes
    core = sum(e["dur"] for e in found if e["cat"] in ("core", "wait", "pause"))
    assert core == pytest.approx(made.seconds * 1e6, abs=1e-3 * len(found))
    flows = sum(e["ph"] == "s" for e in told["traceEvents"])
    phases = sum(e["cat"] == "wait" and "exchange" in e["name"] for e in found)
    assert flows == phases + sum(n != NEVER for n in wanted), "an arrow for every copy that is waited for, and every phase"
    last = [e for e in told["traceEvents"] if e["ph"] == "C"][-1]
    assert set(last["args"].values()) == {0}, "at the end nothing is under way"


@pytest.mark.parametrize("damage", [
    lambda es: es[-1].update(ts=-1),
    lambda es: next(e for e in es if e["ph"] == "X").pop("dur"),
    lambda es: es.remove(next(e for e in es if e["ph"] == "f")),
    lambda es: next(e for e in es if e["ph"] == "X" and e["cat"] == "core").update(dur=1e6),
    lambda es: next(e for e in es if e["ph"] == "X").update(tid=9999),
])
def test_the_rules_find_damage(kimi, damage):
    told = events.trace(kimi[0], 1, kimi[1], {})
    damage(told["traceEvents"])
    with pytest.raises((AssertionError, KeyError)):
        check_events(told)


# -- the commands ------------------------------------------------------------------------------------------------------


@pytest.fixture
def predicted(monkeypatch):
    def forecast(plan, rows, **terms):
        made = timeline(plan, rows)
        return Forecast(made, made.seconds * 1e3, 0.5, "for a test")
    monkeypatch.setattr(look, "forecast", forecast)


def test_the_commands_write_what_they_say(predicted, tmp_path):
    run = CliRunner().invoke
    out = tmp_path / "deep" / "page.html"
    done = run(main, ["report", QWEN, "--rows", "8", "-o", str(out), "--json"])
    told = json.loads(done.stdout)
    assert done.exit_code == 0 and told["verdict"] == "pass" and told["rows"] == 8 and told["bytes"] == out.stat().st_size
    assert f"{told['predicted_ms']:.3f} ms" in Page(out.read_text(encoding="utf-8")).text()
    zipped = tmp_path / "step.json.gz"
    done = run(main, ["trace", QWEN, "-o", str(zipped)])
    assert done.exit_code == 0 and "verdict of the checker: pass" in done.stdout and "predicted" in done.stdout
    made = json.loads(gzip.decompress(zipped.read_bytes()))
    check_events(made)
    assert made["otherData"]["verdict of the checker"] == "pass" and made["otherData"]["rows"] == 1


def test_without_a_profile_the_page_says_so_and_a_trace_is_refused(monkeypatch, tmp_path):
    def forecast(plan, rows, **terms):
        raise NotProfiled("piece 7: the compiler says no")
    monkeypatch.setattr(look, "forecast", forecast)
    done = CliRunner().invoke(main, ["report", QWEN, "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 0 and "no prediction: piece 7" in done.stdout
    text = Page((tmp_path / "x.html").read_text(encoding="utf-8")).text()
    assert "piece 7: the compiler says no" in text and "tokens/s" not in text and "ring" in text
    done = CliRunner().invoke(main, ["trace", QWEN, "-o", str(tmp_path / "x.json")])
    assert done.exit_code == 2 and "piece 7" in done.stderr and not (tmp_path / "x.json").exists()


def test_a_context_that_the_plan_does_not_have_is_wrong_input(tmp_path):
    done = CliRunner().invoke(main, ["report", QWEN, "--at", "99999", "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 2 and "99999" in done.stderr and not (tmp_path / "x.html").exists()


def test_a_refused_plan_is_shown_and_is_no_success(predicted, monkeypatch, tmp_path):
    monkeypatch.setattr(look, "check_plan", lambda plan: [Finding("ring", "moe", "a slot is late", "it is read")])
    done = CliRunner().invoke(main, ["report", QWEN, "-o", str(tmp_path / "x.html")])
    assert done.exit_code == 1 and "verdict of the checker: fail" in done.stdout
    assert "a slot is late" in Page((tmp_path / "x.html").read_text(encoding="utf-8")).text()
