"""Weights of a checkpoint on their way to the images: each tensor read once, checked for NaN, brought into the build's format,
what that changes counted.
"""
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from threading import Lock

import numpy as np
from ml_dtypes import bfloat16

from mkgen.errors import MkgenError
from mkgen.graph.ir import Weight
from mkgen.graph.weights import assemble
from mkgen.pack.coded import Coded, decode, encode
from mkgen.pack.expect import Source
from mkgen.pack.hub import NAMES
from mkgen.pack.recode import nearest, recode, take
from mkgen.plan.plan import Plan
from mkgen.spec.checkpoint import Pattern, parse

LISTED = 50                                  # bad weights that are listed one by one
RUN = 1 << 24                                # elements that are looked at together: no second copy of a large tensor
EXPONENT = {np.dtype(bfloat16): 0x7F80, np.dtype(np.float16): 0x7C00}
MOVES = ("linear", "rows", "vector", "first_half_heads", "second_half_heads")      # rules that only move elements
Key = tuple[str, int | None]                 # a tensor, or one expert of a stack


class BadWeights(MkgenError):
    """The checkpoint's values will not do: another run will not do better. what: one line a tensor; advice: why and fix."""

    def __init__(self, what: str, advice: str):
        super().__init__(f"{what}\n{advice}")
        self.what, self.advice = what, advice

    @classmethod
    def all(cls, errors: Sequence[BadWeights]) -> MkgenError:
        """One error for several; those with one advice are listed above it."""
        groups: dict[str, dict[str, None]] = {}
        for e in errors:
            groups.setdefault(e.advice, {})[e.what] = None
        texts = [(list(lines)[:LISTED] + [f"... and {len(lines) - LISTED} more"] * (len(lines) > LISTED), advice)
                 for advice, lines in groups.items()]
        *front, (lines, advice) = ["\n".join([*lines, advice]) for lines, advice in texts[:-1]] + [texts[-1]]
        return cls("\n".join([*front, *lines]), advice)


class Reader:
    """Logical weights from matched sources, for several threads, as long as no two want the same tensor.

    rounded: part of a tensor -> how many values had to be rounded to bf16. converted: by format, the same (`convert` only).
    read_bytes: of the checkpoint, so far; total_bytes: of all sources.
    """

    def __init__(self, plan: Plan, sources: dict[str, Source], convert: bool):
        self.plan, self.sources, self.convert = plan, sources, convert
        self.patterns: dict[str, Pattern] = {role: parse(text) for role, text in plan.spec.model.checkpoint.items()}
        self.rounded: dict[str, int] = {}
        self.converted: dict[str, dict[str, int]] = {}
        self.read_bytes, self.total_bytes = 0, sum(s.layout.bytes() for s in sources.values())
        self._lock = Lock()
        self._held: dict[Key, np.ndarray | Coded] = {}
        self._left: Counter[Key] = Counter()

    def keys(self, weight: Weight, layer: int | None, expert: int | None = None) -> list[Key]:
        """What has to be read for a weight."""
        names = [self.patterns[role].format(layer, expert) for role in weight.roles]
        return [(n, expert if self.sources[n].expected.experts else None) for n in names]

    def will_read(self, wanted: Iterable[tuple[Weight, int | None, int | None]]) -> None:
        """The weights (of a layer, of an expert) that will be asked for: what is read stays until its last user has had it."""
        self._left = Counter(key for w in wanted for key in self.keys(*w))

    def weight(self, weight: Weight, layer: int | None, expert: int | None = None, fmt: str = "bf16") -> np.ndarray | Coded:
        """A logical array, in bf16 or in the dtype of the tensor; of another format `Coded` [N, K]. Raises BadWeights."""
        keys = self.keys(weight, layer, expert)
        try:
            parts = [self.sources[n].take(role, self._read(n, e)) for role, (n, e) in zip(weight.roles, keys)]
            label = " x ".join(_label(n, e, self.patterns[role]) for role, (n, e) in zip(weight.roles, keys))
            return self._logical(weight, layer, label, parts, fmt)
        finally:
            with self._lock:
                self._left.subtract(keys)
                for key in keys:
                    if self._left[key] <= 0:
                        self._held.pop(key, None)

    def _read(self, name: str, expert: int | None) -> np.ndarray | Coded:
        if (name, expert) not in self._held:
            source = self.sources[name]
            with self._lock:
                self.read_bytes += source.layout.bytes(expert)
            value = source.read(expert)
            check_finite(name if expert is None else f"{name}[{expert}]", value)
            self._held[name, expert] = value
        return self._held[name, expert]

    def _logical(self, w: Weight, layer: int | None, label: str, parts: list[np.ndarray | Coded], fmt: str) -> np.ndarray | Coded:
        family = "experts" if len(w.shape) == 3 else w.name
        moves = w.assemble.partition("(")[0] in MOVES
        if moves and parts and isinstance(parts[0], Coded) and w.dtype == "bf16" and len(w.shape) > 1:
            coded = self._in_format(family, label, _moved(w, parts[0]), fmt)
            return coded if fmt != "bf16" else coded.codes.T if w.assemble != "rows" else coded.codes
        value = assemble(w.assemble, *(decode(p) if isinstance(p, Coded) else p for p in parts), layer=layer)
        if not moves:
            check_finite(label, value)
        if fmt == "f32":
            return np.asarray(value, np.float32)
        if fmt != "bf16":
            return self._in_format(family, label, value.T, fmt)
        return self._rounded(label, value) if w.dtype == "bf16" else value

    def _in_format(self, family: str, label: str, value: np.ndarray | Coded, fmt: str) -> Coded:
        """[N, K] in the build's format; MkgenError if that changes values and nobody asked for it."""
        exact = recode(value, fmt) if isinstance(value, Coded) else None
        if exact is not None:
            return exact
        made = nearest(value, fmt) if isinstance(value, Coded) else encode(fmt, value)
        before = decode(value) if isinstance(value, Coded) else value.astype(np.float32, copy=False)
        changed = int(np.count_nonzero(decode(made) != before))
        if changed and not self.convert:
            kept = value.format if isinstance(value, Coded) else "bf16"
            raise BadWeights(f"{' | '.join(label.split(chr(9)))}: {changed} of {made.codes.size} values are not exact in {fmt}",
                             f"  why: build.formats.{family} is {fmt}, the checkpoint's are {_words(value)}\n"
                             f"  fix: --set build.formats.{family}={kept} to keep them, or --convert to round them")
        if changed:
            self.converted.setdefault(fmt, {})[label] = changed
        return made

    def _rounded(self, label: str, a: np.ndarray) -> np.ndarray:
        """`a` as bf16, the values that this changes counted; BadWeights if one is too large."""
        if a.dtype == bfloat16:
            return a
        out, changed = np.empty(a.shape, bfloat16), 0
        old, new = np.ascontiguousarray(a).reshape(-1), out.reshape(-1)
        for at in range(0, old.size, RUN):
            exact = old[at:at + RUN].astype(np.float32, copy=False)
            new[at:at + RUN] = exact.astype(bfloat16)
            changed += int(np.count_nonzero(new[at:at + RUN].astype(np.float32) != exact))
        if changed:
            self.rounded[label] = changed
        check_finite(label.partition("\t")[0], out, "too large for bf16")
        return out


