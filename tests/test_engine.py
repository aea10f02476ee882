"""The replay against cases that are worked out by hand, and against what must hold for any events."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from mkgen.errors import MkgenError
from mkgen.simulate.engine import replay
from mkgen.simulate.events import Await, Fetch, Pause, Receive, Send, Where, Work
from mkgen.targets import load_target
from mkgen.targets.exchange import phase, phase_seconds

AT = Where(0, "mixer", "matmul")
# 1 byte a second, 1 cycle a second, no costs but those that a case gives back
PLAIN = replace(load_target("tpu7x"), dma_bytes_per_s=1.0, dma_descriptor_s=0.0, dma_latency_s=0.0, dma_lanes=9, clock_hz=1.0)


def tracks(events, target=PLAIN, **scale):
    """(track, begin, end, what) of everything but copies."""
    return [(s.track, s.begin, s.end, s.what) for s in replay(events, target, **scale).spans if s.track != "hbm"]


def copies(events, target=PLAIN):
    return [(s.begin, s.end, s.served) for s in replay(events, target).track("hbm")]


def test_work_follows_work():
    assert tracks([Work(AT, 3), Pause(AT, 2.0, "dispatch"), Work(AT, 1)]) == [
        ("core", 0, 3, "matmul"),
        ("pause", 3, 5, "dispatch"),
        ("core", 5, 6, "matmul"),
    ]


def test_a_copy_behind_work():
    events = [Fetch(AT, "a", 5, "tape"), Work(AT, 3), Await(AT, "a"), Work(AT, 1)]
    assert tracks(events) == [("core", 0, 3, "matmul"), ("wait", 3, 5, "tape"), ("core", 5, 6, "matmul")]
    assert copies(events) == [(0, 5, 5)]


def test_a_copy_that_is_there_is_not_waited_for():
    assert tracks([Fetch(AT, "a", 2, "tape"), Work(AT, 3), Await(AT, "a"), Work(AT, 1)]) == [
        ("core", 0, 3, "matmul"),
        ("core", 3, 4, "matmul"),
    ]


def test_two_copies_share_the_memory():
    # a alone for 2 s (4 left); then both at half rate: b ends after 4 s with 2 bytes, a has 2 left and ends at 8
    events = [Fetch(AT, "a", 6, "tape"), Work(AT, 2), Fetch(AT, "b", 2, "experts"), Await(AT, "a")]
    assert copies(events) == [(0, 8, 6), (2, 6, 2)]
    assert replay(events, PLAIN).seconds == 8
    # whoever waits for the small one does so for twice its bytes
    assert tracks([*events[:3], Await(AT, "b")])[1] == ("wait", 2, 6, "experts")


def test_a_share_is_a_descriptor():
    # a in two descriptors gets two thirds: both end at 9
    assert copies([Fetch(AT, "a", 6, "tape", descriptors=2), Fetch(AT, "b", 3, "tape")]) == [(0, 9, 6), (0, 9, 3)]


def test_the_last_come_waits_for_a_lane():
    # two lanes: a and b share until b ends at 4, when c gets its lane; a has 4 left, c 1: c ends at 6, a at 9
    events = [Fetch(AT, "a", 6, "tape"), Fetch(AT, "b", 2, "tape"), Fetch(AT, "c", 1, "cache")]
    assert copies(events, replace(PLAIN, dma_lanes=2)) == [(0, 9, 6), (0, 4, 2), (0, 6, 1)]
    assert [end for _, end, _ in copies(events, replace(PLAIN, dma_lanes=1))] == [6, 8, 9]
    assert [end for _, end, _ in copies(events)] == [9, 5, 3]  # a lane for each


def test_descriptors_and_latency():
    target = replace(PLAIN, dma_descriptor_s=0.5, dma_latency_s=10.0)
    events = [Fetch(AT, "a", 5, "tape", descriptors=2), Await(AT, "a")]
    assert copies(events, target) == [(0, 16, 6)]  # 5 bytes, 2 halves, 10 of latency
    assert tracks(events, target) == [("wait", 0, 16, "tape")]


def test_reads_and_writes_share_and_the_step_ends_with_its_writes():
    events = [Fetch(AT, "w", 3, "states", writes=True), Fetch(AT, "r", 3, "tape"), Await(AT, "r"), Work(AT, 1)]
    assert tracks(events) == [("wait", 0, 6, "tape"), ("core", 6, 7, "matmul")]
    assert tracks([Fetch(AT, "w", 3, "states", writes=True), Work(AT, 1)]) == [("core", 0, 1, "matmul"), ("wait", 1, 3, "drain")]


def test_a_key_started_twice_is_waited_for_in_order():
    assert tracks(
        [
            Fetch(AT, "a", 2, "tape"),
            Await(AT, "a"),
            Fetch(AT, "a", 3, "tape"),
            Fetch(AT, "a", 1, "tape"),
            Await(AT, "a"),
            Await(AT, "a"),
        ]
    ) == [("wait", 0, 2, "tape"), ("wait", 2, 6, "tape")]


def test_a_wait_without_a_start():
    with pytest.raises(MkgenError, match="copy 'a'"):
        replay([Await(AT, "a")], PLAIN)
    with pytest.raises(MkgenError, match="exchange 'x'"):
        replay([Receive(AT, "x")], PLAIN)
    with pytest.raises(MkgenError, match="copy 'a'"):
        replay([Fetch(AT, "a", 1, "tape"), Await(AT, "a"), Await(AT, "a")], PLAIN)


LINKS = replace(
    PLAIN,
    cores_per_chip=2,
    sibling_latency_s=7.0,
    sibling_bytes_per_s=2.0,
    exchange_latency_s=10.0,
    exchange_message_s=1.0,
    exchange_further_message_s=0.5,
    exchange_bytes_per_s=1.0,
    link_latency_s=12.0,
    link_bytes_per_s=1.0,
)


def test_an_exchange_by_hand():
    assert phase_seconds(LINKS, 3, 0) == 13.0  # three messages, ten of latency
    assert phase_seconds(LINKS, 4, 0, factors=("chip",)) == 14.0
    assert phase_seconds(LINKS, 1, 8, factors=("core",)) == 7 + 4
    assert phase_seconds(LINKS, 4, 1, factors=("chip", "core")) == 10 + 5  # hypot(4 messages, 3 of their bytes)
    assert phase_seconds(LINKS, 3, 0, latency=2.0) == 24.0  # of the message alone; 20 + 3 otherwise
    assert phase_seconds(LINKS, 3, 0, factors=("host",), host_latency=2.0) == 24.0
    assert phase_seconds(LINKS, 3, 0, factors=("chip",), host_latency=2.0) == 13.0
    assert phase_seconds(LINKS, 1, 0, factors=("chip",)) == 12.0  # a message alone
    assert phase_seconds(LINKS, 31, 0, factors=("host", "chip", "core")) == 10 + 7 + 24 * 0.5
    assert phase_seconds(LINKS, 0, 99) == 0.0
    with pytest.raises(MkgenError, match="'lane'"):
        phase_seconds(LINKS, 3, 0, factors=("lane",))


def test_work_between_send_and_receive():
    events = [Send(AT, "x", ("chip",), 3, 0), Work(AT, 5), Receive(AT, "x"), Work(AT, 1)]
    got = tracks(events, LINKS)
    assert ("link", 0, 13, "chip") in got and ("wait", 5, 13, "exchange") in got and got[-1] == ("core", 13, 14, "matmul")


def test_two_exchanges_share_the_links_but_not_their_latency():
    events = [Send(AT, "x", ("chip",), 3, 0), Send(AT, "y", ("chip",), 3, 0), Receive(AT, "x"), Receive(AT, "y")]
    assert [t for t in tracks(events, LINKS) if t[0] == "wait"] == [("wait", 0, 13, "exchange"), ("wait", 13, 16, "exchange")]


def random_events(seed: int) -> list:
    rng = random.Random(seed)
    events, pending, sent = [], [], []
    for n in range(300):
        kind = rng.choice(("work", "fetch", "fetch", "await", "send", "receive", "pause"))
        if kind == "work":
            events.append(Work(AT, rng.randrange(0, 9000)))
        elif kind == "fetch":
            events.append(
                Fetch(AT, n, rng.randrange(1, 3_000_000), rng.choice(("tape", "experts")), rng.random() < 0.2, rng.randint(1, 5))
            )
            pending.append(n)
        elif kind == "send":
            events.append(
                Send(
                    AT,
                    n,
                    rng.choice((("core",), ("chip",), ("host", "chip", "core"))),
                    rng.choice((1, 3, 7)),
                    rng.randrange(0, 70_000),
                )
            )
            sent.append(n)
        elif kind == "pause":
            events.append(Pause(AT, rng.random() * 1e-6, "dispatch"))
        elif kind == "await" and pending:
            events.append(Await(AT, pending.pop(rng.randrange(len(pending)))))
        elif kind == "receive" and sent:
            events.append(Receive(AT, sent.pop(rng.randrange(len(sent)))))
    return events


@pytest.mark.parametrize("seed", range(12))
def test_what_holds_for_any_events(seed):
    target, events = load_target("tpu7x"), random_events(seed)
    line = replay(events, target)
    at = 0.0
    for span in (s for s in line.spans if s.track in ("core", "wait", "pause")):
        assert span.begin == at and span.end > at  # no gap, no overlap
        at = span.end
    assert at == line.seconds
    fetches = [e for e in events if isinstance(e, Fetch)]
    assert line.hbm_bytes == sum(f.bytes for f in fetches)
    moved = sum(f.bytes for f in fetches) / target.dma_bytes_per_s + sum(f.descriptors for f in fetches) * target.dma_descriptor_s
    assert line.hbm_busy == pytest.approx(moved) and line.hbm_busy <= line.seconds
    assert line.total("core") == pytest.approx(sum(e.cycles for e in events if isinstance(e, Work)) / target.clock_hz)
    for span in line.track("hbm"):
        assert span.seconds >= (span.served + target.dma_latency_s) * (1 - 1e-9) and span.end <= line.seconds * (1 + 1e-12)
    # the memory never serves more than one second a second: at every arrival, what has arrived fits into the time so far
    served = 0.0
    for span in sorted(line.track("hbm"), key=lambda s: s.end):
        served += span.served
        assert served <= (span.end - target.dma_latency_s) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_less_of_anything_is_never_faster(seed):
    target, events = load_target("tpu7x"), random_events(100 + seed)

    def seconds(**scale):
        return replay(events, target, **scale).seconds

    for knob, values in (("hbm", (1.3, 1.0, 0.7)), ("latency", (0.5, 1.0, 2.0)), ("host_latency", (1.0, 1.5, 2.0))):
        took = [seconds(**{knob: v}) for v in values]
        assert took == sorted(took) and took[0] < took[-1], knob


def test_latency_and_links_add_up():
    took = phase(load_target("tpu7x"), 7, 16384, factors=("chip", "core"))
    assert took.seconds == took.latency + took.links == pytest.approx(3.83e-6, rel=0.01)


def test_a_long_step_keeps_the_memory_busy():
    """20,000 events with 40 copies outstanding."""
    events = []
    for n in range(5000):
        events += [Fetch(AT, n, 1_000_000, "tape"), Work(AT, 600)]
        if n >= 40:
            events += [Await(AT, n - 40), Work(AT, 10)]
    line = replay(events, load_target("tpu7x"))
    assert line.hbm_busy / line.seconds > 0.99
