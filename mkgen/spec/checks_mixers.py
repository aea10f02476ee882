"""Checks of the mixers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mkgen.spec.model import Gqa, Linear, Mla, Rope, RopeScaling

if TYPE_CHECKING:
    from mkgen.spec.validate import Checker


def mixers(c: Checker) -> None:
    for name, kind in c.each("mixers"):
        c.run(_CHECKS[type(kind)], kind, ("model", "mixers", name))


def _gqa(c: Checker, a: Gqa, path: tuple[str, ...]) -> None:
    c.run(_rope, a.rope, a.head_dim, "head_dim", path)
    if a.heads % a.kv_heads:
        c.say(
            (*path, "kv_heads"),
            f"{a.heads} heads cannot share {a.kv_heads} kv_heads evenly",
            "each key/value head serves the same number of query heads",
            "make heads a multiple of kv_heads",
        )
    if a.window and a.chunk:
        c.say((*path, "chunk"), "a window and a chunk", "each says alone which tokens are seen", "delete one of them")
    if a.output_norm is not None and a.output_norm.bias:
        c.say(
            (*path, "output_norm", "bias"),
            "a bias of the norm of each head",
            "the checkpoint roles of an attention have a weight of it, `o_norm`, and no bias",
            "delete it",
        )
    if len(set(a.bias)) < len(a.bias):
        c.say((*path, "bias"), "a projection is listed twice", "each has one bias or none", "list each once")
    for i, role in enumerate(a.bias):
        if role not in ("q", "k", "v", "o"):
            c.say(
                (*path, "bias", str(i)),
                f"there is no projection {role!r}",
                "an attention has the projections q, k, v and o",
                "list those that have a bias, as in `bias: [q, k, v]`",
            )


def _mla(c: Checker, a: Mla, path: tuple[str, ...]) -> None:
    if a.rope is not None and not a.rope_dim:
        c.say(
            (*path, "rope"),
            "a rope, and no rope_dim",
            "only the part of the keys that all heads share is rotated, and it is rope_dim wide",
            "write `rope_dim:`, or delete rope",
        )
    else:
        c.run(_rope, a.rope, a.rope_dim, "rope_dim", path)


def _linear(c: Checker, a: Linear, path: tuple[str, ...]) -> None:
    if a.heads % (a.key_heads or a.heads):
        c.say(
            (*path, "key_heads"),
            f"{a.heads} heads cannot share {a.key_heads} key_heads evenly",
            "each key head serves the same number of heads",
            "make heads a multiple of key_heads",
        )
    if a.conv is not None and a.conv.taps < 2:
        c.say(
            (*path, "conv", "taps"),
            f"taps is {a.conv.taps}",
            "the convolution keeps taps - 1 earlier inputs of each sequence",
            "write 2 or more taps",
        )
    if a.decay.kind == "floor" and a.decay.floor >= 0:
        c.say(
            (*path, "decay", "floor"),
            f"floor is {a.decay.floor:g}",
            "the log decay lies between it and 0; at 0 or above the state would never fade",
            "write a number below 0, such as -5.0",
        )
    if a.write == "step" and (a.decay.kind != "softplus" or a.decay.per != "head"):
        c.say(
            (*path, "write"),
            "write: step without a softplus decay a head",
            "the step is what the decay multiplies: b = softplus(z + dt_bias), a = exp(-exp(A_log) b)",
            "write `decay: {kind: softplus, per: head}`",
        )
    if a.decay.kind == "constant" and a.decay.per != "head":
        c.say(
            (*path, "decay", "per"),
            "a constant decay a channel",
            "it is made of the head's number and the layer's, see Decay",
            "write `decay: {kind: constant, per: head}`",
        )
    if a.decay.kind == "constant" and a.decay.rank:
        c.say(
            (*path, "decay", "rank"),
            f"rank {a.decay.rank} of a constant decay",
            "it is no projection of the input",
            "delete it",
        )
    if a.step_min < 0 or a.step_max and a.step_max <= a.step_min:
        c.say(
            (*path, "step_max"),
            f"the step lies between {a.step_min:g} and {a.step_max:g}",
            "it is a softplus, above 0, and its bounds need room between them",
            "write 0 <= step_min < step_max, or leave one out",
        )
    if a.step_min and a.decay.kind != "softplus" or a.step_max and a.decay.kind != "softplus":
        c.say(
            (*path, "step_min" if a.step_min else "step_max"),
            f"a bound of the step with a decay of kind {a.decay.kind}",
            "only a softplus decay has a step",
            "delete it",
        )
    if a.act and a.conv is not None:
        c.say(
            (*path, "act"),
            "act and conv",
            "a convolution ends in SiLU, and act is SiLU where there is none",
            "delete act",
        )
    if a.gate is not None and a.gate.bias and not a.gate.rank:
        c.say(
            (*path, "gate", "bias"),
            "a bias of a gate without a low rank",
            "it belongs to the second of two projections",
            "add the gate's rank, or delete bias",
        )
    if a.norm is not None and a.norm.gate_first and a.gate is None:
        c.say(
            (*path, "norm", "gate_first"),
            "gate_first without a gate",
            "there is nothing to multiply the norm's input with",
            "add `gate:`, or delete gate_first",
        )
    if a.norm is not None and a.norm.scope == "groups" and (a.heads * a.value_dim) % a.norm.groups:
        c.say(
            (*path, "norm", "groups"),
            f"{a.heads * a.value_dim} channels cannot be cut into {a.norm.groups} groups",
            "each group of channels is normed by itself",
            "choose a divisor",
        )


def _rope(c: Checker, rope: Rope | None, head_dim: int, name: str, path: tuple[str, ...]) -> None:
    if rope is None:
        return
    width = head_dim if rope.width is None else rope.width
    if width > head_dim or width % 2:
        c.say(
            (*path, "rope", "width"),
            f"rope cannot rotate {width} features of a head of {head_dim}",
            f"features are rotated in pairs, and there are {head_dim} ({name})",
            f"make width an even number of at most {head_dim}",
        )
    if rope.base <= 1:
        c.say((*path, "rope", "base"), f"base is {rope.base:g}", "wavelengths grow with it from feature to feature", "write a number above 1")
    if rope.scaling is not None and rope.scaling.kind != "linear" and not rope.scaling.original_context:
        c.say(
            (*path, "rope", "scaling"),
            f"{rope.scaling.kind} scaling without original_context",
            "it stretches wavelengths by how they compare with the context of the training",
            "add `original_context:`",
        )
    if rope.scaling is not None:
        c.run(_scaling, rope.scaling, (*path, "rope", "scaling"))


def _scaling(c: Checker, s: RopeScaling, path: tuple[str, ...]) -> None:
    upper, lower = ("beta_fast", "beta_slow") if s.kind == "yarn" else ("high_freq_factor", "low_freq_factor")
    if s.kind != "linear":
        above, below = getattr(s, upper), getattr(s, lower)
        if not above >= below > 0:
            c.say(
                (*path, upper),
                f"{upper} is {above:g}, {lower} {below:g}",
                "frequencies above the one are kept, those below the other divided, and a line lies between",
                f"make {lower} greater than 0 and {upper} no less than that",
            )
    if s.factor < 1:
        c.say((*path, "factor"), f"factor is {s.factor:g}", "frequencies are divided by it, for a longer context", "write 1 or more")
    if s.attention_factor is not None and s.attention_factor <= 0:
        c.say((*path, "attention_factor"), f"attention_factor is {s.attention_factor:g}", "it scales cosine and sine", "write a number above 0")


_CHECKS = {Gqa: _gqa, Mla: _mla, Linear: _linear}
CHECKS = (mixers,)
