"""Linear recurrences: gated delta net, Kimi Delta Attention, lightning attention, Mamba-2, each a setting of one kind."""
from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from mkgen.graph.build import build_graph
from mkgen.graph.ir import SubLayer, Value
from mkgen.graph.kinds.recurrence import linear
from mkgen.graph.ops.recurrence import side_by_side
from mkgen.graph.weights import assemble
from mkgen.plan.planner import make_plan
from mkgen.prove.compile import compile_variant
from mkgen.prove.mini import mini_spec
from mkgen.reference.evaluate import Decoder, Env
from mkgen.reference.params import TensorParams
from mkgen.spec.mixers import Conv, Decay, Linear, LinearGate, LinearNorm
from mkgen.spec.model import Mlp
from mkgen.spec.validate import validate
from mkgen.targets import load_target
from small_specs import prove_kernel, spec

ORACLE = Path(__file__).parent / "oracle"
sys.path.insert(0, str(ORACLE))
import linear_mixers as oracle                                                          # noqa: E402

MESH4 = {"chip": 2, "core": 2}
FFN = {"mlp": Mlp(64)}
GDN = Linear(heads=8, key_heads=4, key_dim=40, value_dim=24, conv=Conv(4), norm=LinearNorm(), gate=LinearGate("silu"))
KDA = Linear(heads=4, key_dim=16, value_dim=48, decay=Decay("softplus", "channel", 12), conv=Conv(3, bias=True), write_scale=2.0,
             norm=LinearNorm(), gate=LinearGate("sigmoid", 20, bias=True))
LIGHTNING = Linear(heads=4, key_dim=32, value_dim=32, delta=False, decay=Decay("constant"), write="one", qk_l2=False, scale=1.0,
                   act=True, norm=LinearNorm("groups"), gate=LinearGate("sigmoid"))
MAMBA2 = Linear(heads=8, key_heads=2, key_dim=16, value_dim=64, delta=False, write="step", step_min=0.1, step_max=0.5, qk_l2=False,
                scale=1.0, conv=Conv(4, bias=True), skip=True, norm=LinearNorm("groups", 2, gate_first=True), gate=LinearGate("silu"))


# -- the reference against transformers --------------------------------------------------------------------------------

def mamba2(groups: int, eps: float) -> tuple[Linear, dict[str, str]]:
    """Eight heads of 16, state 24: z, then x, B, C together, then dt."""
    a = Linear(heads=8, key_heads=groups, key_dim=24, value_dim=16, delta=False, write="step", qk_l2=False, scale=1.0, conv=Conv(4, True),
               skip=True, norm=LinearNorm("groups", groups, eps, gate_first=True), gate=LinearGate("silu"))
    b, c, end = 128, 128 + 24 * groups, 128 + 48 * groups
    cuts = {"v": (0, b), "k": (b, c), "q": (c, end)}
    return a, {"g": "in_proj.weight | rows 0:128", "f": f"in_proj.weight | rows {128 + end}:{136 + end}", "d": "D", "o": "out_proj.weight",
               **{r: f"in_proj.weight | rows {128 + i}:{128 + j}" for r, (i, j) in cuts.items()},
               **{f"{r}_conv": f"conv1d.weight | rows {i}:{j}" for r, (i, j) in cuts.items()},
               **{f"{r}_conv_bias": f"conv1d.bias | rows {i}:{j}" for r, (i, j) in cuts.items()}}


def one_conv(keys: int, values: int) -> dict[str, str]:
    return {f"{r}_conv": f"conv1d.weight | rows {i}:{j}" for r, i, j in
            (("q", 0, keys), ("k", keys, 2 * keys), ("v", 2 * keys, 2 * keys + values))}


