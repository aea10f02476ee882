"""The committed modules are what `mkgen build` writes today, stand alone, and are short enough to be read."""
from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mkgen.emit.module import module_files

ROOT = Path(__file__).resolve().parents[1]
FLAGSHIPS = ("kimi_k3", "qwen3_30b_a3b")


@pytest.fixture(scope="module")
def plans(kimi_plan, qwen_plan):
    return {"kimi_k3": kimi_plan, "qwen3_30b_a3b": qwen_plan}


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_regenerating_changes_nothing(plans, name):
    folder = ROOT / "generated" / name
    files = module_files(plans[name])
    assert sorted(p.name for p in folder.iterdir() if p.is_file()) == sorted(files)
    for file, text in files.items():
        assert (folder / file).read_text() == text, f"generated/{name}/{file}: run `mkgen build model_specs/{name}.yaml`"


@pytest.mark.parametrize("name", FLAGSHIPS)
def test_it_imports_jax_and_numpy_only(name):
    allowed = {"jax", "numpy", *sys.stdlib_module_names}
    for path in (ROOT / "generated" / name).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots = {node.module.split(".")[0]}
            else:
                continue
            assert roots <= allowed, f"{path}: {roots - allowed}"


def test_a_person_can_read_it():
    paths = list((ROOT / "generated" / "kimi_k3").glob("*.py"))
    lines = [line for path in paths for line in path.read_text().splitlines()]
    assert len(lines) < 1500 and max(map(len, lines)) <= 100


def test_it_works_outside_the_checkout(tmp_path):
    """Copied into an engine, without mkgen on the path, the module gives its facts and shapes."""
    import shutil
    shutil.copytree(ROOT / "generated" / "qwen3_30b_a3b", tmp_path / "engine_model")
    code = ("import sys, engine_model as m; assert not any(n.startswith('mkgen') for n in sys.modules);"
            "print(m.SPEC['name'], m.weight_shapes()['tape'].shape)")
    done = subprocess.run([sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}"],
                          capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("qwen3_30b_a3b (")
