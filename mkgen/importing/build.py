"""A modest `build:` for an imported model: the checkpoint's own formats on the smallest mesh that holds them."""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mkgen.errors import MkgenError
from mkgen.graph.build import build_graph
from mkgen.importing.config import Config
from mkgen.importing.quant import QUANT_KEY, formats, quantisation, stored_bytes
from mkgen.importing.record import Record
from mkgen.plan.planner import make_plan
from mkgen.plan.shard import round_up
from mkgen.plan.tape import LANES
from mkgen.spec import checks_build
from mkgen.spec.model import Build, Model, Moe, Spec
from mkgen.spec.validate import Checker, validate
from mkgen.spec.yaml_lines import Entry, Map, Scalar, Seq
from mkgen.targets import Target, load_target

SHARE = 0.8                                      # of the HBM may be weights; the rest is for caches and states
CONTEXT = 4096
PADDED = 1.125                                   # columns of experts, with padding, to true ones
FEWER = ((10, 3), (8, 2), (6, 2), (4, 2))        # ring_depth, expert_slots


@dataclass(frozen=True)
class BuildSection:
    """The section as a tree, with the comments behind its keys and above them. bytes: of all weights."""
    entry: Entry
    build: Build
    bytes: float
    notes: dict[str, str] = field(default_factory=dict)
    above: dict[str, list[str]] = field(default_factory=dict)


def build_section(config: Config, model: Model, chip: str, unquantised: set[str], record: Record) -> BuildSection | None:
    """None if something is refused, which the record says."""
    target = load_target(chip)
    before = len(record.refused)
    q = quantisation(config, record)
    how = formats(model, q, unquantised, record) if q else {}
    if len(record.refused) > before:
        return None
    size = stored_bytes(model, how)
    chosen = next((b for b in candidates(model, target, size) if fits(model, b)), None)
    notes = {"formats": f"{QUANT_KEY}: {q.source}"} if q else {}
    if chosen is None:
        chosen = next(candidates(model, target, size), None)
        if chosen is None:
            record.refuse("", f"the weights take {size / 1e9:,.0f} GB, more than the largest known mesh of {chip} holds",
                          "--model-only writes the model without a build")
            return None
        notes["mesh"] = "no mesh that holds the weights can share them out evenly: choose other factors"
    chosen, note = in_vmem(model, replace(chosen, formats=how), target)
    notes |= {"ring_depth": note} if note else {}
    rule = (f"# The smallest mesh whose HBM holds the weights ({size / 1e9:,.1f} GB) in {SHARE:.0%} of it, and that can share out the "
            "model.")
    return BuildSection(_entry(chosen), chosen, size, notes, {"mesh": [rule]})


def in_vmem(model: Model, build: Build, target: Target) -> tuple[Build, str]:
    """The build with as deep a ring and as many expert slots as its plan has room for, and a comment if these are fewer than usual.
    What cannot be planned for another reason is left as it is: `mkgen build` says why."""
    for ring, slots in ((build.ring_depth, build.expert_slots), *FEWER):
        smaller = replace(build, ring_depth=ring, expert_slots=slots)
        spec = Spec(model, smaller, "the imported model")
        if validate(spec):
            return build, ""
        try:
            make_plan(spec, build_graph(spec), target)
        except MkgenError as error:
            if "VMEM" not in str(error):
                return build, ""
        except Exception:                        # a defect of the planner is the planner's to report, when it is asked to build
            return build, ""
        else:
            return smaller, "" if smaller == build else "chunks in VMEM: with expert_slots, as many as there is room for"
    return build, ""


def candidates(model: Model, target: Target, size: float) -> Iterator[Build]:
    """Builds that hold `size` bytes, fewest ranks first."""
    moe = [f for f in model.ffns.values() if isinstance(f, Moe)]
    for mesh in meshes(target):
        ranks = Build(target.name, mesh).ranks
        if ranks * target.hbm_bytes * SHARE < size:
            continue
        for tensor in sorted((t for t in range(1, ranks + 1) if ranks % t == 0), key=lambda t: cut(moe, t)) if moe else [1]:
            yield Build(target.name, mesh, expert_parallel=ranks // tensor if moe else 1, tensor_parallel=tensor, rows=(1, 8),
                        context=CONTEXT)


def cut(moe: list[Moe], tensor: int) -> tuple[bool, int]:
    """For sorting: first the cuts of an expert's width that leave whole panels of 128, nearly, the finest in front: the more ranks
    share each expert, the less they wait for the one that has most to run. A norm of its output needs an expert whole."""
    good = all(tensor * round_up(-(-f.width // tensor), LANES) <= PADDED * f.width and not (f.expert_norm and tensor > 1) for f in moe)
    return not good, -tensor if good else tensor


def meshes(target: Target) -> Iterator[dict[str, int]]:
    """All meshes of a chip, fewest ranks first: part of a chip, of a host, then whole hosts."""
    found = []
    for hosts in range(1, target.max_hosts + 1):
        for chips in range(1, target.chips_per_host + 1) if hosts == 1 else [target.chips_per_host]:
            for cores in range(1, target.cores_per_chip + 1) if hosts == chips == 1 else [target.cores_per_chip]:
                if hosts * chips * cores <= target.max_ranks and all(n & (n - 1) == 0 for n in (hosts, chips, cores)):
                    found.append({"host": hosts, "chip": chips, "core": cores})
    for mesh in sorted(found, key=lambda m: m["host"] * m["chip"] * m["core"]):
        yield {k: n for k, n in mesh.items() if n > 1} or {"core": 1}


def fits(model: Model, build: Build) -> bool:
    """Whether the model can be split so: the builder's own checks say, all but those of the formats."""
    found: list = []
    checker = Checker(Spec(model, build, ""), found)
    checker.target = load_target(build.chip)
    for check in checks_build.CHECKS:
        checker.run(check)
    return not found


def _entry(b: Build) -> Entry:
    def node(value: object):
        if isinstance(value, dict):
            return Map("", 0, {k: Entry("", 0, node(v)) for k, v in value.items()})
        if isinstance(value, tuple):
            return Seq("", 0, tuple(node(v) for v in value))
        return Scalar("", 0, str(value), "str", True)

    keys = {"chip": b.chip, "mesh": b.mesh}
    if b.expert_parallel * b.tensor_parallel > 1:
        keys |= {"expert_parallel": b.expert_parallel, "tensor_parallel": b.tensor_parallel}
    if b.formats:
        keys["formats"] = b.formats
    usual = Build(b.chip, b.mesh)
    fewer = {k: getattr(b, k) for k in ("ring_depth", "expert_slots") if getattr(b, k) != getattr(usual, k)}
    return Entry("", 0, node({**keys, "rows": b.rows, "context": b.context, **fewer}))