NET = Linear(heads=4, key_heads=2, key_dim=16, value_dim=24, conv=Conv(4), norm=LinearNorm(), gate=LinearGate("silu"))
PROJECTIONS = {r: f"{r}_proj.weight" for r in ("q", "k", "v", "g", "b", "o", "f_a", "f_b", "g_a", "g_b")}
LOG = {"a_log": "A_log", "dt_bias": "dt_bias", "o_norm": "norm.weight"}
CASES = {
    "Qwen3NextGatedDeltaNet": (NET, {
        **one_conv(32, 96), "q": "in_proj_qkvz.weight | each 128 0:16", "k": "in_proj_qkvz.weight | each 128 16:32",
        "v": "in_proj_qkvz.weight | each 128 32:80", "g": "in_proj_qkvz.weight | each 128 80:128",
        "b": "in_proj_ba.weight | each 4 0:2", "f": "in_proj_ba.weight | each 4 2:4", "o": "out_proj.weight"}),
    "Qwen3_5MoeGatedDeltaNet": (NET, {
        **one_conv(32, 96), "q": "in_proj_qkv.weight | rows 0:32", "k": "in_proj_qkv.weight | rows 32:64",
        "v": "in_proj_qkv.weight | rows 64:160", "g": "in_proj_z.weight", "b": "in_proj_b.weight", "f": "in_proj_a.weight",
        "o": "out_proj.weight"}),
    "OlmoHybridGatedDeltaNet": (replace(NET, key_heads=4, write_scale=2.0, norm=LinearNorm(eps=1e-5)), {
        **PROJECTIONS, **one_conv(64, 96), "f": "a_proj.weight", "o_norm": "o_norm.weight"}),
    "KimiLinearDeltaAttention": (Linear(heads=4, key_dim=16, value_dim=16, decay=Decay("softplus", "channel", 16), conv=Conv(4),
                                        norm=LinearNorm(eps=1e-5), gate=LinearGate("sigmoid", 16)), {
        **PROJECTIONS, **one_conv(64, 64), "o_norm": "o_norm.weight", "a_log": "forget_gate.A_log", "dt_bias": "forget_gate.dt_bias",
        "f_a": "forget_gate.f_a_proj.weight", "f_b": "forget_gate.f_b_proj.weight"}),
    "MiniMaxLightningAttention": (replace(LIGHTNING, key_dim=16, value_dim=16), {
        "q": "qkv_proj.weight | each 48 0:16", "k": "qkv_proj.weight | each 48 16:32", "v": "qkv_proj.weight | each 48 32:48",
        "g": "output_gate.weight", "o": "out_proj.weight"}),
    "GraniteMoeHybridMambaLayer": mamba2(1, 1e-6),
    "NemotronHMamba2Mixer": mamba2(2, 1e-5),
}


def shapes_of(a: Linear, names: dict[str, str]) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape: a role's own, or, where roles are cuts of one tensor, as many rows as all of them have."""
    from mkgen.spec.roles import kind_tensors
    roles = {t.role.partition(".")[2]: t.shape for t in kind_tensors("x", a, oracle.HIDDEN)}
    out: dict[str, tuple[int, ...]] = {}
    for role, shape in roles.items():
        tensor, _, cut = names[role].partition(" | ")
        out[tensor] = (out.get(tensor, (0,))[0] + shape[0], *shape[1:]) if cut else shape
    return out


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_transformers(name: str) -> None:
    a, names = CASES[name]
    names = {**LOG, **names}
    tensors = {n: oracle.weights(n, shape) for n, shape in shapes_of(a, names).items()}
    ops, y = linear("x", a, Value("h", oracle.HIDDEN), SimpleNamespace(model=SimpleNamespace(layers=oracle.LAYERS)))
    sub = SubLayer("x", "mixer", tuple(ops))
    graph = SimpleNamespace(sublayers=lambda: [sub], layers=(("x", None),))
    decoder = Decoder(graph, TensorParams(tensors, {f"x.{r}": n for r, n in names.items()}), oracle.BATCH, 64, exact=True)
    inputs, have = oracle.inputs(name), []
    for t in range(oracle.TOKENS):
        env = Env(decoder, None, jnp.full((oracle.BATCH,), t, jnp.int32))
        env.values["h"] = jnp.asarray(inputs[:, t])
        env.run(sub, oracle.LAYER, 0)
        have.append(np.asarray(env.values[y.name]))
    want = np.load(ORACLE / "linear_mixers.npz")[name]
    assert np.abs(want).max() > 0.5
    assert np.abs(np.stack(have, 1) - want).max() < 1e-5


def test_lightning_decays_differ_by_layer_and_head() -> None:
    """exp(-s) with the slopes 2^-2, 2^-4 .. of four heads, almost not at all in the last layer."""
    first, last = (assemble("lightning_decay(4,3)", layer=n) for n in (0, 2))
    assert np.allclose(-np.log(first), np.array([2.0 ** -2, 2.0 ** -4, 2.0 ** -6, 2.0 ** -8]) * (1 + 1e-5), rtol=1e-4)
    assert (last > 0.9999).all() and (last < 1).any()


# -- the kernel against the reference ----------------------------------------------------------------------------------

@pytest.mark.slow
def test_four_kinds_on_two_ranks() -> None:
    mixers = {"gdn": GDN, "kda": KDA, "lightning": LIGHTNING, "mamba": MAMBA2}
    prove_kernel(spec(2, mixers, FFN, "gdn lightning kda mamba lightning", "mlp*5", 128))


@pytest.mark.slow
def test_few_key_heads_and_norms_that_span_ranks() -> None:
    """One key head on four ranks, whose six heads leave a rank half empty; two heads that each lie on two ranks."""
    one = replace(MAMBA2, heads=6, key_heads=1, norm=LinearNorm("groups", 1, gate_first=True))
    repeated = Linear(heads=2, key_dim=16, value_dim=20, decay=Decay("floor", "head", 0, -3.0), norm=LinearNorm("groups", 2),
                      gate=LinearGate("sigmoid"))
    prove_kernel(spec(4, {"one": one, "repeated": repeated}, FFN, "one repeated one", "mlp*3", 128, mesh=MESH4))


