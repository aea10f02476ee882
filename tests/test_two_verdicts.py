"""Damage that interpreting a kernel can show: the checker's verdict and the interpreter's agree, on damaged plans and on sound ones."""

from __future__ import annotations

import json
import pickle
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from queue import Empty, Queue

import damage
import pytest
from damage_batches import ALL
from damage_tools import changed, is_copy, swapped
from small_specs import spec

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Start, Step, Wait
from mkgen.prove.verify import environment
from mkgen.spec.model import Conv, Gqa, Linear, Mlp, Moe
from mkgen.targets import load_target

PATIENCE = 90  # seconds of no news from a kernel that should take a few: it waits for ever


def plan_of(*args, **kwargs) -> Plan:
    made = spec(*args, **kwargs)
    return make_plan(made, build_graph(made), load_target(made.build.chip))


def attention() -> Plan:
    """One rank: a cache with a ring of tiles, a streamed MLP, several chunks in flight."""
    return plan_of(
        1,
        {"a": Gqa(2, 1, 32)},
        {"f": Mlp(160)},
        "a",
        "f",
        hidden=128,
        rows=(2,),
        block_kib=48,
        kv_slots=2,
        ends={"vocab": 700},
    )


def experts() -> Plan:
    """Two ranks: exchanges, more experts than slots, a recurrence with its states."""
    return plan_of(
        2,
        {"a": Linear(2, 16, 16, conv=Conv(3))},
        {"f": Moe(8, 3, 32)},
        "a",
        "f",
        hidden=128,
        rows=(3,),
        block_kib=48,
        ends={"vocab": 700},
    )


def batches() -> Plan:
    """One rank: up to six experts in batches of two, the last one part full or not, more of them than the three slots."""
    return plan_of(
        1,
        {"a": Gqa(2, 1, 32)},
        {"f": Moe(8, 3, 32)},
        "a",
        "f",
        hidden=128,
        rows=(2,),
        block_kib=48,
        expert_batch=2,
        expert_slots=3,
        first_experts=1,
        ends={"vocab": 700},
    )


def transfer(part: type, suffix: str):
    return lambda n: isinstance(n, part) and n.transfer.endswith(suffix)


def drop(part: type, suffix: str):
    return lambda plan: changed(plan, random.Random(0), transfer(part, suffix), lambda n: ())


def of(kind: str, seed: int = 0):
    return lambda plan: damage.KINDS[kind](plan, random.Random(seed))


def refill_too_early(name: str):
    """A refill in front of the last read of its slot."""
    return lambda plan: swapped(
        plan,
        random.Random(0),
        lambda a, b: (
            isinstance(b, Start)
            and b.transfer == name
            and isinstance(a, Step)
            and bool(set(plan.transfers[name].writes) & {*a.reads})
        ),
    )


def used_too_early(name: str):
    return lambda plan: swapped(
        plan,
        random.Random(0),
        lambda a, b: (
            isinstance(a, Wait)
            and a.transfer.endswith(name)
            and isinstance(b, Step)
            and bool(set(plan.transfers[a.transfer].writes) & {*b.reads})
        ),
    )


def always(suffix: str):
    """A copy's predicate is dropped."""
    return lambda plan: changed(
        plan,
        random.Random(0),
        lambda n: is_copy(n) and n.when is not None and n.transfer.endswith(suffix),
        lambda n: (replace(n, when=None),),
        0,
    )


ATTENTION = {
    "wait of a chunk dropped": drop(Wait, "tape_copy"),
    "missing drain of a write-back": drop(Wait, "word_copy"),
    "wrong slot of the ring": of("one slot too few"),
    "offset shifted": of("offset shifted"),
    "refill before the last read": refill_too_early("tape_copy"),
    "wait for a tile dropped": drop(Wait, "tile_copy"),
    "start doubled": of("start doubled"),
    "state of another layer": of("state of another layer"),
    "start dropped": drop(Start, "tape_copy"),
}
EXPERTS = {
    "exchange dropped": of("exchange dropped"),
    "sum taken twice": of("sum taken twice"),
    "exchange finish dropped": of("exchange finish dropped"),
    "wait for an expert dropped": drop(Wait, "expert_copy"),
    "another expert": of("expert of another number"),
    "used before its wait": used_too_early("window_read"),
    "write-back dropped": drop(Wait, "matrix_write"),
    "step dropped": of("step dropped", 3),
    "refill of an expert dropped": lambda plan: changed(
        plan,
        random.Random(0),
        lambda n: isinstance(n, Start) and n.when is not None and n.transfer.startswith("expert_copy"),
        lambda n: (),
    ),
}


def nth(kind: str, n: int):
    """Of all that a kind of damage to experts lists."""
    return lambda plan: [*ALL[kind](plan)][n]


BATCHES = {
    "wait of a batch's first dropped": nth("copy of one place dropped", 0),
    "wait of a batch's second dropped": nth("copy of one place dropped", 1),
    "start of a batch's first dropped": nth("copy of one place dropped", 2),
    "slot overwritten before its batch": of("refills before their batch"),
    "wait behind its batch": nth("copy of one place moved", 0),
    "refill for the batch behind": nth("batch of another number", 0),
    "batch computed twice": nth("experts computed twice or never", 0),
    "batches never computed": nth("experts computed twice or never", 1),
    "part full batch not computed": nth("other number of batches", 0),
    "first fetched twice": nth("expert loop off by one", 0),
}
CASES = {"attention": (attention, ATTENTION), "experts": (experts, EXPERTS), "batches": (batches, BATCHES)}
QUICK = {"attention": ("wait of a chunk dropped", "missing drain of a write-back", "refill before the last read")}


def interpreted(sound: Plan, plans: dict[str, Plan]) -> dict[str, list[str]]:
    """What running each kernel shows; one that gives no answer waits for ever, and those behind it are run anew."""
    left, found = dict(plans), {}
    while left:
        worker = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("verdict_worker.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(sound.mesh.ranks),
        )
        lines: Queue = Queue()
        threading.Thread(target=lambda out=worker.stdout, q=lines: [*map(q.put, out), q.put(b"")], daemon=True).start()
        worker.stdin.write(pickle.dumps((sound, left)))
        worker.stdin.close()
        running = next(iter(left))
        try:
            while left:
                line = lines.get(timeout=PATIENCE)
                if not line:
                    raise AssertionError(f"the worker ended at {running}")
                running, said = json.loads(line)
                if said != "runs":
                    found[running] = said
                    del left[running]
        except Empty:
            found[running] = ["waits for ever"]
            del left[running]
        finally:
            worker.kill()
            worker.wait()
    return found


def agree(case: str, names) -> None:
    make, kinds = CASES[case]
    sound = make()
    plans = {"sound": sound} | {name: kinds[name](sound) for name in names}
    assert all(plan is not None for plan in plans.values()), [n for n, plan in plans.items() if plan is None]
    shown = interpreted(sound, plans)
    checked = {name: [str(f) for f in check_plan(plan)] for name, plan in plans.items()}
    verdicts = {name: (bool(shown[name]), bool(checked[name])) for name in plans}
    assert verdicts == {name: (name != "sound",) * 2 for name in plans}, (verdicts, shown, checked)


def test_both_verdicts_agree():
    for case, names in QUICK.items():
        agree(case, names)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_both_verdicts_agree_on_all(case):
    agree(case, CASES[case][1])
