"""What a proof reached: rungs that say so, and 'skipped' with the reason where a model has no such thing."""

from __future__ import annotations

import numpy as np

from mkgen.graph.ops.cache import Seen
from mkgen.graph.ops.gqa_attention import GqaAttention
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Collective, Loop, Step, walk
from mkgen.prove.rung import Rung
from mkgen.prove.scenario import Scenario, by_rank
from mkgen.spec.model import Build


def reach(plan: Plan, scenario: Scenario) -> list[Rung]:
    return [_shape(plan), _loop(plan), _tile(plan, scenario), _sight(plan, scenario), _residual(plan), *_routing(plan, scenario)]


def code(full: Plan, mini: Plan) -> Rung:
    """Does the mini run all code that the full plan does: steps, exchanges, ways to cut and store a matrix?"""
    missing = sorted(pieces(full) - pieces(mini))
    compared = f"{len(pieces(full))} kinds of steps, exchanges and matrix layouts of the full plan are in the mini's"
    return _rung("code", compared, not missing, f"the mini has no {', '.join(missing)}")


def pieces(plan: Plan) -> set[str]:
    """Names of what the plan's code is printed from."""
    cut = {
        (False, False): "in one block",
        (False, True): "cut along N",
        (True, False): "cut along K",
        (True, True): "cut",
    }
    stored = {m: f"{m.layout} of {m.format}" if m.format != "bf16" else m.layout for m in plan.matrices.values()}
    # how a block is read and how its product is put where it belongs are texts of their own: each is there, not each pair
    out = {f"matrix of {of}" for of in stored.values()}
    out |= {f"matrix {cut[m.k_blocks > 1, m.n_blocks > 1]}" for m in plan.matrices.values()}
    out |= {f"several blocks of {stored[m]} a turn" for m in plan.matrices.values() if m.turn > 1}
    ways = {(False, False): "all of K in a panel", (False, True): "gate and up side by side",
            (True, False): "parts of K side by side", (True, True): "parts of K, gate with up, side by side"}
    out |= {f"experts with {ways[image.fold > 1, image.joint]}" for image in plan.experts}
    out |= {"experts of one row" for region in plan.regions.values() for n in walk(region.body) if isinstance(n, Step) and n.args.get("lone") == "one"}
    out |= {"refills behind the experts" for region in plan.regions.values() for n in walk(region.body) if isinstance(n, Loop) and n.name == "late_refills"}
    out |= {"tiles of a cache started in front of its sub-layer" for region in plan.regions.values() if "MIXER_INDEX" in str(region.body)}
    for region in plan.regions.values():
        for node in walk(region.body):
            if isinstance(node, Step):
                out.add(f"{node.template}.{node.macro}")
                out |= {f"cache with {key}" for key in node.args.get("more", ())}
            elif isinstance(node, Collective):
                out.add(f"{node.told} of {'one value' if len(node.sources) == 1 else 'several values'}, {node.rounds} rounds, {node.wire}")
    return out


def _rung(name: str, compared: str, good: bool, reason: str = "") -> Rung:
    return Rung(f"reach: {name}", compared, None, None, "pass" if good else "skipped", "" if good else reason)


def _shape(plan: Plan) -> Rung:
    build, kinds = plan.spec.build, ", ".join([*plan.graph.mixers, *plan.graph.ffns])
    mesh = " x ".join(f"{name} {size}" for name, size in build.mesh.items())
    layouts = ", ".join(sorted({m.layout for m in plan.matrices.values()}))
    parts = f"experts {build.expert_parallel} x {build.tensor_parallel}"
    compared = f"{kinds}; {len(plan.graph.layers)} layers; mesh {mesh}; {parts}; tape: {layouts}, {plan.chunks} chunks"
    return _rung("kinds", compared, True)


def _loop(plan: Plan) -> Rung:
    model = plan.spec.model
    counts = [plan.graph.layers.count(run) for run in dict.fromkeys(plan.graph.layers)]
    ring = len(plan.regions["end"].chunks) > plan.ring_depth
    return _rung(
        "loop nest",
        f"{model.mixer} | {model.ffn}; the end has more chunks than the ring: {ring}",
        max(counts) > 1,
        "the model has one layer of each kind",
    )


