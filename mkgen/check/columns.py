"""Which columns of a product a step reads: a product's results lie side by side, in the order of its matrix's parts."""

from __future__ import annotations

import re

from mkgen.check.findings import Report
from mkgen.plan.plan import Plan
from mkgen.plan.regions import Step
from mkgen.plan.tape import Matrix

READ = re.compile(r"m\.(\w+)(?:\[:, (\d*):(\d+)\]|\[\.\.\.\])")


class Columns:
    """One run. `places`: value -> (buffer, first column, columns) as the last product of the sub-layer left it."""

    def __init__(self, plan: Plan, ops: dict, report: Report):
        self.plan, self.ops, self.report = plan, ops, report
        self.places: dict[str, tuple[str, int, int]] = {}

    def enter(self) -> None:
        self.places = {}

    def step(self, n: Step, where: str) -> None:
        op = self.ops.get(n.op)
        if op is not None and self.places:
            for arg, text in n.args.items():
                if isinstance(text, str) and "m." in text:
                    self.reads(getattr(op, arg, None), arg, text, where)
        for name in [v for v, (buffer, *_) in self.places.items() if buffer in n.writes and buffer not in n.reads]:
            del self.places[name]
        matrix = n.args.get("matrix")
        if isinstance(matrix, Matrix) and n.template in ("linear", "coded") and hasattr(op, "ys"):
            at = 0
            by_weight = {w.name: y for y, w in zip(op.ys, op.ws)}
            for part in matrix.parts:
                if part.weight in by_weight:
                    self.places[by_weight[part.weight].name] = (n.args["y"][2:], at, part.width)
                at += part.width

    def reads(self, value, arg: str, text: str, where: str) -> None:
        """An argument that is a value of the op, where the value lies in a product's buffer that the argument names."""
        place = self.places.get(getattr(value, "name", None))
        found = READ.search(text)
        if place is None or found is None or found[1] != place[0]:
            return
        buffer, at, width = place
        whole = self.plan.buffers[buffer].shape[-1]
        first, last = (int(found[2] or 0), int(found[3])) if found[3] else (0, whole)
        if (first, last) != (at, at + width) and not (found[3] is None and (at, width) == (0, whole)):
            self.report.add(
                "value",
                where,
                f"reads columns {first} to {last} of {buffer} as {arg}",
                f"{value.name} is columns {at} to {at + width}",
            )
