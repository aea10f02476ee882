"""A rank's images in memory, from logical weights: tape, experts, embedding table, all u32 rows of 128 lanes.

The `put_*` functions write one weight into zeroed rows, be they an array or a file; whoever has all weights at hand
calls `tape_image`, `expert_image` and `embedding_image`. What no weight covers stays zero (scales: one).
"""
from __future__ import annotations

from typing import Protocol

import numpy as np

from mkgen.graph.formats import format_of
from mkgen.graph.ir import Weight
from mkgen.pack import formats, sections
from mkgen.pack.coded import Coded, check, encode
from mkgen.pack.formats import LANES, as_bf16
from mkgen.pack.sections import put_columns
from mkgen.pack.places import (Home, TapePlaces, embedding_run, embedding_weight, expert_layers, expert_ranks, shapes,
                               share)
from mkgen.plan.experts import ExpertImage
from mkgen.plan.plan import Plan
from mkgen.plan.tape import Matrix, Vector



class Source(Protocol):
    """Logical weights: matrices [K, N], vectors [n], taps [taps, n], tables [vocab, hidden], an expert's matrix [K, N].

    May also have `coded(weight, layer) -> Coded` of a matrix that the plan stores in another format than bf16, and
    `expert_coded(weight, layer, e)` likewise; else they are encoded.

    """

    def weight(self, weight: Weight, layer: int) -> np.ndarray: ...

    def expert(self, weight: Weight, layer: int, expert: int) -> np.ndarray: ...


def tape_image(plan: Plan, rank: int, source: Source) -> np.ndarray:
    """u32 [tape_rows, 128] of one rank."""
    places, tape = TapePlaces(plan), np.zeros(shapes(plan)["tape"], np.uint32)
    last = {w.name for op in plan.graph.end.ops for w in op.weights()}
    for layer, name in places.homes:
        number, weight = layer if layer is not None else len(plan.graph.layers) if name in last else 0, plan.weights[name]
        packed = hasattr(source, "coded") and format_of(plan.spec.build, weight) != "bf16"
        put_weight(places, rank, tape, layer, name, (source.coded if packed else source.weight)(weight, number))
    return tape


def expert_image(plan: Plan, image: ExpertImage, rank: int, source: Source) -> np.ndarray:
    """u32 [layers * local_experts, rows, 128] of one rank and kind of experts."""
    out = np.zeros(image.shape, np.uint32)
    first, part = rank // image.tensor_parallel * image.local_experts, rank % image.tensor_parallel
    packed = image.format != "bf16" and hasattr(source, "expert_coded")
    for i, layer in enumerate(expert_layers(plan, image)):
        for e in range(max(0, min(image.local_experts, image.experts - first))):
            for which, name in enumerate(image.weights):
                weight = plan.weights[name]
                coded = source.expert_coded(weight, layer, first + e) if packed else encode(
                    image.format, source.expert(weight, layer, first + e).T)
                for p in range(image.pieces):
                    put_expert(image, out[image.slot(i, e, p)], which, part * image.pieces + p, coded)
            for which, name in enumerate(image.biases):
                bias = source.expert(plan.weights[name], layer, first + e)
                for p in range(image.pieces):
                    put_expert_bias(image, out[image.slot(i, e, p)], which, part * image.pieces + p, bias)
    return out


def embedding_image(plan: Plan, rank: int, source: Source) -> np.ndarray:
    """u32 [embed_rows, 128] of one rank."""
    out, table = np.zeros(shapes(plan)["embedding"], np.uint32), embedding_weight(plan)
    if table is not None:
        put_embedding(plan, rank, out, source.weight(table, 0))
    return out


# -- the tape --------------------------------------------------------------------------------------------------------

