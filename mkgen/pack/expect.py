"""The tensors that a spec expects, held against those that a checkpoint has: every problem in one error, each
tensor a source of the roles that are cut out of it, however it is stored.
"""
from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from mkgen.errors import MkgenError
from mkgen.pack import recode
from mkgen.pack.coded import Coded
from mkgen.pack.vendor import FLOATS, Fault, Layout, Tensors, find
from mkgen.pack.wanted import Expected, Part
from mkgen.spec.checkpoint import BadPattern, Cut, picks, uncut

SINGLY = 3                                   # so many problems of one pattern are listed one by one


@dataclass(frozen=True)
class Source:
    """An expected tensor that the checkpoint has."""
    expected: Expected
    layout: Layout

    def read(self, expert: int | None = None) -> np.ndarray | Coded:
        """The whole tensor, or of a stack that of one expert: in the dtype stored, or `Coded` [N, K]."""
        return self.layout.read(expert if self.expected.experts else None)

    def part(self, role: str) -> Part:
        return next(p for p in self.expected.parts if p.role == role)

    def take(self, role: str, whole: np.ndarray | Coded) -> np.ndarray | Coded:
        """The part of a role, in its shape, of what `read` gave."""
        return take(self.part(role), whole, self.layout.turned)


def take(part: Part, whole: np.ndarray | Coded, turned: bool = False) -> np.ndarray | Coded:
    """The part of a tensor in the shape of its role. turned: it is [out, in], whatever the cuts say of a plain one."""
    cuts = cuts_of(part.cuts, turned)
    if isinstance(whole, Coded):
        return pick(cuts, whole)
    if part.narrow:                          # squeezed first: the padding may sit on any axis
        whole = whole.squeeze().reshape(-1)[:part.shape[0]]
    elif cuts:
        whole = whole.reshape(aligned(part, whole.shape, turned) or whole.shape)
    return pick(cuts, whole).reshape(part.shape)


def pick(cuts: tuple[Cut, ...], whole: np.ndarray | Coded) -> np.ndarray | Coded:
    """What cuts take of one matrix or vector."""
    if isinstance(whole, Coded):
        return recode.take(whole, *map(np.asarray, picks(cuts, whole.shape))) if cuts else whole
    for cut in cuts:
        whole = cut(whole)
    return whole


def cuts_of(cuts: tuple[Cut, ...], turned: bool) -> tuple[Cut, ...]:
    """As they are for a tensor that is [out, in] by its layout: a plain twin of it would be turned first."""
    return cuts[1:] if turned and cuts and cuts[0].kind == "T" else cuts


def aligned(part: Part, shape: tuple[int, ...], turned: bool = False) -> tuple[int, ...] | None:
    """`shape` with axes of length one where the role's tensor has them; None if it is not a tensor for the role."""
    axes = uncut(cuts_of(part.cuts, turned), part.shape)
    if axes is None:
        return shape
    have, out = [n for n in shape if n != 1], []
    for axis in axes:
        one = axis.size == 1 and axis.exact
        out.append(1 if one or not have else have.pop(0))
        if not axis.fits(out[-1]):
            return None
    return None if have else tuple(out)


def match(expected: Iterable[Expected], checkpoint: Tensors, ignore: Sequence[str] = ()) -> dict[str, Source]:
    """Expected name -> Source; or an MkgenError with all that is missing, extra, misshapen, misdtyped and unused.

    ignore: shell patterns (`vision_tower.*`) of tensors that may be there unused; nothing else may.
    """
    sources: dict[str, Source] = {}
    used: set[str] = set()
    problems: list[Fault] = []
    fits = _Fits()
    for e in expected:
        roles = ", ".join(p.role for p in e.parts)
        layout = find(checkpoint, e.name, 1 if e.experts else 0)
        if layout is None:
            problems.append(("missing", e.name, f"{roles} {_needed(e)}"))
            continue
        used.update((*layout.names, *layout.spare))
        faults = layout.faults()
        if not layout.coded and checkpoint.dtype(e.name) not in FLOATS:
            faults = [*faults, ("misdtyped", e.name, f"{roles} is {checkpoint.dtype(e.name)}, not {' or '.join(FLOATS)}")]
        if not any(kind == "missing" for kind, *_ in faults):
            faults = [*faults, *fits.faults(e, layout, _any(e.name, ignore))]
        problems += faults
        sources[e.name] = Source(e, layout)
    extra = [n for n in checkpoint.names if n not in used and not _any(n, ignore)]
    problems += [("extra", n, _twin(n, sources) or "no role of the spec uses it") for n in extra]
    if problems:
        have = sum(math.prod(s.layout.shape) for s in sources.values() if not s.layout.missing)
        want = sum(e.parameters for e in expected)
        lines = _grouped(problems)
        raise MkgenError(f"{checkpoint.directory}: not the tensors that the spec expects, "
                         f"{len(problems)} problems\n" + "\n".join(lines) +
                         f"\n  why: the spec has {want:,} parameters, the tensors of their names hold {have:,}\n"
                         "  fix: correct the spec, or list tensors that the decoder does not need in model.ignore (mkgen pack: --ignore PATTERN)")
    return sources


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) for p in patterns)


