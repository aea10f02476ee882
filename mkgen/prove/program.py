"""The generated kernel as JAX traces it for the chip: the jaxpr of its one `pallas_call`, and the names of its refs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from mkgen.plan.plan import Plan
from mkgen.prove.control import Control


@dataclass
class Program:
    """One row variant. `kernel(rank, *calls)` runs its control slice (`control.CALLS`); params: what the compiler is told."""

    rows: int
    names: list[str]
    control: Control
    params: Any = None

    def __post_init__(self) -> None:
        self.kernel = self.control.function()


def trace_program(plan: Plan, module, rows: int) -> Program:
    """module: the generated kernel; no device is needed, nothing is compiled."""
    array = jax.ShapeDtypeStruct
    facts = plan.fact_table()
    operands = {
        "tokens": array((rows,), jnp.int32),
        "positions": array((rows,), jnp.int32),
        "chunks": array((2 * plan.chunks,), jnp.int32),
        "facts": array(facts.shape, jnp.int32),
        "tape": array((plan.tape_rows, 128), jnp.uint32),
        "embedding": array((plan.embed_rows, 128), jnp.uint32),
        **{image.name: array(image.shape, jnp.uint32) for image in plan.experts},
    }
    held = module.states(rows)
    traced = jax.make_jaxpr(
        lambda given, state: module.decode_call(rows, given, state), axis_env=[("tp", plan.mesh.ranks)]
    )(operands, held)
    calls = [eqn for eqn in traced.eqns if eqn.primitive.name == "pallas_call"]
    if len(calls) != 1:
        raise ValueError(f"a step is one pallas_call, the module makes {len(calls)}")
    names = [*module.OPERANDS, *held, *module.outputs(rows), *module.places(rows)]
    jaxpr = calls[0].params["jaxpr"]
    if len(names) != len(jaxpr.invars):
        raise ValueError(f"the kernel takes {len(jaxpr.invars)} refs, the module names {len(names)}")
    return Program(rows, names, Control(jaxpr, names), calls[0].params.get("compiler_params"))
