"""Every committed spec at full size: planned within its chip, found right by the checker, printed; some through the TPU compiler.

Nothing that a user may name, and no width, makes a line of the generated module too long."""
from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from mkgen.check import check_plan
from mkgen.emit.module import module_files
from mkgen.emit.wrap import long_lines, wrap
from mkgen.graph.build import build_graph
from mkgen.plan.figures import figures
from mkgen.plan.planner import make_plan
from mkgen.plan.tape import Part, plan_matrix
from mkgen.prove.compile import compile_spec
from mkgen.show import models
from mkgen.spec.load import load_spec
from mkgen.spec.model import Run, Spec
from mkgen.targets import load_target

SPECS = sorted((Path(__file__).resolve().parent.parent / "model_specs").glob("*.yaml"))
NAMED = {path.stem: path for path in SPECS}
PADDED = 0.08                            # of the streamed bytes: more is a bad choice of mesh factors, or of layouts
NARROW = {"kimi_k2": 0.12}               # 48 and 18 columns a rank, in a format that is stored in panels of 128 only


def planned(spec: Spec):
    return make_plan(spec, build_graph(spec), load_target(spec.build.chip))


def renamed(spec: Spec, length: int) -> Spec:
    """The same model, each of its kinds with a name of so many letters."""
    m = spec.model

    def new(kind: str | None) -> str | None:
        return kind and (kind + "_and_so_on" * length)[:length - 1] + "x"

    def role(name: str) -> str:
        kind, dot, rest = name.partition(".")
        return (new(kind) if kind in m.mixers or kind in m.ffns else kind) + dot + rest

    mixers, ffns = ({new(name): kind for name, kind in kinds.items()} for kinds in (m.mixers, m.ffns))
    model = replace(m, mixers=mixers, ffns=ffns, schedule=tuple(Run(new(run.mixer), new(run.ffn)) for run in m.schedule),
                    checkpoint={role(name): entry for name, entry in m.checkpoint.items()}, name=f"{m.name}_{'of_some_kind_' * 3}")
    return replace(spec, model=model, build=replace(spec.build, replicate=tuple(map(role, spec.build.replicate))))


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_every_committed_spec_builds(path):
    plan = planned(load_spec(path))
    assert [str(finding) for finding in check_plan(plan)] == []
    files = module_files(plan)
    assert long_lines(files) == []
    ast.parse(files["kernel.py"])
    assert all(0 <= figures(plan, rows)["padding_fraction"] < NARROW.get(path.stem, PADDED) for rows in plan.spec.build.rows)


@pytest.mark.parametrize("path", SPECS, ids=lambda p: p.stem)
def test_no_name_makes_a_line_too_long(path):
    plan = planned(renamed(load_spec(path), 24))
    assert check_plan(plan) == [] and long_lines(module_files(plan)) == []


def test_a_narrow_matrix_takes_the_layout_of_fewer_bytes():
    """Of two layouts that take one time, also where K is no multiple of the lanes."""
    for k, n in ((2048, 8), (2880, 4), (2688, 16)):
        m, _ = plan_matrix("x", (Part("w", n),), k, False, 4096, load_target("tpu7x"))
        assert (m.layout, m.k_padded, m.n_padded, m.blocks) == ("lanes", -(-k // 128) * 128, 16, 1)


# -- long lines ---------------------------------------------------------------------------------------------------------

TEXT = '''\
"""The first words of a docstring, which goes on for longer than a line can be,
and has another line that
is joined.

    an(indented, line)  # stays by itself
"""
x = {
    "one": 1,  # a comment that is very long, because somebody chose a long name for what it is about
}


def f():
    """One line that is just too long for the line on which it stands, with its quotes and all."""
    # a comment of its own that is also somewhat longer than what a line may have in columns
    return x  # short
'''


def test_what_is_wrapped_stays_the_same_program():
    made = wrap(TEXT, 60)
    assert all(len(line) <= 60 for line in made.split("\n"))
    assert wrap(made, 60) == made and wrap(TEXT, 120) == TEXT
    words = [" ".join(text.replace("#", "").split()) for text in (TEXT, made)]
    assert sorted(words[0].split()) == sorted(words[1].split())
    old, new = ast.parse(TEXT), ast.parse(made)
    for tree in (old, new):
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = " ".join(node.value.split())
    assert ast.dump(old) == ast.dump(new)
    assert "and has another line that is joined." in made.replace("\n", " ")


def test_a_word_is_never_cut():
    text = f'"""{"long" * 30}: a name"""\n# {"long" * 30} too\n'
    assert wrap(text).split("\n")[0] == f'"""{"long" * 30}:'
    assert long_lines({"kernel.py": wrap(text)}) and ast.parse(wrap(text))


# -- the table ----------------------------------------------------------------------------------------------------------

def test_a_spec_that_fails_is_a_line_of_the_table(tmp_path, monkeypatch):
    """Neither a mistake in a spec nor a defect of mkgen ends the page."""
    good = NAMED["smollm2_135m"].read_text()
    for name, text in (("a_mistake", good.replace("heads: 9", "heads: 0")), ("b_defect", good), ("c_good", good)):
        (tmp_path / f"{name}.yaml").write_text(text)
    real = models.measured

    def measured(path, compile_too):
        if path.stem == "b_defect":
            raise KeyError("a | b")
        return real(path, compile_too)

    monkeypatch.setattr(models, "measured", measured)
    assert not models.make(tmp_path.glob("*.yaml"), False, tmp_path / "page.md", False)
    rows = [line for line in (tmp_path / "page.md").read_text().split("\n") if line.startswith("| [")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    assert len({len(row) for row in cells}) == 1 and [row[-1].split(":")[0] for row in cells] == ["fail", "fail", "pass"]
    assert "heads" in cells[0][-1] and cells[1][-1] == "fail: internal error: KeyError: 'a \\| b'"


# -- the compiler -------------------------------------------------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen3_next_80b_a3b", "minimax_text_01"])
def test_full_size_compiles(name):
    """mxfp4 experts in pieces, windows and sinks; delta rule with gated attention; decay a head and softmax over two hosts."""
    [result] = compile_spec(planned(load_spec(NAMED[name])), 1)
    assert result.verdict == "pass", result.reasons
