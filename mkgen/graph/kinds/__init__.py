"""Sub-layer kinds: how each mixer and each ffn of the spec is composed from ops."""
from __future__ import annotations

from mkgen.graph.kinds.ffn import mlp, moe
from mkgen.graph.kinds.gqa import gqa
from mkgen.graph.kinds.mla import mla
from mkgen.graph.kinds.recurrence import linear
from mkgen.spec.model import Gqa, Linear, Mla, Mlp, Moe

MIXERS = {Gqa: gqa, Mla: mla, Linear: linear}
FFNS = {Mlp: mlp, Moe: moe}
