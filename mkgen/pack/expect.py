"""The tensors that a spec expects, held against those that a checkpoint has: every problem in one error, each
tensor a source of the values asked for, however it is stored.
"""
from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from mkgen.errors import MkgenError
from mkgen.pack.formats import GROUP, dequantise_mxfp4, from_hub, quantise_mxfp4
from mkgen.pack.hub import Checkpoint

MXFP4 = "mxfp4"                              # as an allowed dtype: two tensors instead of one
SINGLY = 3                                   # so many problems of one pattern are listed one by one


@dataclass(frozen=True)
class Expected:
    """One tensor by its checkpoint name.

    shape: as a checkpoint stores it, [N, K] for a matrix; axes of length one may be more or fewer there.
    dtypes: of Checkpoint.dtype; 'mxfp4' among them also allows `<stem>.weight_packed` u8 [N, K/2] and
        `<stem>.weight_scale` u8 [N, K/32] in place of `<stem>.weight`.
    role: the spec's key, for the error.
    narrow: a vector that may be longer there; its first elements count.
    """
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    role: str
    narrow: bool = False

    @property
    def packed_names(self) -> tuple[str, str]:
        stem = self.name.removesuffix(".weight")
        return f"{stem}.weight_packed", f"{stem}.weight_scale"


@dataclass(frozen=True)
class Source:
    """An expected tensor that the checkpoint has, as one tensor or as an MXFP4 pair."""
    expected: Expected
    checkpoint: Checkpoint
    packed: bool

    def read(self) -> np.ndarray:
        """The values in the expected shape, in the dtype stored; f32 [N, K] from an MXFP4 pair."""
        e = self.expected
        if self.packed:
            return dequantise_mxfp4(*self.read_mxfp4()).T
        value = self.checkpoint.read(e.name)
        if e.narrow:                         # squeezed first: the padding may sit on any axis
            value = value.squeeze().reshape(-1)[:e.shape[0]]
        return value.reshape(e.shape)

    def read_mxfp4(self) -> tuple[np.ndarray, np.ndarray]:
        """u8 codes [K, N] and e8m0 scales [K/32, N]: as stored, or quantised from a plain [N, K] (32 | K)."""
        if self.packed:
            words, scale = self.expected.packed_names
            return from_hub(self.checkpoint.read(words), self.checkpoint.read(scale).view(np.uint8), scale)
        try:
            return quantise_mxfp4(self.read().T)
        except MkgenError as error:
            raise MkgenError(f"{self.expected.name}: {error}") from None


def match(expected: Iterable[Expected], checkpoint: Checkpoint,
          ignore: Sequence[str] = ()) -> dict[str, Source]:
    """Expected name -> Source; or an MkgenError with all that is missing, extra, misshapen and misdtyped.

    ignore: shell patterns (`vision_tower.*`) of tensors that may be there unused; nothing else may.
    """
    sources: dict[str, Source] = {}
    used: set[str] = set()
    problems: list[tuple[str, str, str]] = []                        # (kind, name, detail)
    for e in expected:
        pair = [n for n in e.packed_names if n in checkpoint] if MXFP4 in e.dtypes else []
        used.update([e.name, *pair])
        if e.name in checkpoint:
            problems += _plain(e, checkpoint)
            problems += [("extra", n, f"{e.role} is also there unpacked") for n in pair]
            sources[e.name] = Source(e, checkpoint, False)
        elif pair:
            problems += _pair(e, checkpoint)
            sources[e.name] = Source(e, checkpoint, True)
        else:
            problems.append(("missing", e.name, f"{e.role} {list(e.shape)}"))
    problems += [("extra", n, "no role of the spec uses it") for n in checkpoint.names
                 if n not in used and not any(fnmatchcase(n, p) for p in ignore)]
    if problems:
        lines = _grouped(problems)
        raise MkgenError(f"{checkpoint.directory}: not the tensors that the spec expects, "
                         f"{len(problems)} problems\n" + "\n".join(lines))
    return sources


def _plain(e: Expected, checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    shape, dtype = checkpoint.shape(e.name), checkpoint.dtype(e.name)
    problems = []
    have, want = (tuple(n for n in s if n != 1) for s in (shape, e.shape))
    longer = e.narrow and len(have) == 1 and have[0] >= e.shape[0]
    if have != want and not longer:
        at_least = " or longer" if e.narrow else ""
        problems.append(("misshapen", e.name, f"{e.role} is {list(shape)}, not {list(e.shape)}{at_least}"))
    if dtype not in e.dtypes:
        allowed = " or ".join(d for d in e.dtypes if d != MXFP4) or MXFP4
        problems.append(("misdtyped", e.name, f"{e.role} is {dtype}, not {allowed}"))
    return problems


def _pair(e: Expected, checkpoint: Checkpoint) -> list[tuple[str, str, str]]:
    n, k = e.shape
    if k % GROUP:
        return [("misshapen", e.packed_names[0], f"{e.role} has K = {k}, mxfp4 needs a multiple of {GROUP}")]
    problems = []
    words, scale = e.packed_names
    for name, shape, dtypes in (words, (n, k // 2), ("u8",)), (scale, (n, k // GROUP), ("u8", "f8_e8m0")):
        if name not in checkpoint:
            problems.append(("missing", name, f"{e.role} {list(shape)}, the other half of the pair is there"))
            continue
        have, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        if have != shape:
            problems.append(("misshapen", name, f"{e.role} is {list(have)}, not {list(shape)}"))
        if dtype not in dtypes:
            problems.append(("misdtyped", name, f"{e.role} is {dtype}, not {dtypes[0]}"))
    return problems


def _grouped(problems: list[tuple[str, str, str]]) -> list[str]:
    """One line a problem; one for all whose names differ in numbers only: a large model has 10^5 tensors."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for kind, name, detail in problems:
        groups.setdefault((kind, re.sub(r"\d+", "#", name), detail), []).append(name)
    lines = []
    for (kind, pattern, detail), names in sorted(groups.items()):
        names.sort(key=_numbers)
        if len(names) <= SINGLY:
            lines += [f"  {kind}: {name} ({detail})" for name in names]
        else:
            lines.append(f"  {kind}: {len(names)} tensors {_range(pattern, names)} ({detail}), "
                         f"first {names[0]}")
    return lines


def _numbers(name: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", name)]


def _range(pattern: str, names: list[str]) -> str:
    """`layers.#.w#` and its names -> `layers.{0..3}.w1`: every number as the range it runs through."""
    spans = iter([(min(c), max(c)) for c in zip(*map(_numbers, names))])

    def span(_: re.Match) -> str:
        low, high = next(spans)
        return str(low) if low == high else f"{{{low}..{high}}}"
    return re.sub("#", span, pattern)
