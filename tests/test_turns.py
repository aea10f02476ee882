"""Several blocks of a matrix in one turn of its loop: which the planner takes, and that each is used once and its slot refilled in order."""
from __future__ import annotations

import re
from dataclasses import replace

import pytest
from conftest import plan_of

from mkgen.check import check_plan
from mkgen.emit.module import module_files
from mkgen.graph.build import build_graph
from mkgen.plan.layout import layout_hash
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Loop, Start, Step, streamed, walk
from mkgen.plan.tape import Part, plan_matrix, seconds
from mkgen.spec.load import load_spec
from mkgen.targets import load_target

CHIP = load_target("tpu7x")


def matrix(k: int, n: int, unroll: int, turn: int | None = None):
    m, why = plan_matrix("x", (Part("w", n),), k, False, 4096, CHIP, unroll=unroll)
    return (m if turn is None else replace(m, turn=turn)), why


@pytest.mark.parametrize("turn", range(1, 8))
def test_every_block_is_used_once_and_the_first_slots_are_refilled(turn):
    m, _ = matrix(4096, 3200, 1, turn)
    for filled in range(m.blocks + 1):
        seen, refills = [], []
        for first, turns, size, refilled in m.loops(filled):
            assert turns > 0 and 0 <= refilled <= size
            for i in range(turns):
                seen += [first + i * size + chunk for chunk in range(size)]
                refills += [chunk < refilled for chunk in range(size)]
        assert seen == list(range(m.blocks)) and refills == [block < filled for block in range(m.blocks)]


def test_a_turn_takes_half_of_the_ring_at_most_and_saves_drains():
    alone, _ = matrix(7168, 1536, 1)
    several, why = matrix(7168, 1536, 7)
    assert alone.turn == 1 and 1 < several.turn <= 7 and f" {several.turn} a turn," in why
    assert several.rows == alone.rows
    of = lambda m: seconds(m, CHIP, 8, 1)
    drains = CHIP.mxu_drain_cycles * (several.blocks - -(-several.blocks // several.turn)) / CHIP.clock_hz
    assert of(replace(several, turn=1))[1] - of(several)[1] == pytest.approx(drains)


def test_the_printed_loop_is_the_planned_one():
    """Calls of `stream` with their turns and refills, against the region; the checker walks the same nodes."""
    plan = plan_of("kimi_k3")
    assert check_plan(plan) == []
    text = module_files(plan)["kernel.py"]
    called = re.findall(r"stream\(m, g, range\((?:(\d+), )?(\d+)\), (\w+)(?:, turn=(\d+))?(?:, refills=(\d+))?\)", text)
    printed = [(name, int(a or 0), int(b), int(turn or 1), int(refills or turn or 1)) for a, b, name, turn, refills in called]
    wanted = []
    for region in plan.regions.values():
        for n in walk(region.body):
            if isinstance(n, Loop) and (s := streamed(n)):
                wanted.append((n.name, s.first, s.first + s.turns * s.turn, s.turn, s.refills))
                assert sum(isinstance(x, Start) for x in n.body) == s.refills and sum(isinstance(x, Step) for x in n.body) == s.turn
    assert sorted(printed) == sorted(wanted) and any(turn > 1 for *_, turn, _ in wanted) and any(not r for *_, r in wanted)


@pytest.mark.parametrize("k, n, pushes", [(7168, 16, 112), (7168, 112, 784), (3584, 224, 784), (7168, 128, 448)])
def test_the_time_of_a_block_is_that_of_its_pushes(k, n, pushes):
    """Cycles of two MXUs, as the compiler's listings have them: with K on the lanes each push of 16 columns takes twice as long."""
    m, _ = matrix(k, n, 1)
    assert m.blocks == 1
    assert seconds(m, CHIP, 8, 1)[1] * CHIP.clock_hz == pytest.approx(pushes + CHIP.mxu_drain_cycles, abs=25)


@pytest.mark.parametrize("name", ["kimi_k3", "gpt_oss_20b", "qwen3_8_27b"])
def test_packed_weights_do_not_depend_on_the_ring(name):
    """However many blocks the ring or `unroll` lets a turn have, the tape is the same."""
    def planned(depth, unroll):
        s = load_spec(f"model_specs/{name}.yaml", sets=[f"build.ring_depth={depth}", f"build.unroll={unroll}"])
        return make_plan(s, build_graph(s), CHIP)

    plans = [planned(depth, 8) for depth in (3, 4, 6, 9, 14)]
    rolled = planned(14, 1)
    assert len({layout_hash(p) for p in (*plans, rolled)}) == 1 and {m.turn for m in rolled.matrices.values()} == {1}
    assert len({tuple(m.turn for m in p.matrices.values()) for p in plans}) > 1
    assert all(m.turn <= -(-p.ring_depth // 2) for p in plans for m in p.matrices.values())


def test_code_that_runs_once_is_short_where_that_takes_no_time():
    """Blocks that come more slowly than they are multiplied leave nothing to save; those that come faster do, however often they run."""
    def turn(n, **given):
        return plan_matrix("x", (Part("w", n),), 1024, False, 4096, CHIP, unroll=4, **given)[0].turn
    assert turn(8192) > 1 and turn(8192, once=True) == 1
    slow = plan_matrix("x", (Part("w", 8192),), 1024, False, 4096, replace(CHIP, hbm_bytes_per_s=8 * CHIP.hbm_bytes_per_s), unroll=4, once=True)[0]
    assert slow.turn > 1


@pytest.mark.parametrize("name, once", [("kimi_k3", {"begin", "dense", "end"}), ("qwen3_8_27b", {"begin", "end"})])
def test_the_graph_says_how_often_a_sublayer_runs(name, once):
    graph = build_graph(load_spec(f"model_specs/{name}.yaml"))
    runs = {sub.name: graph.runs(sub) for sub in graph.sublayers()}
    assert {n for n, count in runs.items() if count == 1} == once
    assert sum(runs.values()) == 2 + sum(kind is not None for layer in graph.layers for kind in layer)
