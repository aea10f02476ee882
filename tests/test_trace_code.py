"""The trace of the generated code: equal to its plan's expansion, and not so where a template was damaged."""

from __future__ import annotations

import pytest
import random_specs
from jinja2 import ChoiceLoader, DictLoader
from small_specs import spec

from mkgen.check import check_plan
from mkgen.emit import render
from mkgen.graph.build import build_graph
from mkgen.plan.plan import Plan
from mkgen.plan.planner import make_plan
from mkgen.prove.drive import load_kernel
from mkgen.prove.mini import mini_spec
from mkgen.prove.trace_code import check_code
from mkgen.spec.model import Gqa, Mla, Moe
from mkgen.targets import load_target


def small(plan: Plan) -> Plan:
    """The plan of the mini model of the same spec."""
    spec = mini_spec(plan.spec)
    return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


@pytest.fixture(scope="session")
def batches() -> Plan:
    """Two ranks that share all experts: slices narrower than a panel, in batches of two, the slots no whole number of batches."""
    made = spec(
        2,
        {"a": Gqa(2, 1, 32)},
        {"f": Moe(8, 3, 64)},
        "a*2",
        "f*2",
        hidden=512,
        expert_parallel=1,
        tensor_parallel=2,
        expert_batch=2,
        expert_slots=3,
        first_experts=1,
        formats={"experts": "mxfp4"},
        ends={"vocab": 700},
    )
    plan = make_plan(made, build_graph(made), load_target(made.build.chip))
    assert [(image.joint, image.up.parts) for image in plan.experts] == [(True, 2)]
    return plan


@pytest.fixture(scope="session")
def mini() -> Plan:
    """Four ranks, two factors; a cache, routed experts, sums and gathers."""
    made = spec(
        4,
        {"a": Mla(8, kv_rank=128, q_rank=40, nope_dim=32, v_dim=32, rope_dim=16)},
        {"f": Moe(16, 3, 32, latent=96, shared_width=48)},
        "a*2",
        "f*2",
        hidden=128,
        mesh={"chip": 2, "core": 2},
        rows=(3,),
        block_kib=48,
        gather="staged",
        reduce={"rest": "staged", "embedded": "flat"},
        ends={"vocab": 2048},
    )
    return make_plan(made, build_graph(made), load_target(made.build.chip))


def damaged_module(plan: Plan, monkeypatch, template: str | None, old: str, new: str):
    """The module that comes out if one place in a template, or else in what is printed, is other text. The files stay as they are."""
    if template is None:
        whole = render.kernel_text(plan)
        assert whole.count(old) == 1, f"there is not one {old!r}"
        monkeypatch.setattr(render, "kernel_text", lambda _: whole.replace(old, new))
        return load_kernel(plan)
    text = (render.template_dir() / template).read_text(encoding="utf-8")
    assert text.count(old) >= 1, f"{template} has no {old!r}"
    sound = render.environment.__wrapped__       # not the one that all tests of this process share

    def environment():
        env = sound()
        env.loader = ChoiceLoader([DictLoader({template: text.replace(old, new, 1)}), env.loader])
        return env

    monkeypatch.setattr(render, "environment", environment)
    return load_kernel(plan)


@pytest.mark.parametrize("name", ["kimi_plan", "qwen_plan"])
def test_the_code_of_a_mini_does_what_its_plan_says(request, name):
    plan = small(request.getfixturevalue(name))
    done = check_code(plan)
    assert [str(f) for f in done.findings] == []
    assert done.moves > 1000 and done.accesses > 1000 and done.ranks == plan.mesh.ranks and done.messages > 50


def test_the_code_of_batches_does_what_its_plan_says(batches):
    """And in every number of experts that its control knows."""
    assert check_plan(batches) == []
    done = check_code(batches)
    assert [str(f) for f in done.findings] == []
    assert done.moves > 900 and done.ranks == 2


def test_the_code_of_the_full_size_model_does_what_its_plan_says(qwen_plan):
    done = check_code(qwen_plan, few=True)
    assert [str(f) for f in done.findings] == [] and done.ranks == 8


def traced(seeds: range) -> dict[int, list[str]]:
    """What is wrong with the code of random specs, the whole way from spec to trace."""
    found = {seed: check_code(plan, few=True) for seed, plan in random_specs.plans(seeds)}
    assert all(done.moves > 50 for done in found.values())
    return {seed: [str(f) for f in done.findings] for seed, done in found.items()}


def test_the_code_of_random_specs_does_what_their_plans_say():
    found = traced(range(5000, 5006))
    assert len(found) >= 3 and {s: f for s, f in found.items() if f} == {}


@pytest.mark.slow
def test_the_code_of_many_random_specs_does_what_their_plans_say():
    found = traced(range(6000, 6060))
    assert len(found) >= 40 and {s: f for s, f in found.items() if f} == {}


