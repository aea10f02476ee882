"""A Hugging Face checkpoint folder as named tensors that are read one at a time.

A safetensors file is 8 bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the
bytes. It is read here directly because safetensors' numpy frontend knows no bfloat16. The headers of all
shards are read, and held against the sizes of the files, at once; tensors when asked for.
"""
from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import ml_dtypes
import numpy as np

from mkgen.errors import MkgenError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# safetensors' name -> the name used in mkgen and the numpy dtype; other dtypes can be listed but not read
DTYPES = {
    "BF16": ("bf16", ml_dtypes.bfloat16), "F16": ("f16", np.float16), "F32": ("f32", np.float32),
    "U8": ("u8", np.uint8), "I8": ("i8", np.int8), "I16": ("i16", np.int16),
    "I32": ("i32", np.int32), "I64": ("i64", np.int64), "BOOL": ("bool", np.bool_),
    "F8_E4M3": ("f8_e4m3", ml_dtypes.float8_e4m3fn), "F8_E5M2": ("f8_e5m2", ml_dtypes.float8_e5m2),
    "F8_E8M0": ("f8_e8m0", ml_dtypes.float8_e8m0fnu),
}
NUMPY = dict(DTYPES.values())
NAMES = {np.dtype(dtype): name for name, dtype in DTYPES.values()}
CONFIGS = "config.json", "quantize_config.json", "hf_quant_config.json"


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
        self._files: dict[Path, tuple[int, int, str]] = {}
        problems: list[str] = []
        shards = _shards(self.directory)
        placed = {n for wanted in shards.values() for n in wanted}
        for file, wanted in shards.items():
            try:
                found, self._files[file] = _read_header(file)
            except MkgenError as error:
                problems.append(str(error))
                continue
            twice = [n for n in found if n in self._tensors and n not in placed]
            if twice:
                problems.append(f"{file}: {len(twice)} tensors are in another file too, first {twice[0]}")
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

    @cached_property
    def quantization(self) -> dict:
        """What the folder's config files say of how weights are quantised; {} if nothing."""
        found: dict = {}
        for file in CONFIGS:
            try:
                config = json.loads((self.directory / file).read_text())
                inner = config.get("text_config") or {}
                parts = [config] if file == "quantize_config.json" else [
                    config.get("quantization_config"), inner.get("quantization_config"), config.get("quantization")]
                for part in parts:
                    found = {**(part if isinstance(part, dict) else {}), **found}
            except (OSError, ValueError, AttributeError):
                continue                     # tensors say most themselves; a folder without these files will do
        return found

    def fingerprint(self) -> dict[str, list]:
        """File name -> [bytes, time of change in ns, hash of its header]: another checkpoint has another one."""
        return {str(file.relative_to(self.directory)): [size, stamp, digest] for file, (size, stamp, digest) in self._files.items()}

    def bytes(self, name: str) -> int:
        t = self._tensor(name)
        return t.last - t.first

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


def _read_header(file: Path) -> tuple[dict[str, Tensor], tuple[int, int, str]]:
    """A safetensors file's tensors, and its size, time and header's hash; MkgenError if it is damaged, or is not as long
    as its header says."""
    if not file.is_file():
        raise MkgenError(f"{file}: no such file, but {INDEX} names it")
    try:
        stat = file.stat()
        size = stat.st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > size - 8:
                raise MkgenError(f"{file}: truncated: {size} bytes, its header alone takes {length + 8}")
            text = f.read(length)
        tensors = {name: _entry(file, 8 + length, entry)
                   for name, entry in json.loads(text).items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise MkgenError(f"{file}: not a safetensors file: {type(error).__name__} {error}") from None
    end = 8 + length
    for name, t in sorted(tensors.items(), key=lambda item: item[1].first):
        if t.first != end:
            raise MkgenError(f"{file}: not a safetensors file: {name} begins at byte {t.first}, the one before it ends at {end}")
        end = t.last
    if end != size:
        what = "truncated" if end > size else "damaged"
        raise MkgenError(f"{file}: {what}: {size} bytes, its header promises {end}")
    return tensors, (size, stat.st_mtime_ns, hashlib.sha256(text).hexdigest()[:16])


def _entry(file: Path, base: int, entry: dict) -> Tensor:
    name, numpy = DTYPES.get(entry["dtype"], (entry["dtype"].lower(), None))
    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    if numpy and last - first != math.prod(shape) * np.dtype(numpy).itemsize:
        raise ValueError(f"{entry} does not span the bytes of its shape")
    return Tensor(file, name, shape, base + first, base + last)


class Arrays:
    """Tensors in memory with the face of a checkpoint."""

    directory, quantization = "memory", {}

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self._tensors = tensors

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return np.shape(self._tensors[name])

    def dtype(self, name: str) -> str:
        return NAMES[np.asarray(self._tensors[name]).dtype]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        a = np.asarray(self._tensors[name])
        return a[start:stop] if a.ndim else a