def _twin(name: str, sources: dict[str, Source]) -> str:
    """Of a tensor nobody uses: that the same weights are there in another layout."""
    for end in ("_packed", "_scale", "_blocks", "_scales", "_scale_inv", "_scale_2", "_global_scale"):
        source = sources.get(name.removesuffix(end)) if name.endswith(end) else None
        if source:
            return f"{source.expected.parts[0].role} is also there as {source.layout.words}"
    return ""


def _needed(e: Expected) -> str:
    """The shape of a tensor that has all the parts, as far as the cuts tell it."""
    shapes = [uncut(p.cuts, p.shape) for p in e.parts]
    if len(shapes) == 1 and shapes[0] is not None:
        return "[" + ", ".join([str(e.experts)] * bool(e.experts) + [str(a) for a in shapes[0]]) + "]"
    return f"{e.parameters:,} parameters"


class _Fits:
    """Whether the parts of a tensor fit its shape and leave nothing over; each combination of parts and shape once."""

    def __init__(self):
        self._known: dict[tuple, list[tuple[str, str]]] = {}

    def faults(self, e: Expected, layout: Layout, partly: bool) -> list[Fault]:
        """partly: a part that no role takes is ignored."""
        key = (e.parts, e.experts, layout.shape, layout.coded, layout.turned)
        if key not in self._known:
            self._known[key] = list(_misfits(e, layout))
        return [(kind, e.name, detail) for kind, detail in self._known[key] if kind != "unused" or not partly]


def _misfits(e: Expected, layout: Layout):
    shape = layout.shape
    if e.experts:
        if len(shape) < 2 or shape[0] != e.experts:
            yield "misshapen", f"{e.parts[0].role} is {list(shape)}, not one of each of {e.experts} experts"
            return
        shape = shape[1:]
    taken: list[tuple[Part, list[np.ndarray], tuple[int, ...]]] = []
    for p in e.parts:
        cuts, full = cuts_of(p.cuts, layout.turned), aligned(p, shape, layout.turned)
        have = [n for n in shape if n != 1]
        if p.narrow and len(have) <= 1 and math.prod(have) >= p.shape[0]:
            return
        if full is None:
            axes = [str(e.experts)] * bool(e.experts) + [str(a) for a in uncut(cuts, p.shape)]
            at_least = " or longer" if p.narrow else ""
            yield "misshapen", f"{p.role} is {list(layout.shape)}, not [{', '.join(axes)}]{at_least}"
            continue
        if layout.coded and any(c.kind == "T" for c in cuts):
            yield "misshapen", f"{p.role} is {layout.words}, which is stored [out, in]: its cuts may have no `T`"
            continue
        try:
            at = [np.asarray(i) for i in picks(cuts, full)]
        except BadPattern as error:
            yield "misshapen", f"{p.role} is {list(layout.shape)}: {error}"
            continue
        count = math.prod(map(len, at))
        if count != math.prod(p.shape):
            yield "misshapen", f"{p.role} is {list(layout.shape)}; its cuts take {count:,} elements of it, not {list(p.shape)}"
            continue
        for other, theirs, _ in taken:
            if len(theirs) == len(at) and all(np.intersect1d(a, b).size for a, b in zip(at, theirs)):
                yield "misshapen", f"{p.role} and {other.role} both take a part of it"
        taken.append((p, at, full))
    if taken and len(taken) == len(e.parts):
        yield from _left_over(taken)


def _left_over(taken: list[tuple[Part, list[np.ndarray], tuple[int, ...]]]):
    """What nobody takes: along the first axis of which all take a part only."""
    full, roles = taken[0][2], ", ".join(p.role for p, *_ in taken)
    total, used = math.prod(full), sum(math.prod(map(len, at)) for _, at, _ in taken)
    if used >= total:
        return
    for axis, name in enumerate(("rows", "columns")[:len(full)]):
        free = np.setdiff1d(np.arange(full[axis]), np.concatenate([at[axis] for _, at, _ in taken]))
        if len(free):
            yield "unused", f"{name} {_runs(free)} of {list(full)} are taken by no role, only others by {roles}"
            return
    yield "unused", f"{total - used:,} of the elements of {list(full)} are taken by no role, only others by {roles}"


def _runs(free: np.ndarray) -> str:
    """Indices as `64:128, 192:256, … 8 runs`."""
    ends = np.flatnonzero(np.diff(free) != 1)
    first, last = free[np.r_[0, ends + 1]], free[np.r_[ends, len(free) - 1]] + 1
    shown = ", ".join(f"{a}:{b}" for a, b in list(zip(first, last))[:2])
    return shown + (f", ... {len(first)} runs" if len(first) > 2 else "")


def _grouped(problems: list[Fault]) -> list[str]:
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