STREAM_WAITS = "        for chunk in range(turn):\n            tape_copy(m, g + chunk).wait()\n"
STREAM_USE = "            use(blocks.start + i * turn + chunk, g + chunk)\n"
STREAM_USES = (
    f"        for chunk in range(turn):\n{STREAM_USE}            if refills is None or chunk < refills:\n"
    "                tape_copy(m, g + chunk + RING_DEPTH).start()\n"
)
INBOX_WAIT = (
    "    lax.fori_loop(1, stage.size, lambda step, _: message(m, stage, words, step, apart).wait(), None)\n"
)
INBOX_WORDS = "[inbox(m, stage)[here, i, :, :words] for i in range(stage.size)]"

# name: (template, what stands there, what is put there, how the finding begins); each a mistake that someone can make
DAMAGE = {
    "no collective id": ("kernel.py.j2", "{{ 0 if plan.stages else", "{{ none if plan.stages else", "code"),
    "wait of a chunk dropped": (
        "lib/tape.py.j2",
        "            tape_copy(m, g + chunk).wait()\n",
        "            pass\n",
        "code",
    ),
    "wait of the next chunk dropped": ("lib/tape.py.j2", "    tape_copy(m, g + 1).wait()\n", "", "code"),
    "wait behind the use": (
        "lib/tape.py.j2",
        STREAM_WAITS + STREAM_USES,
        STREAM_USES + STREAM_WAITS,
        "code flight",
    ),
    "refill dropped": ("lib/tape.py.j2", "            if refills is None or chunk < refills:\n", "            if False:\n", "code"),
    "refill of the wrong chunk": (
        "lib/tape.py.j2",
        "tape_copy(m, g + RING_DEPTH).start()\n    tape_copy(m, g + 1)",
        "tape_copy(m, g + RING_DEPTH - 1).start()\n    tape_copy(m, g + 1)",
        "code",
    ),
    "refill before the use": (
        "lib/tape.py.j2",
        STREAM_USES,
        STREAM_USES.replace(STREAM_USE, "") + STREAM_USE,
        "code flight",
    ),
    "wrong slot of the ring": (
        "lib/tape.py.j2",
        "m.ring[lax.rem(g, RING_DEPTH)",
        "m.ring[lax.rem(g + 1, RING_DEPTH)",
        "code flight",
    ),
    "fixed slot of the ring": (
        "lib/tape.py.j2",
        "m.ring[lax.rem(g, RING_DEPTH)",
        "m.ring[0 * lax.rem(g, RING_DEPTH)",
        "code flight",
    ),
    "wrong slot of an expert": (
        "lib/experts.py.j2",
        "slot, width = lax.rem(i, EXPERT_SLOTS)",
        "slot, width = lax.rem(i + 1, EXPERT_SLOTS)",
        "code flight",
    ),
    "wrong slot of a tile": ("lib/attention.py.j2", "lax.rem(at, KV_SLOTS)", "lax.rem(at + 1, KV_SLOTS)", "code flight"),
    "semaphores not by half": (
        "lib/collectives.py.j2",
        "m.arrived.at[here, stage.number]",
        "m.arrived.at[0, stage.number]",
        "code ranks",
    ),
    "inbox not by half": (
        "lib/collectives.py.j2",
        "inbox(m, stage).at[here, me",
        "inbox(m, stage).at[0, me",
        "code ranks",
    ),
    "no halves": (
        "lib/collectives.py.j2",
        "return lax.rem(m.phase[stage.number], 2)",
        "return lax.rem(m.phase[stage.number], 1)",
        "code ranks",
    ),
    "phase not counted": (
        "lib/collectives.py.j2",
        "    m.phase[stage.number] += 1\n    found = [inbox",
        "    found = [inbox",
        "code ranks",
    ),
    "drain of an exchange dropped": (
        "lib/collectives.py.j2",
        INBOX_WAIT,
        "",
        "code",
    ),
    "only arrivals awaited": (
        "lib/collectives.py.j2",
        "message(m, stage, words, step, apart).wait(), None)",
        "message(m, stage, words, step, apart).wait_recv(), None)",
        "code flight",
    ),
    "only departures awaited": (
        "lib/collectives.py.j2",
        "message(m, stage, words, step, apart).wait(), None)",
        "message(m, stage, words, step, apart).wait_send(), None)",
        "code",
    ),
    "read before the peers' words are here": (
        "lib/collectives.py.j2",
        f"{INBOX_WAIT}    m.phase[stage.number] += 1\n    found = {INBOX_WORDS}",
        f"    found = {INBOX_WORDS}\n{INBOX_WAIT}    m.phase[stage.number] += 1",
        "code ranks",
    ),
    "wrong peer": (
        "lib/collectives.py.j2",
        "^ (step * stage.stride)",
        "^ step",
        "code ranks",
    ),
    "one peer left out": (
        "lib/collectives.py.j2",
        "lax.fori_loop(1, stage.size, lambda step",
        "lax.fori_loop(2, stage.size, lambda step",
        "code",
    ),
    "one peer not told": (
        "lib/collectives.py.j2",
        "        for step in range(1, stage.size):\n            pl.semaphore_signal(",
        "        for step in range(2, stage.size):\n            pl.semaphore_signal(",
        "code ranks",
    ),
    "no barrier at the start": (
        "lib/collectives.py.j2",
        "    pl.semaphore_wait(pltpu.get_barrier_semaphore(), sum(stage.size - 1 for stage in STAGES))\n",
        "",
        "code ranks",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_template_is_found(mini, monkeypatch, name):
    template, old, new, rule = DAMAGE[name]
    assert check_plan(mini) == [], "the plan knows nothing of it"
    done = check_code(mini, damaged_module(mini, monkeypatch, template, old, new), few=True)
    assert any(f.rule == rule for f in done.findings), f"{rule} expected: {[str(f) for f in done.findings][:4]}"


BATCH_WAIT = "pl.when(due)(lambda: expert_copy(m, index, batch * EXPERT_BATCH + j).wait())"
BATCH = "lib/expert_batch.py.j2"
SLOTS_OF_A_BATCH = "slots = [lax.rem(i, EXPERT_SLOTS) for i in places]"
SLOTS_BY_PLACE = "slots = [lax.rem(j, EXPERT_SLOTS) for j in range(EXPERT_BATCH)]"
BATCH_DAMAGE = {  # as DAMAGE; no template: in what the plan's nodes are printed as
    "slots of the experts behind": (BATCH, SLOTS_OF_A_BATCH, SLOTS_OF_A_BATCH.replace("rem(i,", "rem(i + 1,"), "code flight"),
    "one slot for all of a batch": (BATCH, SLOTS_OF_A_BATCH, SLOTS_OF_A_BATCH.replace("rem(i,", "rem(places[0],"), "code flight"),
    "slot by place": (BATCH, SLOTS_OF_A_BATCH, SLOTS_BY_PLACE, "code flight"),
    "down from the slot of the first": (BATCH, "{{ matmul }}, slot, {{ down }}", "{{ matmul }}, slots[0], {{ down }}", "code flight"),
    "up from the slot of the first": (BATCH, "{{ matmul }}, slot, {{ up }}", "{{ matmul }}, slots[0], {{ up }}", "code flight"),
    "last panel left out": (None, "(range(4),)", "(range(3),)", "code flight"),
    "a batch of the batch before": (BATCH, "listed = [batch * EXPERT_BATCH", "listed = [jnp.maximum(batch - 1, 0) * EXPERT_BATCH", "code flight"),
    "slots beyond the list": (BATCH, SLOTS_OF_A_BATCH, SLOTS_OF_A_BATCH.replace("in places", "in listed"), "code flight"),
    "experts beyond the list": (BATCH, "jnp.minimum(i, last) for i in listed", "i for i in listed", "code"),
    "waits of a batch dropped": (None, BATCH_WAIT, "pass", "code"),
    "wait of its first dropped": (None, BATCH_WAIT, BATCH_WAIT.replace("pl.when(due)", "pl.when(due & (j > 0))"), "code"),
    "wait of its last dropped": (None, BATCH_WAIT, BATCH_WAIT.replace("pl.when(due)", "pl.when(due & (j < 1))"), "code"),
    "waits for the batch behind": (None, BATCH_WAIT, BATCH_WAIT.replace("batch *", "(batch + 1) *"), "code"),
    "part full batch not computed": (None, "m.expert_count[0] + EXPERT_BATCH - 1", "m.expert_count[0]", "code"),
    "one batch too many": (None, "m.expert_count[0] + EXPERT_BATCH - 1", "m.expert_count[0] + EXPERT_BATCH", "code"),
    "first fetched twice": (None, "expert_copy(m, index, FIRST_EXPERTS + i)", "expert_copy(m, index, i)", "code"),
    "refill of another slot": (None, "EXPERT_BATCH + j + EXPERTS_AHEAD)", "EXPERT_BATCH + j + EXPERT_BATCH)", "code"),
}


@pytest.mark.parametrize("name", BATCH_DAMAGE)
def test_a_damaged_template_of_batches_is_found(batches, monkeypatch, name):
    template, old, new, rule = BATCH_DAMAGE[name]
    done = check_code(batches, damaged_module(batches, monkeypatch, template, old, new), meet=False)
    assert any(f.rule == rule for f in done.findings), f"{rule} expected: {[str(f) for f in done.findings][:4]}"


def test_a_module_that_cannot_be_traced_is_a_finding(mini, monkeypatch):
    module = damaged_module(mini, monkeypatch, "lib/tape.py.j2", "lax.rem(g, RING_DEPTH)", "lax.rem(g, RING_DEPHT)")
    done = check_code(mini, module, few=True)
    assert len(done.findings) == 1 and "RING_DEPHT" in str(done.findings[0])