def _tile(plan: Plan, scenario: Scenario) -> Rung:
    tile = plan.spec.build.kv_tile
    cached = any(s.positional for sub in plan.graph.sublayers() for op in sub.ops for s in op.states())
    crossed = [
        int(row)
        for row in range(scenario.rows)
        if len({int(s.positions[row]) // tile for s in scenario.steps if s.positions[row] >= 0}) > 1
    ]
    starts = scenario.steps[0].positions.tolist()
    return _rung(
        "tile's edge",
        f"rows {crossed} cross it (tile {tile}, first positions {starts})",
        bool(cached and crossed),
        "no positional cache",
    )


def _sight(plan: Plan, scenario: Scenario) -> Rung:
    """Tiles that windows and chunks leave out."""
    seen = {op.seen for sub in plan.graph.sublayers() for op in sub.ops if isinstance(op, GqaAttention) and op.seen != Seen()}
    positions = {int(p) for s in scenario.steps for p in s.positions if p >= 0}
    tile = plan.spec.build.kv_tile
    least = min((sum(int(s.oldest(np.int32(p))) >= tile for p in positions) for s in seen), default=0)
    return _rung(
        "windows",
        f"at {least} or more of {len(positions)} positions each of {len(seen)} kinds of sight leaves tiles out",
        least > 0,
        "all tokens are seen" if not seen else "no tile is left out",
    )


def _residual(plan: Plan) -> Rung:
    opens = plan.graph.facts.get("opens_block")
    layers = [n for n, o in enumerate(opens or ()) if o]
    return _rung(
        "residual blocks",
        f"snapshots at layers {layers}",
        len(layers) > 1,
        "plain residual" if opens is None else "one block",
    )


def _routing(plan: Plan, scenario: Scenario) -> list[Rung]:
    """From the reference's choices: rows that differ, experts that rows share, ranks without work."""
    steps = [(s.positions >= 0, c) for s in scenario.steps for c in s.chosen]
    if not steps:
        return [_rung("routing", "", False, "no routed experts")]
    build, several = plan.spec.build, [c[live] for live, c in steps if live.sum() > 1]
    differ = sum((c != c[0]).any() for c in several)
    shared = sum(bool((c.sum(0) > 1).any()) for c in several)
    alone = sum(bool((c.sum(0) == 1).any()) and bool((c.sum(0) > 1).any()) for c in several)
    idle = [int((~by_rank(c.any(0)[None], build.expert_parallel).any((0, 2))).sum()) for _, c in steps]
    note = f"of {len(steps)} routed layers"
    return [
        _rung("rows differ", f"rows take different experts in {differ} {note}", differ > 0, "one row"),
        _rung(
            "rows share", f"an expert is taken by several rows in {shared} {note}", shared > 0, "no expert was shared"
        ),
        _rung("rows alone", f"another one by one row in {alone} {note}", alone > 0, "experts were shared by all rows or by none"),
        _rung(
            "idle ranks",
            f"some rank has no expert in {int(np.count_nonzero(idle))} {note}",
            any(idle),
            "every rank holds a part of every expert"
            if build.expert_parallel == 1
            else "no token tried left a rank idle",
        ),
        *_batches(build, [c for _, c in steps]),
    ]


def _batches(build: Build, steps: list[np.ndarray]) -> list[Rung]:
    """Lists of experts that end within a batch or with it, and that are longer than there are slots. steps: [rows, experts]."""
    if build.expert_batch == 1:
        return []
    lists = np.concatenate([by_rank(c.any(0)[None], build.expert_parallel).sum(-1).reshape(-1) for c in steps])
    whole, part = (int(n.sum()) for n in (lists >= build.expert_batch, lists % build.expert_batch > 0))
    again = int((lists > build.expert_slots).sum())
    compared = (f"of {len(lists)} lists of experts {whole} fill a batch of {build.expert_batch}, {part} leave one in part empty, "
                f"{again} are longer than {build.expert_slots} slots")
    return [_rung("batches", compared, min(whole, part, again) > 0, "no row chose so many experts")]
