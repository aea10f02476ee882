"""Kernel against reference, one run of steps: each function makes the rungs of one question."""

from __future__ import annotations

import numpy as np

from mkgen.plan.plan import Plan
from mkgen.prove.drive import Trace
from mkgen.prove.rung import Rung, answer, judge
from mkgen.prove.scenario import Scenario, gap_noise
from mkgen.prove.state_image import layouts, to_logical

LOGITS = 0.02  # of the row's range of logits
STATES = 0.05  # rms of the difference, over that of a layer's and row's new state


def all_rungs(plan: Plan, scenario: Scenario, trace: Trace) -> list[Rung]:
    name = f"{trace.rows} row{'s' if trace.rows > 1 else ''}, {trace.mode}"
    excused = excuses(plan, scenario, trace)
    return [
        *logits(plan, scenario, trace, name, excused),
        *states(plan, scenario, trace, name, excused),
        untouched(plan, scenario, trace, name),
        *machine(trace, name),
    ]


def excuses(plan: Plan, scenario: Scenario, trace: Trace) -> np.ndarray:
    """bool [steps, rows]: the row's routing was a close call, in this step or in an earlier one of them, and its logits show
    that it went the other way. A close call that both decide alike is compared as any other.
    """
    close = np.stack([scenario.steps[n].gap < gap_noise(plan.spec.build) for n in trace.steps])
    off = np.stack([errors(plan, scenario, trace, i) > LOGITS for i in range(len(trace.steps))])
    return np.logical_or.accumulate(np.logical_or.accumulate(close, axis=0) & off, axis=0)


def errors(plan: Plan, scenario: Scenario, trace: Trace, i: int) -> np.ndarray:
    """[rows]: largest difference of the logits of the i-th step, as a share of the reference's range; 0 for an inactive row."""
    step = scenario.steps[trace.steps[i]]
    got = whole_logits(plan, trace.logits[i], trace.rows)
    off = np.max(np.abs(got - step.logits), axis=1) / np.maximum(np.ptp(step.logits, axis=1), 1e-12)
    return np.where(step.positions >= 0, np.nan_to_num(off, nan=np.inf), 0.0)


