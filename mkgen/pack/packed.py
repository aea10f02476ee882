"""The folder of packed weights: its files and manifest, how it is read, and how it comes to be, whole or not at all."""
from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mkgen.errors import MkgenError

MANIFEST = "manifest.json"
FORMAT = "mkgen packed weights"
PARTIAL = ".partial"                         # behind the folder's name while it is being written
OLD = ".old"                                 # behind the name of a folder that is being replaced
OURS = re.compile(r"(tape|experts(_\w+)?|embedding)\.\d+\.npy|" + re.escape(MANIFEST))


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
    strangers = _strangers(out)
    if strangers:
        raise MkgenError(f"{out}: holds {strangers[0]}, which mkgen did not write: it is not replaced\n"
                         "  fix: another --out, or empty the folder")
    if not any(out.iterdir()):
        return
    if not (out / MANIFEST).exists():
        raise MkgenError(f"{out}: holds weights without a {MANIFEST}: it is not replaced\n"
                         "  fix: another --out, or empty the folder")
    read_manifest(out)
    if not force:
        raise MkgenError(f"{out}: holds packed weights already\n  fix: another --out, or --force to replace them")


@contextmanager
def new_folder(out: Path, force: bool) -> Iterator[Path]:
    """A folder `<out>.partial` to write into. It takes the place of `out` at the end, or vanishes if an error comes."""
    check_target(out, force)
    partial = out.with_name(out.name + PARTIAL)
    if partial.exists():                     # of a run that was killed
        if not partial.is_dir() or _strangers(partial):
            raise MkgenError(f"{partial}: is in the way, and not from mkgen\n  fix: move it, or another --out")
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        _replace(partial, out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def new_array(path: Path, shape: Iterable[int]) -> np.memmap:
    """A .npy file of u32 zeros, mapped for writing, its space taken at once: a disk full later kills the process."""
    a = np.lib.format.open_memmap(path, mode="w+", dtype=np.uint32, shape=tuple(shape))
    if hasattr(os, "posix_fallocate"):
        with open(path, "r+b") as f:
            os.posix_fallocate(f.fileno(), 0, os.fstat(f.fileno()).st_size)
    return a


def check_space(out: Path, needed: int) -> None:
    """MkgenError if the disk that `out` lies on has fewer than `needed` bytes left."""
    place = next(p for p in out.parents if p.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise MkgenError(f"{out}: {needed / 1e9:.1f} GB are to be written, {free / 1e9:.1f} GB are free on {place}\n"
                         "  fix: another --out, or make room")


def _replace(partial: Path, out: Path) -> None:
    old = out.with_name(out.name + OLD)
    if out.exists() and any(out.iterdir()):
        if old.exists():
            raise MkgenError(f"{old}: is in the way\n  fix: move it")
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
        return
    if out.exists():
        out.rmdir()
    partial.rename(out)


def _strangers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not OURS.fullmatch(p.name))
