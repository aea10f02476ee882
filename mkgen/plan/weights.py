"""The builder's view of weights: cuts them into chunks of the tape and gives the source text that reads them."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import gcd

from mkgen.errors import MkgenError
from mkgen.graph.formats import format_of
from mkgen.graph.ir import Value, Weight
from mkgen.plan.experts import ExpertImage
from mkgen.plan.memory import ROWS_PADDED, Place, identifier
from mkgen.plan.regions import Advance, Buffer, Loop, Node, Start, Wait
from mkgen.plan.section import DEPTH, LEAST_GROUP, Section, depth_unit, expert_rows, left_rows, stored_group
from mkgen.plan.shard import local_units, round_up, unit_range
from mkgen.plan.tape import LANES, Chunk, Entry, Matrix, Part, Vector, plan_matrix
from mkgen.spec.formats import FORMATS


REFILL = Start("tape_copy", ("m", "g + RING_DEPTH"))


def without_refills(nodes: Sequence[Node]) -> tuple[tuple[Node, ...], int]:
    """(the nodes but for the refills of slots as they fall free, how many those are)."""
    out, count = [], 0
    for n in nodes:
        if isinstance(n, Loop):
            body, inside = without_refills(n.body)
            n, count = (replace(n, body=body), count + inside * int(n.trips)) if inside else (n, count)
        if n == REFILL:
            count += 1
        else:
            out.append(n)
    return tuple(out), count


class Weights:
    def whole(self, ws: tuple[Weight, ...]) -> bool:
        """A family is kept whole if the build says so, or if it has fewer units than there are ranks and is gathered anyway
        (it has no groups), unless it shares a matrix with families that are split."""
        few = all(w.split is None or not w.groups and w.units < (self.over(ws) or self.ranks) for w in ws)
        return few or any(w.name in self.build.replicate for w in ws)

    def over(self, ws: tuple[Weight, ...]) -> int:
        """Neighbours that these families are cut over, which share a matrix; 0: all ranks."""
        groups = {self.build.over.get(w.name) for w in ws}
        if len(groups) > 1:
            raise MkgenError(f"build.over: {', '.join(w.name for w in ws)} lie in one matrix\n  fix: cut them over one group")
        name = groups.pop()
        return self.mesh.neighbours(name) if name else 0

    def width(self, w: Weight, axis: int, whole: bool, over: int = 0) -> int:
        if whole or w.split != axis:
            return w.shape[axis]
        return w.shape[axis] // w.units * local_units(w.units, over or self.ranks, w.groups)

    def take(self, entry_rows: int, name: str, block: int | None = None) -> int:
        """A place for `entry_rows` rows in the open chunk; opens one (and waits for it) where none is open or it is full."""
        if entry_rows > self.memory.slot_rows:
            raise MkgenError(f"{name}: its {entry_rows * 512} bytes do not fit into build.block_kib = {self.build.block_kib}\n"
                             f"  why: it is read as a whole from one ring slot\n  fix: raise build.block_kib")
        if self.open is not None and sum(e.rows for e in self.open) + entry_rows > self.memory.slot_rows:
            self.close()
        if self.open is None:
            self.open = []
            if self.chunks or not self.awaited:
                self.nodes[-1].append(Wait("tape_copy", ("m", "g")))
        at = sum(e.rows for e in self.open)
        self.open.append(Entry(name, at, entry_rows, block))
        return at

    @property
    def awaited(self) -> bool:
        """Has the sub-layer before this one waited for its first chunk?"""
        return self.sub.role != "begin" and any(op.ahead for op in self.memory.graph.begin.ops)

    def ahead(self, width: int) -> str:
        """Source text of the float32 vector that the next sub-layer's first chunk begins with; the sub-layer's own are read."""
        self.close()
        self.nodes[-1].append(Wait("tape_copy", ("m", "g")))
        return f"tape_rows(m, g, 0, {Vector('', (), 1, width, 'f32', True).rows})"

    def close(self) -> None:
        """The open chunk has been read for the last time: its slot is refilled with the chunk `ring_depth` ahead."""
        if self.open is not None:
            self.advance(refill=self.refills(1) == 1)
            self.chunks.append(Chunk(tuple(self.open)))
            self.open = None

    def advance(self, refill: bool) -> None:
        self.nodes[-1] += ([REFILL] if refill else []) + [Advance()]

    def refills(self, count: int) -> int:
        """How many of the next `count` chunks refill their slot at once: all, except at the end of the tape."""
        if self.end_chunks is None:
            return count
        return max(0, min(count, self.end_chunks - self.memory.ring_depth - len(self.chunks)))

    def refill_behind(self, since: int) -> None:
        """The last refills of the sub-layer come here: what it has started meanwhile is waited for sooner than they are. As many as
        `build.late_refills` says; if 0, those since its node `since`, up to half of the ring: the other half is what may be read
        before they come."""
        nodes, asked, ring = self.nodes[0], self.build.late_refills, self.memory.ring_depth
        if asked >= ring:
            raise MkgenError(f"build.late_refills: {asked} of a ring of {ring}\n  why: its next chunk is read before they come\n"
                             f"  fix: at most {ring - 1}")
        at, count, most, first = len(nodes), 0, asked or ring // 2, 0 if asked else since
        while at > first and count + (more := without_refills(nodes[at - 1:at])[1]) <= most:
            at, count = at - 1, count + more
        if count:
            late = Loop("late_refills", "i", str(count), (Start("tape_copy", ("m", f"g + RING_DEPTH - {count} + i")),))
            nodes[at:] = [*without_refills(nodes[at:])[0], late if count > 1 else Start("tape_copy", ("m", "g + RING_DEPTH - 1"))]
            self.memory.notes.append((self.sub.name, f"{count} refills of the ring wait until the experts are done"))

    def together(self, *groups: tuple[Weight, ...]) -> None:
        """The vectors of one step lie in one chunk: a new one is begun if the open one has no room for all of them."""
        rows = sum(self.vector_of(*ws).rows for ws in groups)
        if self.open is not None and sum(e.rows for e in self.open) + rows > self.memory.slot_rows:
            self.close()

    def fill_ring(self) -> None:
        """The first copies of the tape, one into each slot."""
        with self.loop("fill_ring", "i", "RING_DEPTH", bound=self.memory.ring_depth):
            self.start("tape_copy", "m", "i")

    def vector(self, *ws: Weight, whole: bool = False) -> str:
        """Source text [lane_rows, 128] float32 of one family, or of several side by side (line by line for taps). whole: all of
        it on every rank, although it could be shared out."""
        at, v = self.vector_at(*ws, whole=whole)
        return f"vector(m, g, {at}, {v.rows}{', bf16' if v.dtype == 'bf16' else ''})"

    def vector_at(self, *ws: Weight, whole: bool = False) -> tuple[int, Vector]:
        """The row of the open chunk where the families lie, and how."""
        v = self.vector_of(*ws, whole=whole)
        self.memory.vectors[v.name] = v
        self.memory.weights.update({w.name: w for w in ws})
        return self.take(v.rows, v.name), v

    def vector_of(self, *ws: Weight, whole: bool = False) -> Vector:
        """How the families are stored, side by side."""
        name = ws[0].name if len(ws) == 1 else "+".join(w.name for w in ws)
        whole = whole or self.ranks == 1 or all(w.split is None for w in ws)
        lines = ws[0].shape[0] if len(ws[0].shape) == 2 else 1
        width = sum(self.width(w, len(w.shape) - 1, whole) for w in ws)
        return Vector(name, tuple(w.name for w in ws), lines, width, ws[0].dtype, whole)

    def matrix(self, name: str, ws: tuple[Weight, ...], along: str, beside: tuple[Weight, ...] = ()) -> Matrix:
        """beside: all families that read the same input; they are whole or split together."""
        whole = self.ranks == 1 or (along == "columns" and self.whole(beside or ws)) or along == "whole"
        over = 0 if whole else self.over(ws)
        k = self.width(ws[0], 0, whole)
        parts = tuple(Part(w.name, self.width(w, 1, whole, over)) for w in ws)
        fmt = format_of(self.build, ws[0])
        most = min(self.build.unroll, -(-self.memory.ring_depth // 2))         # the other half of the ring is on its way meanwhile
        m, why = plan_matrix(name, parts, k, whole, self.memory.slot_rows, self.memory.target, fmt,
                             self.group(name, fmt, ws[0], whole), max(self.build.rows), self.terms, most,
                             once=self.memory.graph.runs(self.sub) == 1)
        m = replace(m, over=over)
        self.memory.notes.append((name, why + ("; whole on every rank" if whole and self.ranks > 1 else f"; cut over {over} ranks" if over else "")))
        self.memory.matrices[name] = m
        self.memory.weights.update({w.name: w for w in ws})
        return m

    def group(self, name: str, fmt: str, w: Weight, whole: bool) -> int:
        """Weights along K that share a scale on the tape: the format's group, or less where the ranks' shares of K cut it."""
        starts = [0] if whole or w.split != 0 else [unit_range(w.units, self.ranks, rank, w.groups, w.once)[0] * (w.shape[0] // w.units)
                                                    for rank in range(self.ranks)]
        starts = [at for at in starts if at < w.shape[0]]
        group = stored_group(fmt, starts)
        if group and group < LEAST_GROUP:
            raise MkgenError(f"{name}: {fmt} cannot be cut over {self.ranks} ranks\n  why: {FORMATS[fmt].group} rows of K share a scale, "
                             f"the ranks' shares begin at multiples of {gcd(*starts)}, and fewer than {LEAST_GROUP} are not built\n"
                             f"  fix: bf16, int8 or fp8 for {w.roles[0]} in build.formats, or another build.mesh")
        if group < FORMATS[fmt].group:
            self.memory.notes.append((name, f"a scale for each {group} rows of K instead of {FORMATS[fmt].group}: the ranks' shares cut groups"))
        return group

    def head_columns(self, w: Weight) -> Iterator[dict]:
        """A matrix that is read head by head, in blocks of whole heads. Arguments of the step that reads a block: the `matrix`,
        `at` which row of the chunk it lies, the block's number (`first`), `dim` columns of a head, and the heads `begin` to
        `end` - 1 that it holds. The step is to be added before the next block is asked for."""
        k, dim, fmt, alone = w.shape[0], w.shape[1] // w.units, format_of(self.build, w), self.ranks == 1
        n, deep, whole = self.width(w, 1, alone), round_up(k, depth_unit(fmt)), LANES // gcd(dim, LANES)

        def blocks_of(heads: int) -> Matrix:
            wide = round_up(heads * dim, LANES)
            return Matrix(w.name, (Part(w.name, n),), "panels", k, n, deep, -(-n // (heads * dim)) * wide, deep, wide, alone, fmt,
                          self.group(w.name, fmt, w, alone), at_once=True)

        heads = n // dim
        sizes = [heads, *(size for size in range(heads // whole * whole, 0, -whole))]        # blocks begin at a panel
        fits = next((size for size in sizes if blocks_of(size).block_rows <= self.memory.slot_rows), 0)
        if not fits:
            raise MkgenError(f"{w.name}: [{k}, {min(heads, whole) * dim}] does not fit into build.block_kib = {self.build.block_kib}\n"
                             f"  why: it is read as blocks of whole heads, of {blocks_of(min(heads, whole)).block_rows // 2} KiB at least\n"
                             "  fix: raise build.block_kib")
        even = fits if fits == heads else round_up(-(-heads // -(-heads // fits)), whole)
        m = self.memory.matrices[w.name] = blocks_of(even)
        self.memory.weights[w.name] = w
        self.memory.notes.append((w.name, f"panels, {m.blocks} x [{deep}, {m.block_n}]: read head by head"))
        for i in range(m.blocks):
            at = self.take(m.block_rows, w.name, i)
            yield dict(matrix=m, at=at, first=i, dim=dim, begin=i * even, end=min((i + 1) * even, heads))

    def matmul(self, op) -> None:
        """A Linear: its matrices, one after another; families that are stored alike share one."""
        runs = [list(run) for _, run in groupby(zip(op.ys, op.ws), key=lambda pair: format_of(self.build, pair[1]))]
        if len(runs) == 1:
            self.product(op, op.name, op.ys, op.ws)
            return
        for run in runs:
            ys, ws = zip(*run)
            name = f"{op.name}_{'_'.join(self.bare(w.name) for w in ws)}"
            self.product(replace(op, name=name), name, ys, ws, op.ws)
        places = [self.memory.places[y.name] for y in op.ys]
        buffer = self.room(op.name + "_y", sum(p.width for p in places), "f32", " | ".join(self.bare(y.name) for y in op.ys) + ", not rounded")
        parts, at = [], 0
        for y, p in zip(op.ys, places):
            parts.append((at, p.at, p.width, f"m.{p.buffer}"))
            self.memory.places[y.name] = Place(buffer, at, p.width, "f32", p.spread, over=p.over)
            at += p.width
        self.step(op, "linear", "join", reads=tuple(p.buffer for p in places), writes=(buffer,), y=f"m.{buffer}", parts=parts)

    def product(self, op, name: str, ys: tuple[Value, ...], ws: tuple[Weight, ...], beside: tuple[Weight, ...] = ()) -> None:
        """One matrix of `op`: blocks one after another through the ring; one block shares a chunk with its neighbours."""
        m = self.matrix(name, ws, op.along, beside)
        spread = {"columns": "split", "rows": "partial"}.get(op.along, "whole") if self.ranks > 1 and not m.whole else "whole"
        last = self.sub.role == "end"
        buffer = self.room("logits" if last else name + "_y", m.n_padded, "f32", "logits of this rank's vocabulary" if last else
                           " | ".join(self.bare(y.name) for y in ys) + ", not rounded", space="out" if last else "vmem")
        at = 0
        for y, part in zip(ys, m.parts):
            self.memory.places[y.name] = Place(buffer, at, part.width, "f32", spread, over=m.over)
            at += part.width
        x = self.place(op.x)
        if x.width != m.k:
            raise ValueError(f"{op.name}: its input has {x.width} columns on a rank, its matrix {m.k} rows")
        template, args = "linear", dict(matrix=m, x=self.read(op.x, "bf16"), y=f"m.{buffer}", pad=m.k_padded - x.width)
        if m.group:
            self.spread(op, m, x=args.pop("x"), pad=args.pop("pad"))
            template, args = "coded", args | dict(reads=self.left_operand(m))
        if m.blocks == 1:
            self.step(op, template, "single", writes=(buffer,), at=self.take(m.block_rows, m.name, 0), **args)
            return
        self.close()
        if m.k_blocks > 1:
            self.step(op, "linear", "clear", writes=(buffer,), y=f"m.{buffer}")
        if not m.group:
            args |= dict(x_ref=f"m.{x.buffer}", x_at=x.at, x_dtype=x.dtype)
        for first, turns, turn, refills in m.loops(self.refills(m.blocks)):
            with self.loop(f"{identifier(name)}_block", "i", str(turns)):
                self.nodes[-1] += [Wait("tape_copy", ("m", f"g + {chunk}" if chunk else "g")) for chunk in range(turn)]
                for chunk in range(turn):
                    self.step(op, template, "block", writes=(buffer,), number=f"{turn} * i + {first + chunk}", **args)
                    self.advance(refill=chunk < refills)
        self.chunks += [Chunk((Entry(m.name, 0, m.block_rows, i),)) for i in range(m.blocks)]

    def left_operand(self, m: Matrix) -> tuple[str, ...]:
        return ("spread", "spread_sums") if FORMATS[m.format].zero else ("spread",)

    def spread(self, op, m: Matrix, **args) -> None:
        """x as the left operand of a product with scales of groups; the buffer is as large as the largest needs it."""
        rows = max(left_rows(m.format, m.group, r, self.terms) for r in self.build.rows)
        for name in self.left_operand(m):
            most = self.memory.left.get(name, (0, 0))
            self.memory.left[name] = max(most[0], -(-m.k_padded // DEPTH)), max(most[1], rows)
        self.step(op, "coded", "spread", writes=self.left_operand(m), of=m, **args)

    @property
    def terms(self) -> int:
        """bf16 terms of an activation."""
        return 2 if self.build.activations == "f32" else 1

    def embedding(self, table: Weight, run: int) -> int:
        """Declares the rank's part of an embedding table, `run` tokens; returns u32 rows a token."""
        words = -(-table.shape[1] // (2 * LANES))
        self.memory.weights[table.name] = table
        self.memory.embed_rows = run * words
        return words

    def expert_image(self, op) -> ExpertImage:
        """The image of this kind's experts."""
        self.memory.weights.update({w.name: w for w in (*op.matrices(), *op.biases())})
        return self.memory.experts[self.sub.name]

    def expert_buffer(self, name: str, shape: tuple[int, ...], dtype: str, purpose: str) -> str:
        """A buffer that routed experts work in; kinds share it if they are of one shape, else each has its own."""
        return self.shared(name, name + self.memory.experts[self.sub.name].suffix, shape, dtype, purpose)

    def expert_operand(self, name: str, s: Section, fold: int = 1, each: tuple[int, ...] = ()) -> str:
        """The left operand of an expert's matrix, as its format wants it. each: one for each expert of a batch."""
        if not s.group:
            return self.expert_buffer(name, (*each, fold * ROWS_PADDED, s.k), self.build.activations, "left operand" + ", parts of K in rows" * (fold > 1))
        few, chunks = expert_rows(s.format, s.group, self.terms, self.build.lone_experts), -(-s.k // DEPTH)
        rows = round_up(s.parts * max(left_rows(s.format, s.group, r, self.terms, few) for r in self.build.rows), 16)    # whole tiles of bf16
        name = self.expert_buffer(name, (*each, chunks, rows, DEPTH), "bf16", "left operand, block-diagonal")
        if s.kind.zero:
            self.buffer(f"{name}_sums", (*each, chunks, rows, LANES), "f32", "sums of its groups, on every lane")
        return name

    def lone(self) -> bool:
        """Is an expert that one row chose multiplied for that row alone? Where each row has lines of its own, side by side, in all left
        operands; two rows take no longer than one. Eight experts are marked in a word, and a word says which of the others are not zero."""
        images = self.memory.experts.values()
        few = [expert_rows(s.format, s.group, self.terms, self.build.lone_experts) if s.group else 0 for image in images for s in (image.up, image.down)]
        scaled = any(op.scale_input for sub in self.memory.graph.ffns.values() for op in sub.ops if op.kind == "routed_experts")
        able = all(image.local_experts <= 256 and image.up.parts == 1 for image in images)
        return self.build.lone_experts and self.build.expert_batch == 1 and not scaled and 2 < max(self.build.rows) <= min(few) and able

    def top_k(self, image: ExpertImage) -> int:
        """Of a kind of routed experts."""
        sub = self.memory.graph.ffns[image.kind]
        return next(op.top_k for op in sub.ops if op.kind == "routed_experts")

    def most(self, of: Callable[[ExpertImage], int]) -> int:
        """The largest of all kinds of routed experts: what they share is as large as one of them needs it."""
        return max(map(of, self.memory.experts.values()))
