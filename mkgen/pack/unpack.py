"""Back from images to logical weights, bit for bit, by the inverse functions of `formats`: packing loses nothing."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mkgen.pack import formats, sections
from mkgen.pack.coded import Coded, decode
from mkgen.pack.formats import LANES
from mkgen.pack.places import TapePlaces, embedding_run, expert_ranks, share
from mkgen.plan.experts import ExpertImage
from mkgen.plan.plan import Plan
from mkgen.plan.tape import Matrix


def matrix_from_tape(places: TapePlaces, tape: np.ndarray, layer: int | None, name: str) -> np.ndarray:
    """[k_padded, n_padded] of a rank: a matrix with all its parts and its padding; bf16, or f32 from another format."""
    m = places.plan.matrices[name]
    if m.format != "bf16":
        return coded_matrix_from_tape(places, tape, layer, m)
    out = np.empty((m.k_padded, m.n_padded), formats.bfloat16)
    undo = formats.unpack_panels if m.layout == "panels" else formats.unpack_lanes
    for block, row in places.entries[layer, name]:
        n, k = divmod(block, m.k_blocks)
        value = undo(tape[row:row + m.block_rows], m.block_k, m.block_n)
        out[k * m.block_k:(k + 1) * m.block_k, n * m.block_n:(n + 1) * m.block_n] = value
    return out


def coded_matrix_from_tape(places: TapePlaces, tape: np.ndarray, layer: int | None, m: Matrix) -> np.ndarray:
    """f32 [k_padded, n_padded]: what the codes stand for."""
    out = np.zeros((m.k_padded, m.n_padded), np.float32)
    for block, row in places.entries[layer, m.name]:
        n, k = divmod(block, m.k_blocks)
        rows = tape[row:row + m.block_rows]
        if m.layout == "panels":
            left = 0
            for width in (*(p.width for p in m.parts), m.n_padded - m.n):            # each has a tensor scale of its own
                first, last = max(left, n * m.block_n), min(left + width, (n + 1) * m.block_n)
                if first < last:
                    coded = sections.take(rows, m.section, m.block_k, last - first, first - n * m.block_n)
                    out[k * m.block_k:(k + 1) * m.block_k, first:last] = decode(coded).T
                left += width
            continue
        codes = rows[:m.code_rows].view(np.uint8).reshape(m.block_k // LANES, -1, LANES, 4).transpose(1, 3, 0, 2)
        codes = np.ascontiguousarray(codes).reshape(m.block_n, m.block_k)
        scales = rows[m.code_rows:].view(np.float32).reshape(-1)[:m.block_n, None]
        coded = Coded(m.format, codes.view(np.int8) if m.format == "int8" else codes, scales)
        out[k * m.block_k:(k + 1) * m.block_k, n * m.block_n:(n + 1) * m.block_n] = decode(coded).T
    return out


def vector_from_tape(places: TapePlaces, tape: np.ndarray, layer: int | None, name: str) -> np.ndarray:
    """f32 or bf16 [lines, whole lanes] of a rank: a vector with all its parts, and the padding of each line."""
    v = places.plan.vectors[name]
    (_, row), = places.entries[layer, name]
    count = v.lane_rows * LANES
    rows = tape[row:row + formats.vector_rows(count, v.dtype)]
    return formats.unpack_vector(rows, count, v.dtype).reshape(v.lines, -1)


def weight_from_tapes(places: TapePlaces, tapes: Sequence[np.ndarray], layer: int | None, name: str) -> np.ndarray:
    """A whole logical weight from the tapes of all ranks, in the dtype stored.

    Raises ValueError if ranks that hold the same elements differ, or if no rank holds some of them.
    """
    plan = places.plan
    weight = plan.weights[name]
    out, known = None, np.zeros(weight.shape, bool)
    for home in places.homes[layer, name]:
        read = matrix_from_tape if isinstance(home.of, Matrix) else vector_from_tape
        for rank, tape in enumerate(tapes):
            cut = tuple(share(weight, axis, home.of, plan.mesh.ranks, rank) for axis in range(len(weight.shape)))
            sizes = [s.stop - s.start for s in cut]
            local = read(places, tape, layer, home.of.name)
            local = local[:sizes[0] if len(sizes) == 2 else 1, home.at:home.at + sizes[-1]]
            out = np.zeros(weight.shape, local.dtype) if out is None else out
            local = local.reshape(sizes)
            if not np.array_equal(out[cut][known[cut]], local[known[cut]]):
                raise ValueError(f"{name}: rank {rank} holds other values than the ranks before it")
            out[cut], known[cut] = local, True
    if not known.all():
        raise ValueError(f"{name}: no rank holds {np.count_nonzero(~known)} of its elements")
    return out


def embedding_from_images(plan: Plan, images: Sequence[np.ndarray]) -> np.ndarray:
    """bf16 [vocab, hidden] from the embedding images of all ranks."""
    hidden = plan.spec.model.hidden
    words = -(-hidden // (2 * LANES))
    parts = []
    for rank, image in enumerate(images):
        run = embedding_run(plan, rank)
        tokens = image[:(run.stop - run.start) * words].reshape(-1, words * LANES)
        low, high = tokens & np.uint32(0xFFFF), tokens >> np.uint32(16)
        halves = np.stack([h.astype(np.uint16).reshape(-1, words, LANES) for h in (low, high)], axis=2)
        parts.append(halves.reshape(len(tokens), 2 * words * LANES)[:, :hidden])
    return np.concatenate(parts).view(formats.bfloat16)


def expert_from_images(image: ExpertImage, images: Sequence[np.ndarray], index: int, expert: int) -> list[Coded]:
    """The matrices [N, K] of `expert` of the kind's index-th layer, from the expert images of all ranks."""
    held = [images[r][image.slot(index, expert, p)] for r in expert_ranks(image, expert) for p in range(image.pieces)]
    return [_expert_matrix(image, held, which) for which in range(len(image.weights))]


def _expert_matrix(image: ExpertImage, held: Sequence[np.ndarray], which: int) -> Coded:
    """The which-th matrix from the pieces of the ranks that share an expert; none of their padding."""
    (section, first, _), parts = image.place(which), []
    for part, rows in enumerate(held):
        width = max(0, min(image.whole_width - part * image.width, image.width))     # the last ranks' parts end in padding
        n, k = (width, image.k) if section is image.up else (image.out, width)
        fold = image.fold if section is image.up else 1
        along = [sections.take(rows, section, k // fold, n, first + nth * image.step) for nth in range(fold)]
        parts.append(joined(along, 1))
    return joined(parts, 0 if section is image.up else 1)


def joined(parts: Sequence[Coded], axis: int) -> Coded:
    """Parts of a matrix, along its columns (0) or K (1): scales of columns are the same in each part of K."""
    join = lambda of: None if of(parts[0]) is None else np.concatenate([of(c) for c in parts], axis)
    scales = parts[0].scales if axis and not parts[0].kind.group else join(lambda c: c.scales)
    return replace(parts[0], codes=join(lambda c: c.codes), scales=scales, zeros=join(lambda c: c.zeros))
