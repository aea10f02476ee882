"""Which storage format a weight family takes: what `build.formats` says for it, for 'experts' or for the 'rest'."""
from __future__ import annotations

from mkgen.graph.ir import Weight
from mkgen.spec.model import Build

REST = 256                               # `rest` means matrices with at least so many rows and columns
MATRICES = ("linear", "first_half_heads", "second_half_heads")                # rules of graph/weights.py


def format_of(build: Build, w: Weight) -> str:
    """The name of the format that `w` is stored in. Vectors and the embedding table are bf16 (or f32, as Weight.dtype says)."""
    if w.assemble.partition("(")[0] not in MATRICES or w.dtype != "bf16":
        return "bf16"
    if len(w.shape) == 3:
        return build.formats.get("experts", "bf16")
    named = next((build.formats[n] for n in (w.name, *w.roles) if n in build.formats and n != "embed"), None)
    return named or (build.formats.get("rest", "bf16") if in_rest(w) else "bf16")


def in_rest(w: Weight) -> bool:
    """Is this matrix one of the `rest`, when it is not named itself? Not a router: a choice that turns costs more than its bytes."""
    return min(w.shape) >= REST and not w.name.endswith(".router")
