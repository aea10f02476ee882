"""Between a `Coded` matrix and the u32 rows of a section (plan/section.py): codes, scales, zero points, a scale a column."""
from __future__ import annotations

from math import ceil

import numpy as np

from mkgen.pack.coded import STORED, Coded
from mkgen.pack.formats import LANES
from mkgen.plan.section import Section

OFFSET = 8                                   # a stored int4 code is q - 8 where there are zero points, and so is the zero point


def put(rows: np.ndarray, s: Section, c: Coded, at: int) -> None:
    """c [n, k] into columns `at`.. of the section that begins in rows[0] + s.at. What is left of K and of the columns stays as it
    is: zero, where nothing has been written."""
    def view(first: int, each: int) -> np.ndarray:
        return rows[first:first + s.panels * each].reshape(s.panels, each, LANES)

    put_columns(view(s.at, s.panel_rows), code_words(c, s.panel_rows), at)
    if s.scale_rows:
        put_columns(view(s.scales_at, s.scale_rows), scale_words(c, s.scale_rows), at)
    if s.zero_rows:
        put_columns(view(s.zeros_at, s.zero_rows), _words((c.zeros - OFFSET).astype(np.int8), s.zero_rows), at)
    if s.column_rows:
        column = c.scales if c.kind.column else np.full((len(c.codes), 1), c.tensor_scale, np.float32)
        put_columns(view(s.columns_at, 1), _words(column, 1), at)


def take(rows: np.ndarray, s: Section, k: int, n: int, at: int = 0) -> Coded:
    """Inverse of `put`: the [n, k] in columns `at`.."""
    def part(first: int, each: int) -> np.ndarray:
        panels = rows[first:first + s.panels * each].reshape(s.panels, each, LANES)
        return np.ascontiguousarray(panels.swapaxes(1, 2).reshape(-1, each)[at:at + n])

    f, words = s.kind, part(s.at, s.panel_rows)
    if f.bits == 4:
        codes = np.stack([words.view(np.uint8) & 15, words.view(np.uint8) >> 4], axis=2).reshape(len(words), s.k)[:, :k]
        codes = (codes + OFFSET) & 15 if f.zero else codes
    else:
        codes = words.view({"int8": np.int8, "bf16": STORED["bf16"]}.get(f.code, np.uint8))[:, :k]
    if f.code == "bf16":
        return Coded(s.format, codes, np.zeros((n, 0), np.float32))
    column = part(s.columns_at, 1).view(np.float32) if s.column_rows else np.ones((n, 1), np.float32)
    if f.column:
        return Coded(s.format, codes, column)
    groups = ceil(k / s.group)
    raw = part(s.scales_at, s.scale_rows)
    if f.scale == "e8m0":
        scales = np.ldexp(np.float32(1), raw.view(np.uint8)[:, :groups].astype(np.int32) - 127)
    else:
        scales = raw.view(STORED[f.scale])[:, :groups].astype(np.float32)
    zeros = part(s.zeros_at, s.zero_rows).view(np.int8)[:, :groups].astype(np.float32) + OFFSET if f.zero else None
    return Coded(s.format, codes, scales, zeros, float(column[0, 0]) if f.tensor_scale else 1.0, s.group)


def put_columns(panels: np.ndarray, words: np.ndarray, at: int) -> None:
    """u32 words [n, R] (R words along K) into columns `at`.. of u32 panels [P, R, 128]."""
    end = at + len(words)
    for p in range(at // LANES, -(-end // LANES)):
        first, last = max(at, p * LANES), min(end, (p + 1) * LANES)
        panels[p, :, first - p * LANES:last - p * LANES] = words[first - at:last - at].T


def code_words(c: Coded, count: int) -> np.ndarray:
    """u32 [n, count]: consecutive K from the low bits up."""
    if c.kind.bits != 4:
        return _words(c.codes, count)
    codes = (c.codes - OFFSET) & 15 if c.kind.zero else c.codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return _words(codes[:, 0::2] | codes[:, 1::2] << 4, count)


def scale_words(c: Coded, count: int) -> np.ndarray:
    if c.kind.scale == "e8m0":
        return _words((np.frexp(c.scales)[1] + 126).astype(np.uint8), count)
    return _words(c.scales.astype(STORED[c.kind.scale]), count)


def _words(a: np.ndarray, count: int) -> np.ndarray:
    """[n, m] of any width -> u32 [n, count], filled up with zeros."""
    out = np.zeros((len(a), count * 4 // a.itemsize), a.dtype)
    out[:, :a.shape[1]] = a
    return out.view(np.uint32)