@pytest.mark.slow
def test_odd_heads_in_a_rolled_loop() -> None:
    """Channels' decays at full rank, key heads with several heads each, no gate, no norm; more blocks than one trip takes."""
    many = Linear(heads=18, key_dim=20, value_dim=72, delta=False, decay=Decay("softplus", "channel"), conv=Conv(2))
    shared = Linear(heads=6, key_heads=2, key_dim=24, value_dim=80, decay=Decay("floor", "channel", 0, -2.0), write="one", write_scale=0.5,
                    act=True, skip=True, gate=LinearGate("silu", 8))
    bare = Linear(heads=26, key_heads=13, key_dim=8, value_dim=64, decay=Decay("constant"), norm=LinearNorm("groups", 13))
    prove_kernel(spec(1, {"many": many, "shared": shared, "bare": bare}, FFN, "many shared bare", "mlp*3", 192, activations="f32",
                      block_kib=512))


# -- layouts -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("keys", "width", "want"), [
    (16, 256, 1), (8, 128, 1),                   # whole lanes as they are
    (1, 512, 1),                                 # eight heads of 64 that share a key head
    (32, 64, 2), (6, 64, 2), (4, 32, 4),         # as many key heads as fill 128 lanes
    (30, 192, 2), (7, 64, 7), (5, 48, 5),        # what leaves the fewest lanes empty
])
def test_key_heads_side_by_side_leave_few_lanes_empty(keys: int, width: int, want: int) -> None:
    assert side_by_side(keys, width) == want


# a model's share of the layer at its real width: the whole of it on a core, or an eighth
FULL = {
    "gdn": lambda: spec(1, {"x": Linear(heads=32, key_heads=16, key_dim=128, value_dim=128, conv=Conv(4), norm=LinearNorm(),
                                        gate=LinearGate("silu"))}, {"mlp": Mlp(512)}, "x", "mlp", 2048, rows=(1,), block_kib=2048),
    "mamba": lambda: spec(8, {"x": Linear(heads=64, key_heads=8, key_dim=128, value_dim=64, delta=False, write="step", qk_l2=False, scale=1.0,
                                          conv=Conv(4, True), skip=True, norm=LinearNorm("groups", 8, 1e-5, True),
                                          gate=LinearGate("silu"))}, {"mlp": Mlp(1856)}, "x", "mlp", 2688, rows=(8,),
                          mesh={"chip": 4, "core": 2}, block_kib=2048),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FULL)
def test_full_width_compiles(name: str) -> None:
    made = FULL[name]()
    result = compile_variant(make_plan(made, build_graph(made), load_target(made.build.chip)), made.build.rows[0])
    assert result.verdict == "pass", result.reasons


def test_mamba_states_have_no_empty_lanes() -> None:
    made = FULL["mamba"]()
    plan = make_plan(made, build_graph(made), load_target(made.build.chip))
    assert plan.buffers["x_matrix"].shape == (1, "rows", 1, 128, 512)


# -- specs -------------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize(("change", "said"), [
    (dict(write="step", decay=Decay("softplus", "channel")), "write: step without a softplus decay a head"),
    (dict(decay=Decay("constant", "channel")), "a constant decay a channel"),
    (dict(decay=Decay("constant", rank=4)), "rank 4 of a constant decay"),
    (dict(step_min=0.5, step_max=0.1), "the step lies between 0.5 and 0.1"),
    (dict(step_min=0.5, decay=Decay("floor")), "a bound of the step with a decay of kind floor"),
    (dict(act=True), "act and conv"),
    (dict(gate=LinearGate(bias=True)), "a bias of a gate without a low rank"),
    (dict(gate=None, norm=LinearNorm(gate_first=True)), "gate_first without a gate"),
    (dict(norm=LinearNorm("groups", 5)), "192 channels cannot be cut into 5 groups"),
    (dict(key_heads=3), "8 heads cannot share 3 key_heads evenly"),
])
def test_refusals(change: dict, said: str) -> None:
    made = spec(1, {"x": GDN}, FFN, "x", "mlp", 128)
    model = replace(made.model, mixers={"x": replace(GDN, **change)})
    assert said in [p.what for p in validate(replace(made, model=model))]


def test_the_mini_keeps_what_a_norm_spans() -> None:
    """Groups that lie within a rank still do, those that do not still do not; key and value widths stay different."""
    apart = mini_spec(FULL["mamba"]()).model.mixers["x"]
    assert apart.key_dim > apart.value_dim and apart.norm.groups > 1
    one = FULL["mamba"]()
    wide = replace(one, model=replace(one.model, mixers={"x": replace(one.model.mixers["x"], norm=LinearNorm("groups", 1))}))
    for made, spans in ((one, False), (wide, True)):
        mini = mini_spec(made)
        plan = make_plan(mini, build_graph(mini), load_target(mini.build.chip))
        assert ("gated_norm_squares" in plan.buffers) == spans
