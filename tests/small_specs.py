"""Whole specs made in Python for tests: any kinds, any sizes, on few virtual ranks; and the proof of their kernels."""
from __future__ import annotations

from dataclasses import replace

from mkgen.prove.verify import _run, verdict
from mkgen.spec import roles, schedule
from mkgen.spec.model import Build, Model, Residual, Run, Spec
from mkgen.spec.validate import validate

PER = {"model": "", "layer": ".{layer}", "expert": ".{layer}.{expert}"}


def spec(ranks: int, mixers: dict, ffns: dict, mixer: str, ffn: str, hidden: int, residual=Residual(), ends: dict | None = None,
         **build) -> Spec:
    """`mixers` and `ffns` by name; `mixer`, `ffn`: the columns; `ends`: fields of Model; `build`: fields of Build."""
    runs = tuple(Run(*run) for run in zip(*(schedule.expand(schedule.parse(t)) for t in (mixer, ffn))))
    model = Model(name="odd", hidden=hidden, layers=len(runs), mixer=mixer, ffn=ffn, mixers=mixers, ffns=ffns,
                  schedule=runs, residual=residual, **({"vocab": 301} | (ends or {})))
    model = replace(model, checkpoint={t.role: t.role + PER[t.per] for t in roles.tensors(model).values()})
    small = dict(chip="tpu7x", mesh={"core": ranks}, expert_parallel=ranks, block_kib=96, rows=(3,), context=64, kv_tile=16,
                 ring_depth=3, expert_slots=2, kv_slots=4)
    made = Spec(model, Build(**(small | build)), "odd.yaml")
    assert not validate(made), validate(made)
    return made


def prove_kernel(made: Spec) -> None:
    """The spec's kernel as it is (not its mini) against the reference: both DMA modes, races, NaN memory."""
    rungs = _run(made, False)
    assert verdict(rungs) == "pass", "\n".join(str(r) for r in rungs if r.verdict == "fail")
