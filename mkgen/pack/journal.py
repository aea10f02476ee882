"""The folder in which a pack grows, `<out>.partial`, and the record of how far it is: so that the next run goes on.

`progress.jsonl` has one JSON object a line. The first says what is packed out of what; then, once all files are there, in full
size, each line says how many weights have reached the disk, in the order in which they are always written. A line is written when
the files have been synced, so that what it says is true after a crash; weights behind the last line are written again. Its
writer holds a lock on it.
"""
from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from mkgen.errors import MkgenError
from mkgen.pack.packed import OLD, PARTIAL, PROGRESS, new_array, strangers, read_manifest

RECORD = 1                                   # version of the record


class Partial:
    """The folder of an unfinished pack. facts: what it is made of, by a word for the user; another run must have the same.

    done: weights that are on disk. notes: what the runs before have counted."""

    def __init__(self, out: Path, facts: dict):
        self.out, self.path = out, out.with_name(out.name + PARTIAL)
        self.facts = json.loads(json.dumps({"record": RECORD, **facts}))
        self.done, self.notes = 0, []
        self._arrays: list[np.memmap] = []
        if self.path.exists() and (not self.path.is_dir() or strangers(self.path)):
            raise MkgenError(f"{self.path}: is in the way, and not from mkgen\n  fix: move it, or another --out")
        self.path.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path / PROGRESS, "a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise MkgenError(f"{self.path}: another mkgen pack is writing here\n  fix: wait for it, or another --out") from None
        try:
            self._created = self._read()
        except BaseException:
            self._file.close()
            raise

    def _read(self) -> bool:
        """Takes up what the record says; False if there is nothing to go on with."""
        self._file.seek(0)
        lines = []
        text = self._file.read()
        whole = 0
        for line in text.splitlines(keepends=True):
            try:
                if not line.endswith(b"\n"):
                    break
                lines.append(json.loads(line))
            except ValueError:               # the writer died, or the machine
                break
            whole += len(line)
        self._file.truncate(whole)
        if len(lines) < 2:
            return False
        before, now = lines[0], self.facts
        other = [word for word in now if before.get(word) != now[word]]
        if other:
            raise MkgenError(f"{self.path}: was begun with another {', another '.join(other)}\n"
                             "  why: the rest of these weights would not be of one model\n"
                             f"  fix: the same command as before to go on with it; delete {self.path} to begin anew")
        self.done = max(line["done"] for line in lines[1:])
        self.notes = [line["notes"] for line in lines[1:] if "notes" in line]
        return True

    def arrays(self, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, np.ndarray]:
        """File name -> u32 array, mapped for writing: those that are there, or new ones of zeros."""
        wanted = dict(wanted)
        if self._created:
            out = {name: self._opened(self.path / name, shape) for name, shape in wanted.items()}
        else:
            for path in self.path.iterdir():
                if path.name != PROGRESS:
                    path.unlink()
            self._file.truncate(0)
            self._write(self.facts)
            try:
                out = {name: new_array(self.path / name, shape) for name, shape in wanted.items()}
            except MkgenError:               # no room: what there was is given back
                self.remove()
                raise
            self._arrays = list(out.values())
            self._sync()
            _sync_folder(self.path)
            self._write({"done": 0})
        self._arrays = list(out.values())
        return {name: np.asarray(a) for name, a in out.items()}

    def _opened(self, path: Path, shape: tuple[int, ...]) -> np.memmap:
        try:
            a = np.load(path, mmap_mode="r+", allow_pickle=False)
            if a.dtype == np.uint32 and a.shape == tuple(shape):
                return a
        except (OSError, ValueError):
            pass
        raise MkgenError(f"{path}: is not the file that was begun\n  fix: delete {self.path} to begin anew")

    def record(self, done: int, notes: dict | None = None) -> None:
        """All that the arrays hold is on disk, and so is the fact that `done` weights are."""
        self._sync()
        self._write({"done": done, **({"notes": notes} if notes else {})})
        self.done = done

    def finish(self, manifest: str, name: str) -> None:
        """The folder with its manifest takes the place of `out`."""
        self._sync()
        with open(self.path / name, "w") as f:
            f.write(manifest)
            f.flush()
            os.fsync(f.fileno())
        _sync_folder(self.path)
        _replace(self.path, self.out)
        (self.out / PROGRESS).unlink()
        _sync_folder(self.out.parent)
        self._file.close()

    def remove(self) -> None:
        """Nothing of it will be of use."""
        self._arrays = []
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()

    def close(self) -> None:
        self._file.close()

    def _sync(self) -> None:
        for a in self._arrays:
            a.flush()

    def _write(self, line: dict) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _sync_folder(path: Path) -> None:
    """The names in a folder, not only what they stand for."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    except OSError as error:                 # not every file system can
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


def _replace(partial: Path, out: Path) -> None:
    """`partial` becomes `out`; killed between any two steps, the next run puts it right."""
    old = out.with_name(out.name + OLD)
    if old.exists():
        if not old.is_dir() or strangers(old):
            raise MkgenError(f"{old}: is in the way\n  fix: move it")
        shutil.rmtree(old)                   # of a run that was killed while it replaced
    if out.exists() and any(out.iterdir()):
        out.rename(old)
    elif out.exists():
        out.rmdir()
    partial.rename(out)
    if old.exists():
        shutil.rmtree(old)
