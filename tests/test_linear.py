"""Linear recurrences: gated delta net, Kimi Delta Attention, lightning attention, Mamba-2, each a setting of one kind."""
from __future__ import annotations

from small_specs import prove_kernel, spec

from mkgen.spec.mixers import Conv, Decay, Linear, LinearGate, LinearNorm
from mkgen.spec.model import Mlp

GDN = Linear(heads=8, key_heads=4, key_dim=40, value_dim=24, conv=Conv(4), norm=LinearNorm(), gate=LinearGate("silu"))
KDA = Linear(heads=4, key_dim=16, value_dim=48, decay=Decay("softplus", "channel", 12), conv=Conv(3, bias=True),
             write_scale=2.0, norm=LinearNorm(), gate=LinearGate("sigmoid", 20, bias=True))
LIGHTNING = Linear(heads=4, key_dim=32, value_dim=32, delta=False, decay=Decay("constant"), write="one", qk_l2=False, scale=1.0,
                   act=True, norm=LinearNorm("groups"), gate=LinearGate("sigmoid"))
MAMBA2 = Linear(heads=8, key_heads=2, key_dim=16, value_dim=64, delta=False, write="step", step_min=0.1, step_max=0.5, qk_l2=False,
                scale=1.0, conv=Conv(4, bias=True), skip=True, norm=LinearNorm("groups", 2, gate_first=True), gate=LinearGate("silu"))
FFN = {"mlp": Mlp(64)}


def test_four_kinds_on_two_ranks() -> None:
    mixers = {"gdn": GDN, "kda": KDA, "lightning": LIGHTNING, "mamba": MAMBA2}
    prove_kernel(spec(2, mixers, FFN, "gdn lightning kda mamba lightning", "mlp*5", 128))