def put_weight(places: TapePlaces, rank: int, tape: np.ndarray, layer: int | None, name: str,
               value: np.ndarray | Coded) -> None:
    """A logical weight of `layer` (None: the ends) into all its places on a rank's tape. An array is rounded, or encoded, to what
    the place is stored in; a Coded [N, K] is what the place is stored in."""
    plan = places.plan
    weight, ranks = plan.weights[name], plan.mesh.ranks
    shape = value.shape[::-1] if isinstance(value, Coded) else value.shape
    if shape != weight.shape:
        raise ValueError(f"{name} is {list(weight.shape)}, not {list(shape)}")
    for home in places.homes[layer, name]:
        entries = places.entries[layer, home.of.name]
        if isinstance(home.of, Matrix) and home.of.format != "bf16":
            if not isinstance(value, Coded):
                value = encode(home.of.format, value.T)
            k, n = (share(weight, axis, home.of, ranks, rank) for axis in (0, 1))
            put_coded_matrix(tape, entries, home, value.outputs(n.start, n.stop).regrouped(home.of.group).inputs(k.start, k.stop))
            continue
        local = value[tuple(share(weight, axis, home.of, ranks, rank) for axis in range(value.ndim))]
        if local.size:
            (put_matrix if isinstance(home.of, Matrix) else put_vector)(tape, entries, home, local)


def put_matrix(tape: np.ndarray, entries: list[tuple[int, int]], home: Home, local: np.ndarray) -> None:
    """The rank's [k, n] of one part of a matrix, into its columns of every block that they reach."""
    m: Matrix = home.of
    bits = _widened(as_bf16(local.T), m.k_padded).view(np.uint16)                 # [n, k_padded]: K in memory order
    put = put_panels if m.layout == "panels" else put_lanes
    for block, row in entries:
        n, k = divmod(block, m.k_blocks)
        left = n * m.block_n
        first, last = max(home.at, left), min(home.at + len(bits), left + m.block_n)
        if first < last:
            columns = bits[first - home.at:last - home.at, k * m.block_k:(k + 1) * m.block_k]
            put(tape[row:row + m.block_rows], columns, first - left)


def put_coded_matrix(tape: np.ndarray, entries: list[tuple[int, int]], home: Home, local: Coded) -> None:
    """The rank's [n, k] of one part of a matrix in its own format, into its columns of every block that they reach."""
    m: Matrix = home.of
    if local.format != m.format:
        raise ValueError(f"{local.format} into {m.name}, which is stored as {m.format}")
    check(local, m.parts[home.part].weight)
    put = put_section if m.layout == "panels" else put_byte_lanes
    for block, row in entries:
        n, k = divmod(block, m.k_blocks)
        left = n * m.block_n
        first, last = max(home.at, left), min(home.at + local.shape[0], left + m.block_n)
        if first < last and k * m.block_k < local.shape[1]:
            part = local.outputs(first - home.at, last - home.at).inputs(k * m.block_k, (k + 1) * m.block_k)
            put(tape[row:row + m.block_rows], m, part, first - left)


def put_section(rows: np.ndarray, m: Matrix, part: Coded, at: int) -> None:
    """Into columns `at`.. of a block of panels."""
    sections.put(rows, m.section, part, at)


def put_byte_lanes(rows: np.ndarray, m: Matrix, part: Coded, at: int) -> None:
    """8-bit codes into columns `at`.. of a block with K on lanes, and the columns' scales into the rows behind."""
    put_lanes(rows[:m.code_rows], _widened(part.codes.view(np.uint8), m.block_k), at)
    rows[m.code_rows:].view(np.float32).reshape(-1)[at:at + len(part.codes)] = part.scales[:, 0]


