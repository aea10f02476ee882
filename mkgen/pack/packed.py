"""The folder of packed weights: its files and manifest, how it is read, and what it may replace."""
from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkgen.errors import MkgenError

MANIFEST = "manifest.json"
FORMAT = "mkgen packed weights"
PARTIAL = ".partial"                         # behind the folder's name while it is being written
PROGRESS = "progress.jsonl"                  # how far an unfinished folder is, see journal.py
OLD = ".old"                                 # behind the name of a folder that is being replaced
OURS = re.compile(r"(tape|experts(_\w+)?|embedding)\.\d+\.npy|" + re.escape(MANIFEST) + "|" + re.escape(PROGRESS))


@dataclass(frozen=True)
class Packed:
    """One rank's weights, mapped from their files, u32: tape [rows, 128], embedding [rows, 128], by name of the image
    experts [slots, rows, 128]."""
    tape: np.ndarray
    experts: dict[str, np.ndarray]
    embedding: np.ndarray
    manifest: dict


def file_name(name: str, rank: int) -> str:
    return f"{name}.{rank}.npy"


def read_manifest(directory: str | os.PathLike) -> dict:
    """The manifest of a finished folder; MkgenError if there is none, or none of ours."""
    path = Path(directory) / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        if manifest["format"] == FORMAT:
            return manifest
    except FileNotFoundError:
        raise MkgenError(f"{directory}: no {MANIFEST}, so no packed weights, or none that were finished\n"
                         "  fix: write them with mkgen pack") from None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise MkgenError(f"{path}: not a manifest of packed weights")


def load_packed(directory: str | os.PathLike, rank: int) -> Packed:
    """One rank's arrays, mapped read-only. MkgenError if that rank is not there, or a file not as the manifest says."""
    manifest = read_manifest(directory)
    if rank not in manifest["ranks"]:
        raise MkgenError(f"{directory}: holds ranks {manifest['ranks']}, not {rank}")
    arrays = {}
    for name, shape in manifest["shapes"].items():
        path = Path(directory) / file_name(name, rank)
        try:
            a = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as error:
            raise MkgenError(f"{path}: cannot be read: {error}") from None
        if a.dtype != np.uint32 or list(a.shape) != shape:
            raise MkgenError(f"{path}: {a.dtype} {list(a.shape)}, the manifest says uint32 {shape}")
        arrays[name] = a
    experts = {name: a for name, a in arrays.items() if name not in ("tape", "embedding")}
    return Packed(arrays["tape"], experts, arrays["embedding"], manifest)


# -- writing ---------------------------------------------------------------------------------------------------------

def check_target(out: Path, force: bool) -> None:
    """MkgenError unless `out` may be written: it is not there, or empty, or holds weights of ours only, and `force`."""
    if not out.exists():
        return
    if not out.is_dir():
        raise MkgenError(f"{out}: is a file; packed weights are a folder\n  fix: another --out")
    others = strangers(out)
    if others:
        raise MkgenError(f"{out}: holds {others[0]}, which mkgen did not write: it is not replaced\n"
                         "  fix: another --out, or empty the folder")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST).exists():
        raise MkgenError(f"{out}: holds weights without a {MANIFEST}: it is not replaced\n"
                         "  fix: another --out, or empty the folder")
    read_manifest(out)
    if not force:
        raise MkgenError(f"{out}: holds packed weights already\n  fix: another --out, or --force to replace them")


def new_array(path: Path, shape: Iterable[int]) -> np.memmap:
    """A .npy file of u32 zeros, mapped for writing, its space taken at once: a disk full later kills the process.

    Raises MkgenError if there is no room."""
    a = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=tuple(shape))
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as f:
            size = os.fstat(f.fileno()).st_size
            try:
                os.posix_fallocate(f.fileno(), 0, size)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    raise
                raise MkgenError(f"{path}: {error.strerror}, with {size / 1e9:.1f} GB of it to be written\n"
                                 "  fix: another --out, or make room") from None
    return a


def check_space(out: Path, needed: int) -> None:
    """MkgenError if the disk that `out` lies on has fewer than `needed` bytes left, what is in `<out>.partial` included."""
    place, partial = next(p for p in out.parents if p.exists()), out.with_name(out.name + PARTIAL)
    taken = sum(p.stat().st_blocks * 512 for p in partial.iterdir()) if partial.is_dir() else 0
    free = shutil.disk_usage(place).free + taken
    if free < needed:
        raise MkgenError(f"{out}: {needed / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free on {place}\n"
                         "  fix: another --out, or make room")


def strangers(folder: Path) -> list[str]:
    """What is in the folder that mkgen has not written."""
    return sorted(p.name for p in folder.iterdir() if not OURS.fullmatch(p.name))
