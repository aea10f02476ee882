"""Data files that travel with mkgen: `model_specs/hub/` of a checkout, `mkgen/hub/` of an installed wheel."""
from __future__ import annotations

from pathlib import Path


def hub_file(name: str) -> Path:
    packaged = Path(__file__).resolve().parents[1] / "hub"
    return (packaged if packaged.is_dir() else packaged.parents[1] / "model_specs" / "hub") / name
