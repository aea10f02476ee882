"""A Hugging Face checkpoint folder as named tensors that are read one at a time.

A safetensors file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
bytes. It is read here directly because safetensors' numpy frontend knows no bfloat16. The headers of all
shards are read, and held against the sizes of the files, at once; tensors when asked for.
"""
from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from mkgen.errors import MkgenError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# safetensors' name -> the name used in mkgen and the numpy dtype; other dtypes can be listed but not read
DTYPES = {
    "BF16": ("bf16", ml_dtypes.bfloat16), "F16": ("f16", np.float16), "F32": ("f32", np.float32),
    "U8": ("u8", np.uint8), "I8": ("i8", np.int8), "I32": ("i32", np.int32), "I64": ("i64", np.int64),
    "F8_E4M3": ("f8_e4m3", ml_dtypes.float8_e4m3fn), "F8_E5M2": ("f8_e5m2", ml_dtypes.float8_e5m2),
    "F8_E8M0": ("f8_e8m0", ml_dtypes.float8_e8m0fnu),
}
NUMPY = dict(DTYPES.values())


@dataclass(frozen=True)
class Tensor:
    file: Path
    dtype: str                               # 'bf16', 'f32', ...; an unknown one as the file names it
    shape: tuple[int, ...]
    first: int                               # its bytes are [first, last) of the file
    last: int


class Checkpoint:
    """The tensors of `directory`: `model.safetensors`, or the shards of `model.safetensors.index.json`.

    Opening it reads headers only. Raises MkgenError, with every fault of every shard in one message, if the
    folder, an index or a shard is missing, damaged or shorter than its own header says.
    """

    def __init__(self, directory: str | os.PathLike):
        self.directory = Path(directory)
        self._tensors: dict[str, Tensor] = {}
        problems: list[str] = []
        for file, wanted in _shards(self.directory).items():
            try:
                found = _read_header(file)
            except MkgenError as error:
                problems.append(str(error))
                continue
            self._tensors.update((n, t) for n, t in found.items() if n not in self._tensors or n in wanted)
            absent = sorted(wanted - found.keys())
            if absent:
                problems.append(f"{file}: the index places {len(absent)} tensors here that the file does not "
                                f"hold, first {absent[0]}")
        if problems:
            raise MkgenError("\n".join(problems))

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def dtype(self, name: str) -> str:
        """'bf16', 'f32', 'u8', 'f8_e4m3', ...: a key of NUMPY, or the name of a dtype that cannot be read."""
        return self._tensor(name).dtype

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """The tensor as an array of its own, or only [start:stop] of its first axis (0 <= start <= stop)."""
        t = self._tensor(name)
        if t.dtype not in NUMPY:
            raise MkgenError(f"{name}: dtype {t.dtype} cannot be read; one of {', '.join(NUMPY)} can")
        dtype, shape, offset = np.dtype(NUMPY[t.dtype]), t.shape, t.first
        if shape:
            stop = shape[0] if stop is None else min(stop, shape[0])
            offset += start * math.prod(shape[1:]) * dtype.itemsize
            shape = (stop - start, *shape[1:])
        size = math.prod(shape) * dtype.itemsize
        raw = np.fromfile(t.file, np.uint8, size, offset=offset)
        if raw.size != size:                                                  # it shrank since it was opened
            raise MkgenError(f"{t.file}: {name} ends after {raw.size} of {size} bytes")
        return raw.view(dtype).reshape(shape)

    def _tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise MkgenError(f"{self.directory}: no tensor {name}") from None


def _shards(directory: Path) -> dict[Path, set[str]]:
    """The files of a checkpoint -> the tensors that the index expects in each (none without an index)."""
    if not directory.is_dir():
        raise MkgenError(f"{directory}: no such folder; expected a checkpoint with {SINGLE} or {INDEX}")
    if (directory / SINGLE).is_file():                         # it wins over an index, as in transformers
        return {directory / SINGLE: set()}
    index = directory / INDEX
    if not index.is_file():
        strays = sorted(p.name for p in directory.glob("*.safetensors"))
        seen = f"only {', '.join(strays[:3])}" if strays else "no .safetensors file at all"
        raise MkgenError(f"{directory}: neither {SINGLE} nor {INDEX} here, {seen}")
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        shards: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            shards.setdefault(directory / file, set()).add(name)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise MkgenError(f"{index}: not an index; expected JSON {{\"weight_map\": {{tensor: file}}}}: "
                         f"{type(error).__name__} {error}") from None
    if not shards:
        raise MkgenError(f"{index}: the weight_map is empty")
    return shards


def _read_header(file: Path) -> dict[str, Tensor]:
    """Header of one safetensors file; MkgenError if it is damaged or promises more bytes than there are."""
    if not file.is_file():
        raise MkgenError(f"{file}: no such file, but {INDEX} names it")
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise MkgenError(f"{file}: truncated: {size} bytes, its header alone takes {length + 8}")
            header = json.loads(f.read(length))
        tensors = {name: _entry(file, 8 + length, entry)
                   for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise MkgenError(f"{file}: not a safetensors file: {type(error).__name__} {error}") from None
    end = max((t.last for t in tensors.values()), default=0)
    if end > size:
        raise MkgenError(f"{file}: truncated: {size} bytes, its header promises {end}")
    return tensors


def _entry(file: Path, base: int, entry: dict) -> Tensor:
    name, numpy = DTYPES.get(entry["dtype"], (entry["dtype"].lower(), None))
    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    if numpy and last - first != math.prod(shape) * np.dtype(numpy).itemsize:
        raise ValueError(f"{entry} does not span the bytes of its shape")
    return Tensor(file, name, shape, base + first, base + last)
