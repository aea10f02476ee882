"""The plan made executable on plain ints: refs of one rows variant, compiled source text, transfers as functions."""

from __future__ import annotations

from types import CodeType, SimpleNamespace

from mkgen.check.names import constants, namespace
from mkgen.check.refs import BadExpression, Ref, Table, View, as_view
from mkgen.check.scenario import Scenario, expert_ids, kv_items, most_experts, sights
from mkgen.check.shorten import Short, shorten
from mkgen.check.steps import home_text, origin_text, tape_reads
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Node, Step, Transfer, Wait, walk
from mkgen.plan.tape import LANES


class Text:
    """Compiled source text of a plan; shared by all runs of it."""

    def __init__(self, plan: Plan):
        self.here = SimpleNamespace(rank=0, layers=0)
        self.names = namespace(plan, self.here)
        self.codes: dict[str, CodeType] = {}
        self.copies: dict[str, object] = {}
        self.pieces: dict[int, tuple[Step, list]] = {}
        self.owned: dict[tuple[str, str], set[str]] = {}  # (op, argument of a step) -> weights it may stand for
        self.transfers = plan.transfers

    def value(self, text: str, scope: dict):
        """Raises BadExpression whatever goes wrong in the text."""
        try:
            code = self.codes.get(text)
            if code is None:
                code = self.codes[text] = compile(text, "<plan>", "eval")
            return eval(code, self.names, scope)
        except BadExpression as e:
            raise BadExpression(f"{text}: {e}") from None
        except Exception as e:
            raise BadExpression(f"{text}: {type(e).__name__}: {e}") from None

    def values(self, texts: tuple[str, ...], scope: dict) -> tuple:
        return self.value(f"({', '.join(texts)},)" if texts else "()", scope)

    def copy(self, name: str, args: tuple) -> tuple[View, View, View]:
        """(source, target, semaphore) of a transfer for these arguments."""
        try:
            if name not in self.copies:
                self.copies[name] = self.define(self.transfers[name])
            return tuple(as_view(x) for x in self.copies[name](*args))
        except BadExpression as e:
            raise BadExpression(f"{name}{args[1:]}: {e}") from None
        except Exception as e:
            raise BadExpression(f"{name}{args[1:]}: {type(e).__name__}: {e}") from None

    def define(self, t: Transfer):
        lines = [
            f"def copy({', '.join(t.params)}):",
            *(f"    {s}" for s in t.setup),
            f"    return ({t.source}), ({t.target}), ({t.semaphore})",
        ]
        made: dict = {}
        exec(compile("\n".join(lines), f"<{t.name}>", "exec"), self.names, made)
        return made["copy"]

    def tape_reads(self, step: Step) -> list:
        """Pieces of the chunk that a step reads; the step is kept, so that its id stays its own."""
        if id(step) not in self.pieces:
            self.pieces[id(step)] = (step, tape_reads(step))
        return self.pieces[id(step)][1]


