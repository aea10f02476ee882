"""The builder's view of exchanges: which value needs one, by which rounds it goes, and the nodes that start and finish it.

A round is one message from each rank to every other of a group. Three kinds: `gather` brings the pieces of all ranks together,
`scatter` gives each rank its columns of a sum, `reduce` gives every rank the whole sum. A sum that is needed whole is arranged as a
scatter and a gather; where its payload makes one reduce faster, that takes the scatter's place and the gather is left out; or it goes
whole beside what is scattered at the same time. So the order of the ops, and with it the tape, does not depend on what is faster.

What is cut over a group of neighbours (`build.over`) is gathered within the group. A sum that is added to it is scattered within the
group as well; then the groups reduce what their members hold.
"""
from __future__ import annotations

from dataclasses import replace
from math import prod

from mkgen.errors import MkgenError
from mkgen.graph.ir import Op, Value
from mkgen.plan.by_rows import ByRows
from mkgen.plan.exchange import BESIDE, ROWS, Exchange, Run, rounds
from mkgen.plan.memory import ROWS_PADDED, Place
from mkgen.plan.regions import Advance, Collective, Loop, Node, Seq, Start, Step, walk
from mkgen.plan.shard import round_up, unit_range
from mkgen.plan.tape import LANES
from mkgen.targets.exchange import phase_seconds


