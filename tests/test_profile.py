"""Listings, the scoreboard, the cut into pieces; and one small plan through the TPU compiler, with its cache."""
from __future__ import annotations

from dataclasses import replace

import pytest

from mkgen.emit.printer import Printer
from mkgen.emit.render import kernel_environment, kernel_text
from mkgen.graph.build import build_graph
from mkgen.plan.planner import make_plan
from mkgen.plan.regions import Collective, Start, Step, Wait, advances, walk
from mkgen.profile import cache, canonical, compiling, profile_plan
from mkgen.profile.listing import UnreadableListing, parse
from mkgen.profile.pieces import Exchange, Fork, Run, Turn, cut_plan
from mkgen.profile.pytext import Definitions, names
from mkgen.profile.scoreboard import Board, cycles_of_loop
from mkgen.spec.model import Gqa, Moe, Router
from mkgen.targets import load_target
from small_specs import spec

HEAD = "LH: loop header\n= control target key end\n"


def small_plan(**build):
    """Two ranks, two layers of attention and routed experts."""
    made = spec(2, {"a": Gqa(heads=4, kv_heads=2, head_dim=64)}, {"m": Moe(experts=8, top_k=2, width=128, router=Router(score="softmax"))},
                "a*2", "m*2", 256, rows=(1, 8), **({"expert_slots": 3} | build))
    return make_plan(made, build_graph(made), load_target(made.build.chip))


def listing(*bundles: str):
    return parse(HEAD + "\n".join(f"  {n:#x} : {{ {b} }}" for n, b in enumerate(bundles)))


def board(made) -> Board:
    found = Board(made, False)
    found.run(0, len(made.bundles) - 1, made.loops)
    return found


# -- listings and the scoreboard ----------------------------------------------------------------------------------------

def test_a_bundle_takes_a_cycle():
    assert board(listing("%s1_s0 = smov.u32 4", "", "%2 = sst [smem:[#a]] %s1_s0")).now == 3


@pytest.mark.parametrize("push, pop, cycles", [
    ("%4 = vmax.xlane.f32.xlu0 %v2_v0", "%v5_v1 = vpop.xlane.xlu0 %4", 141),
    ("%4 = vrot.lane.b32.xlu1 %v2_v0, 3", "%v5_v1 = vpop.permute.xlu1 %4", 127),
    ("%4 = vrsqrt.f32 %v2_v0", "%v5_v1 = vpop.erf %4", 10),
    ("%4 = vpush %v2_v0", "%s5_s1 = spop %4", 49),
    ("%4 = vmatmul.mubr.bf16.vlgmr.msra.gmra.mrb[0].mxu0 %v2_v0", "%v5_v1 = vpop.f32.mrb[0].mxu0", 188),
])
def test_a_result_is_waited_for(push, pop, cycles):
    """The distances on the critical paths that libtpu prints."""
    assert board(listing(push, pop)).now == 1 + cycles
    assert board(listing(push, pop.replace("xlu0 %4", "xlu0 %9").replace("permute.xlu1 %4", "permute.xlu1 %9")
                         .replace("erf %4", "erf %9").replace("spop %4", "spop %9").replace("mrb[0]", "mrb[4]"))).now == 2


def test_an_mxu_takes_a_push_in_four_cycles_and_there_are_two():
    push = "vmatpush1.bf16.msra.mxu{} %v{}_v3"
    assert board(listing(*[push.format(0, n) for n in range(5)])).now == 1 + 4 * 4
    both = [push.format(0, n) + "  ;;  " + push.format(1, n) for n in range(5)]
    assert board(listing(*both)).now == 1 + 4 * 4


def test_a_vector_result_takes_two_cycles():
    assert board(listing("%v3_v1 = vadd.f32 %v1_v0, %v1_v0", "%v4_v2 = vmul.f32 %v3_v1, %v3_v1")).now == 3
    assert board(listing("%v3_v1 = vadd.f32 %v1_v0, %v1_v0", "%v4_v2 = vmul.f32 %v1_v0, %v1_v0")).now == 2


def loop(trips: str, *body: str) -> list[str]:
    """A loop's bundles, with its six delay slots."""
    test = f"%p1_p0 = scmp.ge.s32.totalorder %s1_s0, {trips} /* loop exit test */"
    return [body[0] + " /* Start region 7 */", *body[1:], test, "%9 = sbr.rel (!%p1_p0) target = $region7", *[""] * 6]


def test_a_loop_turns_as_often_as_its_test_says():
    made = listing("", *loop("5", "", ""))
    assert [(x.first, x.last, x.trips) for x in made.loops] == [(1, 10, 5)]
    assert board(made).now == 1 + 5 * 10
    assert cycles_of_loop(made).all == 10


def test_a_loop_may_begin_at_another_number():
    counter = "%s1_s0 = sadd.s32 1, %s5_s0  ;;  %s5_s0 = sphi %s3_s0, %s1_s0"
    assert [x.trips for x in listing("%s3_s0 = smov.u32 2", *loop("5", counter, "")).loops] == [3]


def test_trips_that_depend_on_data_are_told_apart():
    inner = [line.replace("region7", "region8").replace("region 7", "region 8").replace("p1_p0", "p3_p2") for line in loop("%s4_s3", "", "", "")]
    made = listing(*loop("%s9_s8", "", *inner))
    found = cycles_of_loop(made)
    assert [x.trips for x in made.loops] == [None] and [x.trips for x in made.loops[0].inside] == [None]
    assert (found.all, found.loops) == (9, (11,))