class Model:
    """One rows variant of a plan: its refs, and what copies bring into them and take out."""

    def __init__(self, plan: Plan, rows: int, text: Text, short: Short | None = None):
        self.plan, self.rows, self.text = plan, rows, text
        self.short = short or shorten(plan)
        self.constants, self.sights = constants(plan), sights(plan)
        embed = (max(plan.embed_rows, 1), LANES)
        refs = [Ref("tape", (max(self.short.tape_rows, 1), LANES), "u32", "hbm"), Ref("embedding", embed, "u32", "hbm")]
        refs += [Ref(image.name, image.shape, "u32", "hbm") for image in plan.experts]
        refs += [Ref(b.name, b.dims(rows), b.dtype, b.space) for b in plan.buffers.values()]
        self.refs = {r.whole.buffer: r for r in refs}
        self.shapes = {b.name: b.shape for b in plan.buffers.values()}
        spaces = {b.name: b.space for b in plan.buffers.values()}
        self.origins: dict[str, list[tuple[str, str]]] = {}  # VMEM buffer -> (copy, what it brings into it)
        self.homes: dict[str, list[str]] = {}  # VMEM buffer -> where copies take it to
        for t in plan.transfers.values():
            for source, target in zip(t.reads, t.writes):
                if spaces.get(target) == "vmem":
                    text = origin_text(plan, target, source, self.shapes.get(source, ()))
                    self.origins.setdefault(target, []).append((t.name, text))
                if spaces.get(source) == "vmem":
                    self.homes.setdefault(source, []).append(home_text(source, target, self.shapes.get(target, ())))
        self.moved = self.origins.keys() | self.homes.keys()
        self.arriving: dict[tuple[str, str], list[str]] = {}
        self.touched: dict[int, tuple[Node, tuple, tuple]] = {}

    def memory(self, scenario: Scenario) -> SimpleNamespace:
        """`m`: refs, and the tables as the host and the prologue leave them."""
        self.text.here.rank = scenario.rank
        self.text.here.layers = self.text.names["LAYERS"] = len(self.short.facts) // self.constants["FACTS"]
        m = SimpleNamespace(**self.refs)
        m.rows = self.rows
        m.positions = Table("positions", list(scenario.positions))
        m.tokens = Table("tokens", list(scenario.tokens))
        m.chunks, m.facts = Table("chunks", self.short.chunks), Table("facts", self.short.facts)
        for name in ("expert_ids", "expert_count", "taker"):
            if name in self.refs:
                setattr(m, name, Table(name, [None] * self.refs[name].dims[0]))
        for sight in set(self.sights.values()):
            names = [n for n in sight.tables if n in self.refs]
            for name in names:
                setattr(m, name, Table(name, [None] * self.refs[name].dims[0]))
            items = kv_items(scenario, self.constants["KV_TILE"], sight)
            for name, values in zip(names, (items, [len(items)])):
                for i, value in enumerate(values):
                    getattr(m, name).put(i, value)
        return m

    def cache(self, m: SimpleNamespace, kind: str) -> SimpleNamespace | None:
        """`kv` as a kind's cache has it: which tiles are read; None if the kind has no cache."""
        sight = self.sights.get(kind)
        if sight is None:
            return None
        return SimpleNamespace(**{k: getattr(m, name, None) for k, name in zip(("items", "count"), sight.tables)})

    def pieces(self, kind: str) -> int:
        """Into how many copies an expert of this kind is cut."""
        return next(image.pieces for image in self.plan.experts if image.kind == kind)

    def first(self, ids: list[int], kind: str) -> int:
        """The first of the list of experts, before it is made; one that no rank has if it will be empty."""
        return ids[0] if ids else next(image.local_experts for image in self.plan.experts if image.kind == kind)

    def wanted(self, scenario: Scenario, turn: int, kind: str) -> list[int]:
        """Local expert ids that the rank has to run in the turn-th layer that routes, one of `kind`."""
        count = scenario.experts[turn % len(scenario.experts)]
        image = next(image for image in self.plan.experts if image.kind == kind)
        return expert_ids(min(count, most_experts(self.plan, image, self.rows)), image.local_experts)

    def arrivals(self, region: Region, buffer: str) -> list[str]:
        """What the copies that a region waits for bring into a buffer."""
        key = region.name, buffer
        if key not in self.arriving:
            waits = {n.transfer for n in walk(region.body) if isinstance(n, Wait)} | ({"tape_copy"} if region.awaited else set())
            self.arriving[key] = [text for copy, text in self.origins[buffer] if copy in waits]
        return self.arriving[key]

    def moving(self, step: Step) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Of what a step reads and writes, the buffers that copies move."""
        if id(step) not in self.touched:
            self.touched[id(step)] = (
                step,
                tuple(n for n in step.reads if n in self.moved),
                tuple(n for n in step.writes if n in self.moved),
            )
        return self.touched[id(step)][1:]