class Exchanges(ByRows):
    def complete(self, op: Op) -> None:
        """Makes the inputs of an op as complete as it needs them. Where the sub-layer has been arranged that is done already."""
        inputs = {v.name: v for v in op.inputs() if v.name in self.memory.places}
        spread = {n: self.memory.places[n].spread for n in inputs}
        for name, need in self.needs(op, spread, inputs).items():
            if name not in inputs:
                continue
            if self.ranks == 1:                    # a term of one is the sum
                self.memory.places[name] = replace(self.memory.places[name], spread="whole")
                continue
            ranks = {self.sharers_of(v) for n, v in inputs.items() if spread[n] == "split"} if need == "split" else {0}
            for exchange in rounds(name, spread[name], need, max(ranks)):
                if self.arranged:
                    raise ValueError(f"{op.name}: {name} was to be {exchange.kind}ed before")
                self.trace.append(exchange)
                self.finish_exchange(self.start_exchange(exchange))

    def needs(self, op: Op, spread: dict[str, str], inputs: dict[str, Value]) -> dict[str, str]:
        """Where an op treats each column alone and all that is split is cut into equal runs, sums need their own run only."""
        if by_rows := self.row_needs(op, spread):
            return by_rows
        if self.by_column and op.columnwise and set(spread.values()) == {"split", "partial"}:
            split = [inputs[n] for n, s in spread.items() if s == "split"]
            ranks = {self.sharers_of(v) for v in split}
            if len(ranks) == 1 and all(self.even(v) for v in split) and all(v.width % max(ranks) == 0 for v in inputs.values()):
                return {n: "split" for n, s in spread.items() if s == "partial"}
        return op.needs(spread)

    def even(self, v: Value) -> bool:
        """Is rank r's piece of v the r-th of equal runs of columns?"""
        p, unit, ranks = self.memory.places[v.name], v.width // v.units, self.sharers_of(v)
        if p.even:
            return p.width * ranks == v.width
        starts = [unit_range(v.units, ranks, rank, v.groups)[0] * unit for rank in range(ranks)]
        return p.width * ranks == v.width and starts == [rank * p.width for rank in range(ranks)]

    # -- which way ------------------------------------------------------------------------------------------------------

    def runs(self, exchange: Exchange) -> list[Run]:
        """The exchange as it will be made: sums that are reduced at once are not scattered, and later not gathered."""
        values = [self.value(n) for n in exchange.values if self.memory.places[n].spread != "whole"]
        if exchange.rows:
            return [self.row_run(exchange.kind, v) for v in values]
        if exchange.kind == "gather":
            by_ranks = {ranks: [v for v in values if self.sharers_of(v) == ranks] for ranks in map(self.sharers_of, values)}
            return [self.gather_run(ranks, vs) for ranks, vs in by_ranks.items()]
        own, sums = [v for v in values if v.name not in self.whole_sums], [v for v in values if v.name in self.whole_sums]
        over = exchange.over or self.ranks
        beside = self.scatter_run(own, sums, over)
        if own and sums and self.go_beside(own, sums, over, beside):
            self.memory.ways |= {v.name: BESIDE for v in sums}
            return [beside]
        found: dict[tuple, list[Value]] = {}
        for v in sums:
            found.setdefault(self.path_of_sum(v.name, v.width, joins=bool(own), over=over), []).append(v)
        parts, together = own + found.pop(None, []), [v for vs in found.values() for v in vs]
        runs = [Run("reduce", path, tuple(vs)) for path, vs in found.items()]
        if len(runs) > 1 and not any(v.name in self.build.reduce for v in together):
            path = self.path("reduce", sum(v.width for v in together), "auto")
            self.memory.ways |= {v.name: " ".join(path) for v in together}
            runs = [Run("reduce", path, tuple(together))]
        return ([self.scatter_run(parts, [], over)] if parts else []) + runs

    def scatter_run(self, parts: list[Value], whole: list[Value], over: int) -> Run:
        """Sums shared out to `over` neighbours, others beside them that every rank gets whole."""
        columns, beside = sum(-(-v.width // over) for v in parts), sum(v.width for v in whole)
        return Run("scatter", self.path("scatter", columns, ranks=over, beside=beside), (*parts, *whole), None, over % self.ranks, len(whole))

    def go_beside(self, own: list[Value], sums: list[Value], over: int, beside: Run) -> bool:
        """Do sums that are needed whole travel beside the others: because it is asked for, or because no other way is as fast?"""
        asked = {self.asked(v.name) for v in sums}
        if asked != {"auto"}:
            return asked == {BESIDE}
        mine, theirs = (sum(-(-v.width // over) for v in vs) for vs in (own, sums))
        width, wire = sum(v.width for v in sums), self.gather_wire(sums)
        alone, both = (self.seconds("scatter", self.path("scatter", n, ranks=over), n, ranks=over) for n in (mine, mine + theirs))
        gather = self.seconds("gather", self.path("gather", theirs, wire=wire, ranks=over), theirs, wire)
        other = min(alone + self.seconds("reduce", self.path("reduce", width, "auto"), width), both + gather)
        return self.seconds("scatter", beside.path, mine, ranks=over, beside=width) < other

    def sharers_of(self, v: Value) -> int:
        """Neighbours that a value is split over."""
        return self.memory.places[v.name].over or self.ranks

    def gather_run(self, ranks: int, values: list[Value]) -> Run:
        columns = sum(self.memory.places[v.name].width for v in values)
        wire = self.gather_wire(values)
        return Run("gather", self.path("gather", columns, wire=wire, ranks=ranks), tuple(values), wire)

    def gather_wire(self, values: list[Value]) -> str:
        """bf16 values lose nothing on a bf16 wire; a sum that `build.wire` rounds the terms of may be rounded itself."""
        def sum_of(p: Place) -> bool:
            return p.spread == "partial" or p.whole_at is not None

        bf16 = all(self.dtype(v) == "bf16" or self.build.wire == "bf16" and sum_of(self.memory.places[v.name]) for v in values)
        return "bf16" if bf16 else "f32"

    def path_of_sum(self, name: str, width: int, scatter: bool = True, joins: bool = False, over: int = 0) -> tuple[str, ...] | None:
        """The groups that reduce a sum one after another; None: it is scattered (to `over` neighbours) and gathered."""
        asked, over = self.asked(name), over or self.ranks
        asked = "auto" if asked == BESIDE else asked                 # there is nothing to go beside
        path = self.path("reduce", width, "auto" if asked == "scatter" else asked)
        if scatter and asked in ("auto", "scatter"):
            run = -(-width // over)
            wire = self.gather_wire([self.value(name)])
            both = self.seconds("gather", self.path("gather", run, wire=wire, ranks=over), run, wire)
            both += 0.0 if joins else self.seconds("scatter", self.path("scatter", run), run)
            if asked == "scatter" or both < self.seconds("reduce", path, width):
                path = None
        self.memory.ways[name] = " ".join(path) if path else "scatter"
        return path

    def path(self, kind: str, columns: int, asked: str | None = None, wire: str | None = None, ranks: int = 0, beside: int = 0) -> tuple[str, ...]:
        """The groups, in the order of their rounds: those that are asked for, or else what takes the least time over all row variants.
        ranks: fewer than all, which nobody asks for by name. beside: columns that are not shared out."""
        ranks = ranks or self.ranks
        asked = asked or ("auto" if ranks != self.ranks else getattr(self.build, kind))
        paths = self.mesh.paths_between(1, ranks)
        if asked != "auto":
            named = {"flat": paths[0], "staged": max(paths, key=len)}
            path = named.get(asked, tuple(asked.split()))
            if path not in paths:
                raise MkgenError(f"build.{kind}: {asked!r} does not lead to all {self.ranks} ranks\n  fix: one of auto, flat, staged, "
                                 f"{', '.join(' '.join(p) for p in paths)}")
            paths = [path]
        outer = self.mesh.paths_between(ranks, self.ranks)
        ordered = [(*path[::-1], *rest) for path in paths for rest in outer] if kind == "scatter" else paths
        return min(ordered, key=lambda path: self.seconds(kind, path, columns, wire, ranks, beside))

    def seconds(self, kind: str, path: tuple[str, ...], columns: int, wire: str | None = None, ranks: int = 0, beside: int = 0) -> float:
        """All rounds of an exchange, summed over the row variants."""
        messages = self.messages(kind, path, columns, wire, ranks, beside)
        return sum(self.round_seconds(size - 1, words, factors) for size, words, factors in messages)

    def round_seconds(self, peers: int, words: int, factors: tuple[str, ...]) -> float:
        return sum(phase_seconds(self.memory.target, peers, words * 4 * rows, factors=factors) for rows in self.build.rows)

    def exchange_seconds(self) -> float:
        """All exchanges of the sub-layer as it has been lowered."""
        return sum(self.round_seconds(n.peers, n.words, n.factors) for n in walk(Seq(tuple(self.nodes[0])))
                   if isinstance(n, Collective) and n.part == "start")

    def messages(self, kind: str, path: tuple[str, ...], columns: int, wire: str | None = None, over: int = 0,
                 beside: int = 0) -> list[tuple[int, int, tuple[str, ...]]]:
        """(ranks, words of a message, factors) of each round; a gather's messages grow, a scatter's begin large.
        over, beside: of a scatter, the neighbours that share its columns, and columns that go whole."""
        out, held, left = [], 1, over or self.ranks
        for name in path:
            size, _, factors = self.mesh.groups[name]
            left = max(1, left // size)
            times = {"gather": held, "scatter": left}.get(kind, 1)
            halved = 2 if (wire or self.build.wire) == "bf16" else 1
            out.append((size, round_up(-(-(columns * times + beside) // halved), LANES), factors))
            held *= size
        return out

    # -- nodes ----------------------------------------------------------------------------------------------------------

    def start_exchange(self, exchange: Exchange) -> list[tuple[Run, tuple[Collective, ...]]]:
        """Adds the start of the first round; returns what `finish_exchange` has to add."""
        runs = self.runs(exchange)
        return [(runs[0], self.start_run(runs[0])), *((run, ()) for run in runs[1:])] if runs else []

    def start_run(self, run: Run) -> tuple[Collective, ...]:
        self.close()
        texts = [getattr(self, f"to_{kind}")(v, run) for kind, v in run.by_kind()]
        sources, widths, targets = zip(*texts)
        return self.begin_rounds(run.kind, run.path, sources, widths, targets, run.wire, run.over, run.beside, run.rows)

    def finish_exchange(self, pending: list[tuple[Run, tuple[Collective, ...]]]) -> None:
        for run, rest in pending:
            rest = rest or self.start_run(run)
            self.close()
            self.nodes[-1] += rest
            for kind, v in run.by_kind():
                getattr(self, f"after_{kind}")(v, run)

    def begin_rounds(self, kind: str, path: tuple[str, ...], sources: tuple[str, ...], widths: tuple[int, ...],
                     targets: tuple[str, ...], wire: str | None = None, over: int = 0, beside: int = 0, rows: bool = False) -> tuple[Collective, ...]:
        nodes, wire, cut = [], wire or self.build.wire, len(widths) - beside
        messages = self.messages(kind, path, sum(widths[:cut]), wire, over, sum(widths[cut:]))
        for i, (name, (size, words, factors)) in enumerate(zip(path, messages)):
            self.memory.need_inbox(name, words, outbox=kind == "scatter" and self.mesh.groups[name][1] < (over or self.ranks))
            for part in ("start", "finish"):
                nodes.append(Collective(kind, part, name, factors, sources, targets, widths, size - 1, words, i, path, wire, over, beside, rows))
        here = self.nodes[-1]
        at = next((at for at in range(len(here), 0, -1) if not refills(here[at - 1])), 0)
        here.insert(at, nodes[0])
        self.ends = {op: end + (end > at) for op, end in self.ends.items()}
        return tuple(nodes[1:])

    def value(self, name: str) -> Value:
        """A value of this sub-layer, by name."""
        return next(v for op in self.sub.ops for v in (*op.outputs(), *op.inputs()) if v.name == name)

    def to_gather(self, v: Value, run: Run) -> tuple[str, int, str]:
        p = self.memory.places[v.name]
        target = p.whole_at or self.room(v.name + "_whole", self.sharers_of(v) * p.width, "f32", f"{self.bare(v.name)} of all ranks")
        return self.read(v, "f32"), p.width, f"m.{target}"

    def after_gather(self, v: Value, run: Run) -> None:
        p = self.memory.places[v.name]
        if p.whole_at is not None:
            self.memory.places[v.name] = Place(p.whole_at, 0, v.width, "f32", "whole")
            return
        name = self.room(v.name + "_whole", self.sharers_of(v) * p.width, "f32", f"{self.bare(v.name)} of all ranks")
        pieces = self.pieces(v, p.width)
        if pieces != [(0, v.width)]:
            self.nodes[-1].append(Step(v.name, "exchange", "gather_order", dict(y=f"m.{name}", pieces=pieces), (name,), (name,)))
        share = "each rank's rows" if p.spread == ROWS else f"{p.width} columns a rank"
        self.memory.notes.append((v.name, f"gathered, {share}" + (f", over {p.over} ranks" if p.over else "")))
        self.memory.places[v.name] = Place(name, 0, v.width, "f32", "whole")

    def to_scatter(self, v: Value, run: Run) -> tuple[str, int, str]:
        columns = -(-v.width // (run.over or self.ranks))
        return self.text_of(self.sum_place(v)), columns, f"m.{self.share(v, columns, run.rows)}"

    def share(self, v: Value, columns: int, rows: bool) -> str:
        """Where this rank's share of a sum comes to."""
        return self.room(v.name + "_run", columns, "f32", f"this rank's {'rows, in runs,' if rows else 'columns'} of {self.bare(v.name)}")

    def after_scatter(self, v: Value, run: Run) -> None:
        """The whole sum may later go where this rank's term was."""
        p, ranks = self.memory.places[v.name], run.over or self.ranks
        columns = -(-v.width // ranks)
        part = self.share(v, columns, run.rows)
        if run.rows:
            self.memory.notes.append((v.name, f"summed, each rank its rows, in {ranks} runs of {columns} columns"))
            self.memory.places[v.name] = Place(part, 0, columns, "f32", ROWS, even=True)
            return
        self.memory.notes.append((v.name, f"summed, {columns} columns a rank" + (f", over {run.over} ranks" if run.over else "")))
        fits = self.memory.buffers[p.buffer].shape[-1] == columns * ranks
        whole = p.buffer if fits else self.room(v.name + "_whole", columns * ranks, "f32", f"{self.bare(v.name)}, summed over the ranks")
        self.memory.places[v.name] = Place(part, 0, columns, "f32", "split", even=True, whole_at=whole, over=run.over)

    def to_reduce(self, v: Value, run: Run) -> tuple[str, int, str]:
        p = self.sum_place(v)
        return self.text_of(p), p.width, f"m.{p.buffer}"

    def after_reduce(self, v: Value, run: Run) -> None:
        p = self.memory.places[v.name]
        self.memory.notes.append((v.name, f"summed over all ranks, {p.width} float32 a row"))
        self.memory.places[v.name] = replace(p, spread="whole")

    def sum_place(self, v: Value) -> Place:
        p = self.memory.places[v.name]
        if p.at:
            raise ValueError(f"{v.name}: a partial sum has a buffer of its own")
        return p

    def text_of(self, p: Place) -> str:
        wide = self.memory.buffers[p.buffer].shape[-1] == p.width
        return f"m.{p.buffer}[...]" if wide else f"m.{p.buffer}[:, :{p.width}]"

    def all_reduce_buffer(self, buffer: str) -> None:
        """Sums a float32 buffer over all ranks, in place, in the middle of an op."""
        self.close()
        if self.ranks == 1:
            return
        width = self.memory.buffers[buffer].shape[-1]
        path = self.path_of_sum(buffer, width, scatter=False)
        self.talks.add(self.op.name)
        self.nodes[-1] += self.begin_rounds("reduce", path, (f"m.{buffer}[...]",), (width,), (f"m.{buffer}",), "f32")

    def gather_buffers(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Brings float32 buffers of all ranks together, in the middle of an op; the names of what they come to."""
        self.close()
        if self.ranks == 1:
            return names
        self.talks.add(self.op.name)
        widths = tuple(self.memory.buffers[name].shape[-1] for name in names)
        whole = tuple(self.buffer(f"{name}s", (ROWS_PADDED, self.ranks * width), "f32", f"{name} of all ranks") for name, width in zip(names, widths))
        sources, targets = tuple(f"m.{name}[...]" for name in names), tuple(f"m.{name}" for name in whole)
        self.nodes[-1] += self.begin_rounds("gather", self.path("gather", sum(widths), wire="f32"), sources, widths, targets, "f32")
        return whole

    def pieces(self, v: Value, width: int) -> list[tuple[int, int]]:
        """(first column, columns) of v's true features among the ranks' pieces of `width` columns, in order, each once."""
        if self.memory.places[v.name].even:
            return [(0, v.width)]
        out, done, unit, ranks = [], 0, v.width // v.units, self.sharers_of(v)
        for rank in range(ranks):
            first, last = unit_range(v.units, ranks, rank, v.groups)
            if first == done < last:
                at, n, done = rank * width, (last - first) * unit, last
                joins = out and sum(out[-1]) == at
                out[-1:] = [(out[-1][0], out[-1][1] + n)] if joins else [*out[-1:], (at, n)]
        return out


def refills(n: Node) -> bool:
    """Does the node start copies of the tape and nothing else? The messages of an exchange leave in front of them."""
    return isinstance(n, Advance) or isinstance(n, Start) and n.transfer == "tape_copy" or isinstance(n, Loop) and all(map(refills, n.body))