def whole_logits(plan: Plan, local: np.ndarray, rows: int) -> np.ndarray:
    """[ranks, 8, local columns] -> [rows, vocab]."""
    vocab = plan.spec.model.vocab
    run = -(-vocab // plan.mesh.ranks)
    return np.concatenate([rank[:rows, :run] for rank in local], axis=1)[:, :vocab]


def logits(plan: Plan, scenario: Scenario, trace: Trace, name: str, excused: np.ndarray) -> list[Rung]:
    """Logits, greedy token, and that all ranks name the same token."""
    worst, counted, wrong, apart, left = 0.0, 0, [], [], 0
    usable = plan.spec.model.usable_vocab or plan.spec.model.vocab
    for i, (n, local, tokens) in enumerate(zip(trace.steps, trace.logits, trace.tokens)):
        step, got = scenario.steps[n], whole_logits(plan, local, trace.rows)
        for row in np.flatnonzero(step.positions >= 0):
            if (tokens[:, row] != tokens[0, row]).any():
                apart.append(f"step {n} row {row}: {sorted(set(tokens[:, row].tolist()))}")
            if tokens[0, row] != np.argmax(got[row, :usable]):
                wrong.append(f"step {n} row {row}: token {tokens[0, row]}, its own logits say {np.argmax(got[row, :usable])}")
            if excused[i, row]:
                left += 1
                continue
            want, spread = step.logits[row, :usable], np.ptp(step.logits[row])
            worst, counted = max(worst, errors(plan, scenario, trace, i)[row]), counted + 1
            first, second = np.sort(np.append(want, -np.inf))[[-1, -2]]
            if tokens[0, row] != np.argmax(want) and first - second > LOGITS * spread:
                wrong.append(f"step {n} row {row}: token {tokens[0, row]}, not {np.argmax(want)}")
    note = f"{left} excused: a router gap below {gap_noise(plan.spec.build)} went the other way" if left else ""
    compared = f"logits [{plan.spec.model.vocab}] of {counted} active rows in {len(trace.steps)} steps"
    first = judge(f"{name}: logits", compared, worst, LOGITS, note)
    if not counted:
        first = Rung(first.name, compared, None, LOGITS, "skipped", note)
    return [
        first,
        answer(f"{name}: token", "greedy token, where the best two logits are farther apart than the bound", wrong),
        answer(f"{name}: ranks", "the token on every rank", apart),
    ]


def states(plan: Plan, scenario: Scenario, trace: Trace, name: str, excused: np.ndarray) -> list[Rung]:
    """After the last step: what the steps wrote, by kind of state."""
    out = []
    for layout in layouts(plan, trace.rows):
        want = scenario.states[trace.steps.stop][layout.name]
        got, same = to_logical(layout, list(trace.states[-1][plan.states[layout.name]]), want.shape)
        worst, counted = 0.0, 0
        for row in range(trace.rows):
            at = [int(scenario.steps[n].positions[row]) for n in trace.steps if scenario.steps[n].positions[row] >= 0]
            if not at or excused[-1, row]:
                continue
            pick = (slice(None), row, at) if layout.positional else (slice(None), row)
            g, w = (x[pick].reshape(want.shape[0], -1) for x in (got, want))
            error = np.sqrt(np.mean((g - w) ** 2, axis=1) / np.maximum(np.mean(w**2, axis=1), 1e-12)).max()
            worst, counted = max(worst, np.nan_to_num(error, nan=np.inf)), counted + 1
        compared = f"{want.shape[0]} layers, {counted} rows, rms" + (", new tokens" if layout.positional else "")
        if not counted:
            out.append(Rung(f"{name}: {layout.name}", compared, None, STATES, "skipped", "every row is excused"))
            continue
        rung = judge(f"{name}: {layout.name}", compared, worst, STATES)
        out.append(
            rung if same else Rung(rung.name, compared, rung.error, STATES, "fail", "ranks hold different copies")
        )
    return out


def untouched(plan: Plan, scenario: Scenario, trace: Trace, name: str) -> Rung:
    """Bits that no step may change: of inactive rows all, of a cache all tokens but the new one."""
    bad = []
    for i, n in enumerate(trace.steps):
        step = scenario.steps[n]
        for layout in layouts(plan, trace.rows):
            buffer = plan.states[layout.name]
            before, after = (np.array(trace.states[j][buffer]).view(np.uint32) for j in (i, i + 1))
            axis = 3 if layout.op.kind == "short_conv" else 2  # [ranks, layers, (taps,) rows, ...]
            before, after = (np.moveaxis(x, axis, 0) for x in (before, after))
            for row in range(len(before)):
                p = int(step.positions[row]) if row < trace.rows else -1
                if p >= 0 and not layout.positional:
                    continue
                changed = before[row] != after[row]  # cache: [ranks, layers, blocks, T / 2, 128]
                if p >= 0:
                    if p % 2:  # the token before it shares its word
                        half = (before[row] ^ after[row])[..., p // 2, :] & 0xFFFF
                        changed[..., p // 2, :] = half != 0
                    else:
                        changed[..., p // 2, :] = False
                if changed.any():
                    bad.append(f"step {n}: {layout.name}, row {row}, {int(changed.sum())} words")
    return answer(f"{name}: untouched", "bits of inactive rows, and of cached tokens other than the new one", bad)


def machine(trace: Trace, name: str) -> list[Rung]:
    """What the interpreter found."""
    found = trace.findings
    races = [m for m in found.messages if m.startswith("race")]
    left = [m for m in found.messages if not m.startswith("race")]
    steps = f"in {len(trace.steps)} steps"
    return [
        answer(
            f"{name}: races",
            f"every pair of accesses to a buffer {steps}",
            [f"{found.races} races", *races] if found.races else [],
        ),
        answer(
            f"{name}: semaphores",
            f"zero at exit {steps}",
            [f"{found.semaphores} are not", *left] if found.semaphores else [],
        ),
    ]


def same_bits(scenario: Scenario, one: Trace, other: Trace) -> Rung:
    """Two modes of one kernel give the same logits and states, bit for bit, in the steps that both made."""
    bad, common = [], [n for n in other.steps if n in one.steps]
    for n in common:
        i, j = n - one.steps.start, n - other.steps.start
        live = np.flatnonzero(scenario.steps[n].positions >= 0)
        if not np.array_equal(one.logits[i][:, live].view(np.uint32), other.logits[j][:, live].view(np.uint32)):
            bad.append(f"logits of step {n}")
        for name in one.states[i + 1]:
            a, b = (np.array(x[name]).view(np.uint32) for x in (one.states[i + 1], other.states[j + 1]))
            if not np.array_equal(a, b):
                bad.append(f"{name} after step {n}")
    return answer(
        f"{one.rows} rows: both modes",
        f"bits of logits and states after {len(common)} steps, {one.mode} and {other.mode}",
        bad,
    )