def _moved(w: Weight, coded: Coded) -> Coded:
    """The outputs that a rule takes, in its order: as it orders the rows of a column of numbers."""
    n, k = coded.shape
    rows = np.arange(n)[:, None]
    order = rows[:, 0] if w.assemble == "rows" else assemble(w.assemble, rows)[0]
    return take(coded, order, np.arange(k))


def _label(name: str, expert: int | None, pattern: Pattern) -> str:
    """A part of a tensor, the tensor first: parts are counted apart, and once however often they are read."""
    return "\t".join([name, *([] if expert is None else [str(expert)]), *map(str, pattern.cuts)])


def _words(value: np.ndarray | Coded) -> str:
    return value.format if isinstance(value, Coded) else NAMES[value.dtype]


def check_finite(name: str, a: np.ndarray | Coded, what: str = "NaN or infinite") -> None:
    """BadWeights if a value of `a` is not finite."""
    bad, size = _not_finite(a)
    if bad:
        raise BadWeights(f"{name}: {bad} of {size} values are {what}", "  why: one such weight spoils every token\n"
                         "  fix: a sound checkpoint")


def _not_finite(a: np.ndarray | Coded) -> tuple[int, int]:
    if isinstance(a, Coded):
        bad = _not_finite(a.scales)[0] + (not np.isfinite(a.tensor_scale))
        if a.kind.code == "e4m3":
            bad += int(np.count_nonzero((a.codes & 0x7F) == 0x7F))
        return bad, a.codes.size
    flat, bad = np.ascontiguousarray(a).reshape(-1), 0
    mask = EXPONENT.get(flat.dtype)
    for at in range(0, flat.size, RUN):
        run = flat[at:at + RUN]
        bad += int(np.count_nonzero((run.view(np.uint16) & mask) == mask if mask else ~np.isfinite(run)))
    return bad, flat.size


def grouped(counts: dict[str, int]) -> dict[str, dict[str, int]]:
    """Counts a part of a tensor -> {pattern: {tensors, values}}, the numbers in a name replaced by #."""
    out: dict[str, dict[str, int]] = {}
    seen: set[str] = set()
    for label, n in counts.items():
        name = label.partition("\t")[0]
        group = out.setdefault(re.sub(r"\d+", "#", name), {"tensors": 0, "values": 0})
        group["tensors"] += name not in seen
        group["values"] += n
        seen.add(name)
    return out