def put_panels(rows: np.ndarray, bits: np.ndarray, at: int) -> None:
    """u16 [n, block_k] into columns `at`.. of a block of panels (formats.pack_panels)."""
    put_columns(rows.reshape(-1, bits.shape[1] // 2, LANES), bits.view(np.uint32), at)


def put_lanes(rows: np.ndarray, codes: np.ndarray, at: int) -> None:
    """u16 or u8 [n, block_k] into columns `at`.. of a block with K on lanes (formats.pack_lanes).

    Two or four columns share a word, so every second or fourth is written apart: the neighbour may be another weight's.
    """
    blocks, each = codes.shape[1] // LANES, 4 // codes.itemsize
    parts = rows.view(codes.dtype).reshape(blocks, -1, LANES, each)
    for part in range(each):
        first = (part - at) % each
        columns = codes[first::each]
        i = (at + first) // each
        parts[:, i:i + len(columns), :, part] = columns.reshape(len(columns), blocks, LANES).swapaxes(0, 1)


def put_vector(tape: np.ndarray, entries: list[tuple[None, int]], home: Home, local: np.ndarray) -> None:
    """The rank's [n], or [lines, n], of one part of a vector, into its columns of every line."""
    v: Vector = home.of
    for _, row in entries:
        rows = tape[row:row + formats.vector_rows(v.lane_rows * LANES, v.dtype)]
        lines = formats.unpack_vector(rows, v.lane_rows * LANES, v.dtype).reshape(v.lines, -1).copy()
        lines[:, home.at:home.at + local.shape[-1]] = local
        rows[...] = formats.pack_vector(lines.reshape(-1), v.dtype)


# -- experts ---------------------------------------------------------------------------------------------------------

def put_expert(image: ExpertImage, rows: np.ndarray, which: int, part: int, coded: Coded) -> None:
    """Part `part` (rank by rank, piece by piece) of the which-th of `image.weights` [N, K] into a piece's u32 [image.rows, 128].

    Gate and up are cut by columns, down by rows, where a scale begins: see plan_experts.
    """
    if coded.format != image.format:
        raise ValueError(f"{coded.format} into an image of {image.format}")
    section, first, _ = image.place(which)
    mine = slice(part * image.width, (part + 1) * image.width)
    if section is image.up:
        coded = coded.outputs(mine.start, mine.stop)
    elif mine.start < coded.shape[1]:
        coded = coded.regrouped(section.group).inputs(mine.start, mine.stop)
    else:
        return                               # the last ranks' share may be padding alone
    check(coded, image.weights[which])
    fold = image.fold if section is image.up else 1
    for nth in range(fold):
        sections.put(rows, section, coded.inputs(nth * section.k, (nth + 1) * section.k) if fold > 1 else coded, first + nth * image.step)


def put_expert_bias(image: ExpertImage, rows: np.ndarray, which: int, part: int, bias: np.ndarray) -> None:
    """Part `part` of the which-th of `image.biases`; that of down is added once, with the first part."""
    section, _, columns = image.place(which)
    mine = bias[part * image.width:(part + 1) * image.width] if section is image.up else bias if part == 0 else bias[:0]
    line = np.zeros(columns, np.float32)
    line[:len(mine)] = mine
    rows[image.bias_row(which):image.bias_row(which) + columns // LANES] = line.view(np.uint32).reshape(-1, LANES)


def put_expert_everywhere(image: ExpertImage, images: dict[int, np.ndarray], index: int, expert: int, which: int,
                          value: Coded | np.ndarray) -> None:
    """One matrix (or bias) of `expert` of the kind's index-th layer into all `images` (rank -> image) that hold a part."""
    put = put_expert if isinstance(value, Coded) else put_expert_bias
    for part, rank in enumerate(expert_ranks(image, expert)):
        if rank in images:
            for p in range(image.pieces):
                put(image, images[rank][image.slot(index, expert, p)], which, part * image.pieces + p, value)


# -- the embedding table ---------------------------------------------------------------------------------------------

def put_embedding(plan: Plan, rank: int, rows: np.ndarray, table: np.ndarray) -> None:
    """The rank's tokens of a table [vocab, hidden] into u32 [embed_rows, 128], a token after another.

    Word i, lane l of a token: feature 256 i + l in the low half, 256 i + 128 + l in the high half.
    """
    mine = as_bf16(table[embedding_run(plan, rank)])
    if not mine.size:
        return
    words = -(-table.shape[1] // (2 * LANES))
    bits = _widened(mine, words * 2 * LANES).view(np.uint16).reshape(len(mine), words, 2, LANES)
    halves = rows[:len(mine) * words].view(np.uint16).reshape(len(mine), words, LANES, 2)
    for half in (0, 1):
        halves[..., half] = bits[:, :, half]


def _widened(a: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
    """a [n, m] -> [n, width], contiguous, filled up with `fill`; `a` itself where nothing is missing."""
    if a.shape[1] == width:
        return np.ascontiguousarray(a)
    out = np.full((len(a), width), fill, a.dtype)
    out[:, :a.shape[1]] = a
    return out
