"""graph -> plan, as one list of passes."""
from __future__ import annotations

from mkgen.errors import MkgenError
from mkgen.graph.ir import LayerGraph
from mkgen.plan import common
from mkgen.plan.ahead import read_ahead
from mkgen.plan.builder import Builder
from mkgen.plan.memory import Memory
from mkgen.plan.plan import Plan, Region
from mkgen.plan.shard import Mesh
from mkgen.spec.model import Spec
from mkgen.targets import Target


class DoesNotFit(MkgenError):
    """VMEM is too small for the plan."""


def make_plan(spec: Spec, graph: LayerGraph, target: Target) -> Plan:
    """Lowers every sub-layer once, fixes the ring, adds what all of them share, and checks the budget of every row variant.

    Raises `MkgenError` that begins with the spec's path: what does not fit, why, and what to change."""
    try:
        return planned(spec, graph, target)
    except MkgenError as e:
        kind = DoesNotFit if isinstance(e, DoesNotFit) else MkgenError
        raise kind(str(e) if str(e).startswith(spec.path) else f"{spec.path}: {e}") from None


def planned(spec: Spec, graph: LayerGraph, target: Target) -> Plan:
    mesh = Mesh(tuple(spec.build.mesh.items()))
    memory = Memory(graph, spec.build, mesh, target)
    end_chunks = count_end(graph, memory)
    memory.ring_depth = min(spec.build.ring_depth, end_chunks)
    if memory.ring_depth < spec.build.ring_depth:
        memory.notes.append(("ring_depth", f"{end_chunks} of {spec.build.ring_depth}: the last sub-layer has no more chunks"))
    regions = {sub.name: lower(memory, sub, end_chunks if sub.role == "end" else None) for sub in graph.sublayers()}
    regions, ahead = read_ahead(graph, regions)
    memory.notes += [(name, "the first tiles of its cache are started in front of it, beside an exchange") for name in ahead]
    common.declare_shared(memory)
    plan = Plan(spec=spec, graph=graph, target=target, mesh=mesh, regions=regions, buffers=memory.buffers,
                transfers=memory.transfers, matrices=memory.matrices, vectors=memory.vectors, weights=memory.weights,
                states={n: b.name for n, (_, b) in memory.states.items()}, experts=tuple(memory.experts.values()),
                embed_rows=memory.embed_rows, ring_depth=memory.ring_depth, slot_rows=memory.slot_rows, why=tuple(memory.notes),
                stages=tuple((name, *mesh.groups[name][:2]) for name in memory.inboxes), ways=tuple(memory.ways.items()),
                added=tuple(sorted(memory.added)))
    check_ways(spec, memory)
    check_budget(plan)
    return plan


def check_ways(spec: Spec, memory: Memory) -> None:
    """Every sum that build.reduce names is one of the plan's."""
    for name in spec.build.reduce.keys() - memory.ways.keys() - {"rest"}:
        raise MkgenError(f"{spec.path}: build.reduce: {name} is no sum over the ranks\n  fix: {', '.join(memory.ways) or 'there is none'}, or rest")


def lower(memory: Memory, sub, end_chunks: int | None) -> Region:
    b = Builder(memory, sub, end_chunks)
    body = b.region()
    return Region(sub.name, sub.role, sub.doc, body, tuple(b.chunks))


def count_end(graph: LayerGraph, memory: Memory) -> int:
    """Chunks of the last sub-layer: the ring can be no deeper, since only that many are consumed without a refill."""
    scratch = Memory(graph, memory.build, memory.mesh, memory.target)
    for sub in (graph.begin, graph.end):
        b = Builder(scratch, sub, 0 if sub is graph.end else None)
        b.region()
    return len(b.chunks)


def check_budget(plan: Plan) -> None:
    """Refuses a plan that the chip cannot hold; names the largest buffers and what to change."""
    spec, target = plan.spec, plan.target
    for rows in spec.build.rows:
        vmem = plan.vmem(rows)
        total, budget = sum(vmem.values()), target.vmem_usable_bytes - spec.build.spill_kib * 1024
        if total > budget:
            top = ", ".join(f"{n} {b / 2**20:.2f}" for n, b in sorted(vmem.items(), key=lambda i: -i[1])[:5])
            raise DoesNotFit(f"{spec.path}: at {rows} rows the plan needs {total / 2**20:.2f} MiB of VMEM, {target.name} has "
                             f"{budget / 2**20:.2f} MiB beside the spill reserve\n  largest (MiB): {top}\n"
                             f"  fix: lower build.ring_depth, build.expert_slots, build.block_kib or build.kv_tile")
        held = plan.bytes_per_core(rows)
        if held > target.hbm_bytes:
            raise MkgenError(f"{spec.path}: at {rows} rows a core holds {held / 1e9:.1f} GB, {target.name} has "
                             f"{target.hbm_bytes / 1e9:.0f} GB\n  fix: a larger build.mesh, a smaller build.context, or build.formats")
