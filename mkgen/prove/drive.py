"""Runs a generated kernel on virtual devices, step by step, under the interpreter."""

from __future__ import annotations

import atexit
import importlib.util
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mkgen.emit.render import render_kernel
from mkgen.pack.image import embedding_image, expert_image, tape_image
from mkgen.plan.plan import Plan
from mkgen.prove.interpret import Findings, interpret_params, watch
from mkgen.prove.scenario import Scenario
from mkgen.prove.state_image import layouts, to_kernel


def load_kernel(plan: Plan):
    """The generated module, imported from a temporary file that goes with the process (JAX quotes its lines till then)."""
    folder = tempfile.TemporaryDirectory(prefix="mkgen_verify_")
    atexit.register(folder.cleanup)
    path = Path(folder.name) / "kernel.py"
    path.write_text(render_kernel(plan), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("mkgen_generated_kernel", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def pack_operands(plan: Plan, params) -> dict[str, jax.Array]:
    """All ranks' weights side by side, [ranks, ...]."""
    ranks = range(plan.mesh.ranks)
    makers = {"tape": tape_image, "embedding": embedding_image}
    made = {n: np.stack([make(plan, rank, params) for rank in ranks]) for n, make in makers.items()}
    return made | {image.name: np.stack([expert_image(plan, image, rank, params) for rank in ranks]) for image in plan.experts}


@dataclass
class Trace:
    """What the kernel gave. steps: numbers of the scenario's steps; for each, logits [ranks, 8, local columns]
    and tokens [ranks, rows]; states[i][name] [ranks, ...] before the i-th of them, and after the last one.
    """

    mode: str
    rows: int
    steps: range
    logits: list[np.ndarray] = field(default_factory=list)
    tokens: list[np.ndarray] = field(default_factory=list)
    states: list[dict[str, np.ndarray]] = field(default_factory=list)
    findings: Findings = field(default_factory=Findings)
    seconds: list[float] = field(default_factory=list)


class Kernel:
    """The generated kernel on virtual devices, for one number of rows: traced and compiled once."""

    def __init__(self, plan: Plan, module, operands: dict[str, np.ndarray], rows: int):
        """operands: as `pack_operands` gives them."""
        self.plan, self.rows = plan, rows
        mesh = Mesh(np.array(jax.devices()[: plan.mesh.ranks]), ("tp",))
        split, whole = PartitionSpec("tp"), PartitionSpec()

        def rank_step(small, large, state):
            given = {**small, **{n: a[0] for n, a in large.items()}}
            out, state = module.decode_call(
                rows, given, {n: a[0] for n, a in state.items()}, interpret=interpret_params()
            )
            return jax.tree.map(lambda a: a[None], (out, state))

        self.step = jax.jit(
            jax.shard_map(rank_step, mesh=mesh, in_specs=(whole, split, split), out_specs=split, check_vma=False)
        )
        self.split = NamedSharding(mesh, split)
        self.tables = {"chunks": plan.chunk_table(), "facts": plan.fact_table()}
        self.operands = jax.device_put(operands, self.split)

    def run(self, scenario: Scenario, mode: str, steps: range, state: dict[str, np.ndarray] | None = None) -> Trace:
        """The scenario's `steps`, tokens forced, from its prefilled states or from `state`; mode:
        interpret.MODES.
        """
        trace = Trace(mode, self.rows, steps)
        state = state or self.prefilled(scenario, steps.start)
        trace.states.append(state)
        for now in (scenario.steps[n] for n in steps):
            begin = time.time()
            small = {"tokens": jnp.asarray(now.tokens), "positions": jnp.asarray(now.positions), **self.tables}
            with watch(trace.findings, mode):
                out, state = jax.block_until_ready(self.step(small, self.operands, jax.device_put(state, self.split)))
                out, state = jax.tree.map(np.asarray, (out, state))
            trace.logits.append(out["logits"])
            trace.tokens.append(out["token"][:, : self.rows, 0])
            trace.states.append(state)
            trace.seconds.append(time.time() - begin)
        return trace

    def prefilled(self, scenario: Scenario, step: int) -> dict[str, np.ndarray]:
        """The reference's states before a step, as the ranks hold them."""
        seen = [scenario.seen(row, step) for row in range(self.rows)]
        return {
            self.plan.states[l.name]: np.stack(
                [to_kernel(l, scenario.states[step][l.name], seen, rank) for rank in range(self.plan.mesh.ranks)]
            )
            for l in layouts(self.plan, self.rows)
        }
