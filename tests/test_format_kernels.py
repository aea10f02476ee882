"""Whole kernels whose weights are stored in many formats at once, against the reference: on the tape and in the experts."""
from __future__ import annotations

import pytest

from mkgen.spec.model import Gqa, Mlp, Rope
from small_specs import prove_kernel, spec

CASES = {
    "tape": lambda: spec(2, {"attention": Gqa(heads=6, kv_heads=2, head_dim=80, rope=Rope(1e4, 48))}, {"mlp": Mlp(width=512)},
                         "attention*2", "mlp*2", hidden=384,
                         formats={"attention.q": "int8", "attention.k": "int8", "attention.v": "fp8", "attention.o": "fp8_block",
                                  "mlp.gate": "int4_g32_zero", "mlp.up": "int4_g64", "mlp.down": "nvfp4", "head": "mxfp4"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name):
    prove_kernel(CASES[name]())
