"""A hub case of the oracle (oracle/hub) through importer, reference and generated kernel, on virtual devices."""
from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from hub_case import CONTEXT, TILE, kept
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ml_dtypes import bfloat16

from mkgen.check import check_plan
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.prove.drive import load_kernel, pack_operands
from mkgen.prove.state_image import layouts, to_kernel
from mkgen.reference.evaluate import Decoder
from mkgen.spec.model import Build, Moe, Spec
from mkgen.spec.validate import validate
from mkgen.targets import load_target

FOLDER = Path(__file__).resolve().parent / "oracle" / "hub"
FAST = {"xla_backend_optimization_level": 0}               # to compile, not to run: each step is run once
States = dict[str, np.ndarray]
MESHES = {1: {"core": 1}, 2: {"core": 2}, 3: {"chip": 3}, 4: {"chip": 2, "core": 2}}


class HubCase:
    """A kept folder of the oracle; `before[t]`: the float32 reference's states before token t."""

    def __init__(self, folder: Path):
        self.name, io, decoded = folder.name, np.load(folder / "io.npz"), kept(folder)
        self.ids = io["input_ids"]
        self.batch = len(self.ids)
        self.oracle = np.concatenate([io["prefill_logits"], io["logits"][:, 1:]], 1)               # [B, T, V]
        self.model, self.params, self.before = decoded.imported.model, decoded.params, decoded.before

    def spec(self, ranks: int = 1, activations: str = "bf16") -> Spec:
        """As imported, on `ranks` virtual cores, with small blocks and slots; it is valid."""
        routed = any(isinstance(f, Moe) for f in self.model.ffns.values())
        experts = 2 if routed and ranks % 2 == 0 else 1
        build = Build("tpu7x", MESHES[ranks], expert_parallel=experts, tensor_parallel=ranks // experts, activations=activations,
                      rows=(self.batch,), context=CONTEXT, kv_tile=TILE, block_kib=128, ring_depth=4, expert_slots=2, kv_slots=4)
        spec = Spec(self.model, build, f"{self.name}.yaml")
        assert not validate(spec), validate(spec)
        return spec

    def decoder(self, exact: bool = False, activations: str = "bf16") -> Decoder:
        return Decoder(build_graph(self.spec()), self.params, self.batch, CONTEXT, exact, activations)

    def positions(self, t: int) -> np.ndarray:
        return np.full(self.batch, t, np.int32)

    def stored(self, decoder: Decoder, t: int) -> States:
        """The exact states before token t, caches rounded as they are stored."""
        cached = {s.name for sub in decoder.graph.sublayers() for op in sub.ops for s in op.states() if s.positional}
        return {n: s.astype(bfloat16).astype(np.float32) if n in cached else s.copy() for n, s in self.before[t].items()}


class CaseKernel:
    """The case's generated kernel with the case's weights; memory is NaN until it is written."""

    def __init__(self, case: HubCase, ranks: int, activations: str):
        spec = case.spec(ranks, activations)
        self.plan = plan = make_plan(spec, build_graph(spec), load_target(spec.build.chip))
        assert not check_plan(plan)
        module, self.rows, params = load_kernel(plan), case.batch, pltpu.InterpretParams(uninitialized_memory="nan")
        split, whole = PartitionSpec("tp"), PartitionSpec()

        def rank_step(small, large, state):
            given = {**small, **{n: a[0] for n, a in large.items()}}
            out, state = module.decode_call(self.rows, given, {n: a[0] for n, a in state.items()}, interpret=params)
            return jax.tree.map(lambda a: a[None], (out, state))

        mesh = Mesh(np.array(jax.devices()[:ranks]), ("tp",))
        self.split = NamedSharding(mesh, split)
        self.step = jax.jit(jax.shard_map(rank_step, mesh=mesh, in_specs=(whole, split, split), out_specs=split, check_vma=False),
                            compiler_options=FAST)
        self.tables = {"chunks": plan.chunk_table(), "facts": plan.fact_table()}
        self.operands = jax.device_put(pack_operands(plan, case.params), self.split)

    def state(self, logical: States, seen: int) -> dict[str, np.ndarray]:
        """The reference's states after `seen` tokens as the ranks keep them."""
        return {self.plan.states[x.name]: np.stack([to_kernel(x, logical[x.name], [seen] * self.rows, rank)
                                                    for rank in range(self.plan.mesh.ranks)]) for x in layouts(self.plan, self.rows)}

    def rubbish(self, logical: States) -> dict[str, np.ndarray]:
        """States whose every bit is set: NaN in any format."""
        return {n: np.full(x.nbytes, 255, np.uint8).view(x.dtype).reshape(x.shape) for n, x in self.state(logical, 0).items()}

    def run(self, tokens: np.ndarray, positions: np.ndarray, state: dict) -> tuple[np.ndarray, np.ndarray, dict]:
        """-> logits [B, V], greedy tokens [B], the same on every rank; states."""
        small = {"tokens": jnp.asarray(tokens, jnp.int32), "positions": jnp.asarray(positions), **self.tables}
        out, state = jax.block_until_ready(self.step(small, self.operands, jax.device_put(state, self.split)))
        vocab, token = self.plan.spec.model.vocab, np.asarray(out["token"])[:, :self.rows, 0]
        local = np.asarray(out["logits"])[:, :self.rows, :-(-vocab // self.plan.mesh.ranks)]
        assert (token == token[0]).all()
        return np.concatenate(list(local), axis=1)[:, :vocab], token[0], jax.tree.map(np.asarray, state)
