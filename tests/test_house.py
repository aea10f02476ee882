"""Rules of the house that a reader relies on: no model below the spec, stages import only what stands before them."""
from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
STAGES = {"errors": set(), "targets": {"errors"}, "spec": {"errors", "targets"}, "graph": {"errors", "spec"},
          "reference": {"errors", "spec", "graph", "pack"}, "plan": {"errors", "targets", "spec", "graph"},
          "check": {"errors", "plan"}, "emit": {"errors", "targets", "spec", "graph", "plan"},
          "importing": {"errors", "targets", "spec", "graph", "plan", "pack"},
          "pack": {"errors", "targets", "spec", "graph", "plan"}}
MODELS = re.compile(r"\b(kimi|qwen|deepseek|mixtral|llama(?!3\b)|gemma|gpt_?oss|muse|minimax|nemotron|smollm)", re.I)
DIMENSIONS = re.compile(r"\b(7168|3584|3072|33792|163840|896|1536|151936|18992|4608)\b")


def sources(*folders: str, endings=(".py", ".j2")):
    return [p for f in folders for p in sorted((ROOT / f).rglob("*")) if p.suffix in endings]


def test_no_model_and_no_dimension_below_the_spec():
    for path in sources("mkgen", "templates"):
        for n, line in enumerate(path.read_text().splitlines(), 1):
            prose = line.strip().startswith(("#", '"""')) or "arXiv" in line or "Source" in line
            assert prose or not MODELS.search(line) or '"""' in line, f"{path}:{n}: names a model: {line.strip()}"
            assert not DIMENSIONS.search(line), f"{path}:{n}: a model's dimension: {line.strip()}"


@pytest.mark.parametrize("stage", sorted(STAGES))
def test_a_stage_imports_only_what_stands_before_it(stage):
    folder = ROOT / "mkgen" / stage
    paths = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = [module] if module else [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                parts = (name or "").split(".")
                if parts[0] == "mkgen" and len(parts) > 1:
                    assert parts[1] in STAGES[stage] | {stage}, f"{path}: {stage} imports mkgen.{parts[1]}"


def test_one_idea_a_file():
    for path in sources("mkgen", "templates"):
        assert len(path.read_text().splitlines()) <= 400, f"{path} has over 400 lines"