def test_a_condition_is_taken_or_skipped():
    skipped = ["%7 = sbr.rel (!%p5_p4) target = $region9", *[""] * 6, *[""] * 20, " /* Start region 9 */"]
    found = cycles_of_loop(listing(*loop("%s9_s8", "", *skipped)))
    assert found.all - found.idle == 20


def test_work_behind_the_last_wait():
    found = cycles_of_loop(listing(*loop("%s9_s8", "", "%2 = dma.done.wait [#a], 16", "", "%3 = dma.done.wait [#a], 16", "", "")))
    assert found.all - found.until == len(loop("1", "", "")) and found.until == 4


def test_another_format_is_refused():
    with pytest.raises(UnreadableListing):
        parse("nothing that is known")
    with pytest.raises(UnreadableListing, match="target"):
        listing("%1 = sbr.rel (%p1_p0) target = $region44")


# -- pieces -------------------------------------------------------------------------------------------------------------

def test_names_of_straight_code():
    assert names("x = f(a)\ny = [x + z for z in b]\nx += c") == (("a", "f", "b", "c"), ("x", "y"))
    assert names("for i in r:\n    s, t = i, u\n    s = s + t") == (("r", "u"), ("i", "s", "t"))
    assert names("def g(p, q=d):\n    return p + q + e\nk = lambda v: v + w") == (("d", "e", "w"), ("g", "k"))


def leaves(items):
    for item in items:
        if isinstance(item, Turn):
            yield from leaves(item.body)
        elif isinstance(item, Fork):
            for case in item.cases:
                yield from leaves(case)
        else:
            yield item


@pytest.mark.parametrize("name", ["qwen", "kimi"])
def test_pieces_hold_every_node_once(name, request):
    plan = canonical(request.getfixturevalue(f"{name}_plan"))
    kernel = Definitions(kernel_text(plan))
    items, pieces = cut_plan(Printer(kernel_environment(plan), plan), plan, kernel)
    for region in plan.regions.values():
        found = list(leaves(items[region.name]))
        runs = [x for x in found if isinstance(x, Run)]
        nodes = [n for n in walk(region.body)]
        assert sum(len(r.steps) for r in runs) == sum(isinstance(n, Step) for n in nodes)
        assert sum(len(r.waits) for r in runs) == sum(isinstance(n, Wait) for n in nodes)
        assert sum(isinstance(t, Start) for r in runs for t in r.tail) == sum(isinstance(n, Start) for n in nodes)
        assert sum(isinstance(x, Exchange) for x in found) == sum(isinstance(n, Collective) for n in nodes)
        assert all(x.piece in pieces for x in found)
    for piece in pieces:                                 # a piece's function needs nothing but the kernel's names
        free = set(names(piece.function)[0]) - set(kernel.owner) - {"stir", "keep"}
        assert not free, (piece.op, free)


def test_a_plan_consumes_what_its_pieces_do(qwen_plan):
    plan = canonical(qwen_plan)
    items, _ = cut_plan(Printer(kernel_environment(plan), plan), plan, Definitions(kernel_text(plan)))

    def count(found) -> int:
        return sum(count(i.body) * int(i.loop.trips) if isinstance(i, Turn) and count(i.body) else
                   sum(advances(t) for t in i.tail) if isinstance(i, Run) else 0 for i in found)

    for region in plan.regions.values():
        assert count(items[region.name]) == len(region.chunks)


# -- through the compiler -----------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def profiled(folder):
    """The profile of the small plan, made with an empty cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MKGEN_CACHE", str(folder))
        patch.setattr(cache, "_seen", {})
        yield profile_plan(small_plan(), 1)


def test_every_piece_has_cycles(profiled):
    by_op = {}
    for piece in profiled.pieces:
        found = profiled.of(piece)
        assert 0 <= found.idle <= found.all
        by_op[piece.region, piece.op] = max(by_op.get((piece.region, piece.op), 0), found.all)
    assert profiled.new > 20
    # a norm waits for a lane reduction and an rsqrt, an expert for two products, one behind the other
    assert max(cycles for (_, op), cycles in by_op.items() if op.startswith("a.norm")) > 141 and by_op["m", "m.experts"] > 2 * 188


def test_a_known_piece_is_not_compiled_again(profiled, folder, monkeypatch):
    assert profile_plan(small_plan(), 1).new == 0
    monkeypatch.setattr(compiling.subprocess, "run", None)
    for other in (small_plan(ring_depth=4), small_plan(expert_slots=2)):            # another plan, the same pieces
        again = profile_plan(other, 1)
        assert again.new == 0
        assert [again.of(p) for p in again.pieces] == [profiled.of(p) for p in profiled.pieces]
    monkeypatch.setattr(cache, "_seen", {})              # from disk
    assert profile_plan(small_plan(), 1).new == 0
    with pytest.raises(TypeError):                       # other blocks are other code
        profile_plan(small_plan(block_kib=64), 1)


def test_a_piece_that_does_not_compile_is_named(profiled):
    broken = replace(profiled.pieces[0], function="def piece(m, at):\n    lax.fori_loop(0, at[0], 3)")
    job = compiling.Job("from jax import lax", 1, 1, "tpu7x:1x1x1", 2**26, {})
    with pytest.raises(compiling.NotProfiled, match="begin/broken"):
        compiling.measure(job, [compiling.Asked("no such key", broken.function, (), False, True, "begin/broken")])
