"""What a sub-layer's function says that it is: the docstring in the generated module, after what its kind really has."""
from __future__ import annotations

from mkgen.spec.model import Gqa, Linear, Mla, Mlp, Moe


def told(kind: Gqa | Mla | Linear | Mlp | Moe) -> str:
    return {Gqa: gqa, Mla: mla, Linear: linear, Mlp: mlp, Moe: moe}[type(kind)](kind)


def gqa(a: Gqa) -> str:
    name = {a.heads: "Multi-head", 1: "Multi-query"}.get(a.kv_heads, "Grouped-query")
    seen = f" over the last {a.window} tokens" if a.window else f" within chunks of {a.chunk} tokens" if a.chunk else ""
    return f"{name} attention{seen}, with a positional cache."


def mla(a: Mla) -> str:
    return "Multi-head latent attention."


def linear(a: Linear) -> str:
    rule = "the delta rule" if a.delta else "a decaying sum of outer products"
    after = " and ".join([*["norm"] * bool(a.norm), *["gate"] * bool(a.gate)])
    return f"Linear recurrence: in each head {rule}{f', then {after}' if after else ''}."


def mlp(f: Mlp) -> str:
    return "Gated MLP." if f.gated else "MLP."


def moe(f: Moe) -> str:
    latent = f" of a latent of {f.latent}" if f.latent else ""
    return f"Routed experts{latent}, each distinct one fetched once{'; shared experts' if f.shared_width else ''}."
