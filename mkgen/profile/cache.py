"""Cycles that are known already: one small JSON file a piece, named by the hash of all that its code depends on."""
from __future__ import annotations

import hashlib
import json
import os
import tempfile
from pathlib import Path

from mkgen.profile.scoreboard import Cycles

FORMAT = 6                               # of the files, and of what the scoreboard makes of a listing: raised when either changes
_seen: dict[str, Cycles] = {}


def directory() -> Path:
    """$MKGEN_CACHE, or ~/.cache/mkgen; profiles lie in a folder of their own."""
    return Path(os.environ.get("MKGEN_CACHE") or Path.home() / ".cache" / "mkgen") / "profile"


def key(facts: object) -> str:
    return hashlib.sha256(json.dumps([FORMAT, facts], sort_keys=True).encode()).hexdigest()


def load(name: str) -> Cycles | None:
    """The cycles of a key, from this process or from disk; None: not known, or the file cannot be read."""
    if name not in _seen:
        try:
            raw = json.loads((directory() / name[:2] / f"{name}.json").read_text(encoding="utf-8"))
            _seen[name] = Cycles(raw["all"], raw["idle"], tuple(raw["loops"]), raw.get("until", 0.0))
        except (OSError, ValueError, KeyError):
            return None
    return _seen[name]


def store(name: str, found: Cycles, about: dict) -> None:
    """In one step, so that another process never reads half a file."""
    _seen[name] = found
    path = directory() / name[:2] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"all": found.all, "idle": found.idle, "loops": found.loops, "until": found.until, **about})
    handle, part = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(part, path)
