"""Sums over the ranks: what each rank has a term of is made whole before any step takes it for the sum, and once.

What is a term follows from the weights alone: a product with some of a matrix's rows, the experts of one rank, the
embeddings of one part of the vocabulary, the squares of some of a norm's columns. Only steps that are linear in a term
(`LINEAR`) may read one, and make another.

Where an exchange has shared a sum out by rows, a buffer holds this rank's rows alone: only steps that are made for that
(`BY_ROWS`) take them, and what they make is this rank's rows as well, until a gather of rows brings those of all ranks.
"""

from __future__ import annotations

import re

from mkgen.check.findings import Report
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Collective, Step
from mkgen.plan.tape import Matrix

EACH_RANK = {
    ("experts", "begin"): "y",
    ("experts", "expert"): "y",
    ("experts", "batch"): "y",
    ("ends", "embed"): "x",
    ("gated_norm", "squares"): "squares",
}
LINEAR = {
    ("elementwise", "add"): ("a", "b"),
    ("elementwise", "token_gate"): ("x",),
    ("residual", "store"): ("x",),
    ("linear", "join"): ("parts",),
}
BY_ROWS = {("experts", "mix_rows"): ("parts", "y")}  # what takes a rank's own rows, and what it makes of them
ONCE = 'jnp.where(lax.axis_index("tp") == 0, '  # what all ranks hold, as a term that is nothing on all ranks but one
COLUMNS = re.compile(r"m\.(\w+)(?:\[:, (\d*):(\d+)\])?")


class Spread:
    """One run. `terms`: buffers that hold a term of a sum, `rows`: those that hold this rank's rows; and where that was made."""

    def __init__(self, plan: Plan, report: Report):
        self.plan, self.report = plan, report
        self.alone = plan.mesh.ranks == 1
        self.ops = {op.name: op for sub in plan.graph.sublayers() for op in sub.ops}
        self.kinds: dict[int, tuple] = {}
        self.terms: dict[str, str] = {}
        self.rows: dict[str, str] = {}

    # -- steps ------------------------------------------------------------------------------------------------------------

    def step(self, n: Step, where: str) -> None:
        if self.alone:
            return
        makes, linear, _ = self.kind(n)
        taken = [b for b in n.reads if b in self.terms and b not in n.writes]
        if taken and not linear:
            made = self.terms[taken[0]]
            self.bad(
                where, f"reads {taken[0]}", f"it is this rank's term of a sum ({made}), no exchange has completed it"
            )
        terms = [once or name in self.terms for name, once in linear]
        for name, once in linear:
            if once and name in self.terms:
                self.bad(where, f"takes {name} on one rank alone", f"each rank has a term of it ({self.terms[name]})")
            elif any(terms) and not once and name not in self.terms:
                self.bad(
                    where, f"adds {name} to a term of a sum", "it is whole on every rank: it would count once a rank"
                )
        for name in n.writes:
            if name == makes or any(terms):
                self.terms[name] = where
            elif name not in n.reads or name not in self.terms:
                self.terms.pop(name, None)
        self.own_rows(n, where)

    def own_rows(self, n: Step, where: str) -> None:
        takes, makes = (target(n.args.get(a)) for a in BY_ROWS.get((n.template, n.macro), (None, None)))
        if takes is not None and takes not in self.rows:
            self.bad(where, f"takes {takes} as this rank's rows", "no exchange has shared them out")
        for name in n.reads:
            if name in self.rows and name != takes:
                self.bad(where, f"reads {name}", f"it holds this rank's rows alone ({self.rows[name]}), no exchange has gathered them")
        for name in n.writes:
            if name == makes:
                self.rows[name] = where
            elif name not in n.reads:
                self.rows.pop(name, None)

    def kind(self, n: Step) -> tuple[str | None, tuple[tuple[str, bool], ...], Step]:
        """(the buffer it makes a term in, the buffers it is linear in, and whether one rank alone takes them); the step is
        kept, so that its id stays its own."""
        if id(n) not in self.kinds:
            key = (n.template, n.macro)
            given = [n.args.get(a) for a in LINEAR.get(key, ())]
            linear = [(name, isinstance(a, str) and a.startswith(ONCE)) for a in given for name in named(a)]
            self.kinds[id(n)] = (self.makes(n, key), tuple(linear), n)
        return self.kinds[id(n)]

    def makes(self, n: Step, key: tuple[str, str]) -> str | None:
        matrix, op = n.args.get("matrix"), self.ops.get(n.op)
        if isinstance(matrix, Matrix) and n.template in ("linear", "coded"):
            weight = self.plan.weights[matrix.parts[0].weight]
            return target(n.args["y"]) if matrix.k < weight.shape[0] else None
        if key == ("qk", "qk_squares"):
            return target(n.args["y"]) if columns(self.plan, n.args["q"]) < op.q.width else None
        return target(n.args[EACH_RANK[key]]) if key in EACH_RANK else None

    # -- exchanges ----------------------------------------------------------------------------------------------------------

    def exchange(self, n: Collective, where: str) -> None:
        """Sums take terms, gathers take none; what an exchange fills is whole."""
        if n.kind == "greedy":
            return
        sums = n.kind in ("reduce", "scatter")
        if n.part == "start" and n.round == 0:
            for name in named(n.sources):
                if sums and name not in self.terms:
                    self.bad(where, f"sums {name} over the ranks", "it is no term of a sum: whole, or summed already")
                elif not sums and name in self.terms:
                    self.bad(
                        where,
                        f"gathers {name}",
                        f"it is this rank's term of a sum ({self.terms[name]}): pieces are sums of their own",
                    )
                if not sums and n.rows != (name in self.rows):
                    self.bad(where, f"gathers {name} by {'rows' if n.rows else 'columns'}", f"it holds {'columns' if n.rows else 'rows'}")
        if n.part == "finish" and n.round == n.rounds - 1:
            for name in named(n.targets):
                self.terms.pop(name, None)
                self.rows.pop(name, None)
                self.rows |= {name: where} if n.rows and sums else {}

    def bad(self, where: str, what: str, why: str) -> None:
        self.report.add("spread", where, what, why)


def named(a) -> list[str]:
    """Buffers that an argument names."""
    if isinstance(a, str):
        return re.findall(r"\bm\.(\w+)", a)
    return (
        [b for x in a for b in named(x)] if isinstance(a, (tuple, list)) else [a.ref[2:]] if hasattr(a, "ref") else []
    )


def target(a) -> str | None:
    return next(iter(named(a)), None)


def columns(plan: Plan, text: str) -> int:
    """Columns of a source text: of its slice, or of the whole buffer."""
    found = COLUMNS.search(text)
    return int(found[3]) - int(found[2] or 0) if found[3] else plan.buffers[found[1]].shape[-1]
