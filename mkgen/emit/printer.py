"""Prints region trees as Python. A step's text comes from its macro; starts, waits, loops and branches are printed here."""
from __future__ import annotations

from dataclasses import replace

from jinja2 import Environment

from mkgen.emit.wrap import COLUMNS
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Advance, Collective, Loop, Node, Seq, Start, Step, Streamed, Wait, advances, streamed, walk

INDENT = "    "
ACTIVE = "m.positions[row] >= 0"
ARRIVAL = Wait("tape_copy", ("m", "g"))
REFILL = Start("tape_copy", ("m", "g + RING_DEPTH"))


class Printer:
    def __init__(self, env: Environment, plan: Plan):
        self.env, self.plan = env, plan
        self.op = None
        self.printed: list[str] = []
        self.awaited = ""                # what lies in a chunk that the sub-layer before has waited for

    def region(self, region: Region, depth: int = 1) -> str:
        self.op, self.sub, self.chunks, self.at = None, region.name, region.chunks, 0
        self.awaited = f": {self.entries()}" if region.awaited else ""
        return "\n".join(self.nodes(region.body.nodes, depth))

    def entries(self) -> str:
        """What lies at which row of the next chunk."""
        if self.at == len(self.chunks):
            return "the next sub-layer's"
        return ", ".join(f"{e.name.replace(self.sub + '.', '')} {e.row}" for e in self.chunks[self.at].entries)

    def contents(self, line: str) -> str:
        """The line that makes a chunk the current one, with a comment that says what lies in it."""
        told = f"{line}  # {self.entries()}"
        return told if len(told) <= COLUMNS else line

    def nodes(self, nodes: tuple[Node, ...], depth: int) -> list[str]:
        out: list[str] = []
        i = 0
        while i < len(nodes):
            span = 1
            if isinstance(nodes[i], Collective):
                span = self.round_trips(nodes[i:])
                out.append(self.exchange(nodes[i], depth))
            elif self.next_chunk(nodes[i:i + 3]):
                self.at += 1
                out.append(self.contents(f"{INDENT * depth}g = next_chunk(m, g)"))
                span = 3
            else:
                out += self.node(nodes[i], depth)
            i += span
        return out

    def next_chunk(self, nodes: tuple[Node, ...]) -> bool:
        """Are these the refill of a slot, the step to the next chunk, and the wait for it?"""
        return list(nodes) == [REFILL, Advance(), ARRIVAL]

    def round_trips(self, nodes: tuple[Node, ...]) -> int:
        """Nodes that one call stands for: a finish goes on with the starts and finishes of all further rounds."""
        n = nodes[0]
        if n.part == "start" and n.round == 0:
            return 1
        want = [(part, i, stage) for i, stage in enumerate(n.path) for part in ("start", "finish")][1:]
        run = nodes[:len(want)]
        here = all(isinstance(f, Collective) and (f.kind, f.sources, f.targets) == (n.kind, n.sources, n.targets) for f in run)
        if not here or [(f.part, f.round, f.stage) for f in run] != want:
            raise ValueError(f"{n.kind} of {', '.join(n.sources)}: its {n.rounds} rounds do not follow one another")
        return len(want)

    def exchange(self, node: Collective, depth: int) -> str:
        inner = [name for name in node.path if not node.over or self.plan.mesh.groups[name][1] < node.over]
        args = ["m", stages(inner), *node.sources]
        if node.part == "finish":
            args[2:] = [f"({width}, {target})" for width, target in zip(node.widths, node.targets)]
        args += ["wire=bf16"] if node.wire == "bf16" else []
        args += [f"beside={node.beside}"] if node.beside else []
        args += [f"then={stages(node.path[len(inner):])}"] if node.part == "finish" and node.over else []
        name = f"{node.kind}_rows" if node.rows and (node.kind, node.part) != ("gather", "start") else node.kind
        return f"{INDENT * depth}{name}_{node.part}({', '.join(args)})"

    def node(self, node: Node, depth: int) -> list[str]:
        pad = INDENT * depth
        if isinstance(node, Step):
            return self.step(node, depth)
        if node == ARRIVAL and depth == 1:
            return [self.contents(f"{pad}tape_copy(m, g).wait()")]
        if isinstance(node, (Start, Wait)):
            call = f"{node.transfer}({', '.join(node.args)}).{'start' if isinstance(node, Start) else 'wait'}"
            line = f"{pad}{call}()" if node.when is None else f"{pad}pl.when({node.when})(lambda: {call}())"
            return [line] if len(line) <= COLUMNS else [f"{pad}due = {node.when}", f"{pad}pl.when(due)(lambda: {call}())"]
        if isinstance(node, Advance):
            self.at += 1
            return [f"{pad}g += 1"]
        if isinstance(node, Loop):
            return self.loop(node, depth)
        if isinstance(node, Seq):
            return self.nodes(node.nodes, depth)
        raise TypeError(f"no text for {node}")

    def step(self, node: Step, depth: int) -> list[str]:
        pad = INDENT * depth
        template = self.env.get_template(f"ops/{node.template}.py.j2")
        text = getattr(template.make_module({"plan": self.plan}), node.macro)(**node.args)
        told = f"{pad}# -- {node.op}"
        head = [] if node.op == self.op else [told + self.awaited if len(told + self.awaited) <= COLUMNS else told]
        self.op, self.awaited = node.op, ""
        return head + [pad + line if line.strip() else "" for line in text.strip("\n").split("\n")]

    def active_rows(self, node: Loop, depth: int) -> list[str] | None:
        """A loop over the rows all of whose nodes are for active rows only; None if it is not."""
        def asked(n: Node) -> str | None:
            return n.args.get("when") if isinstance(n, Step) else getattr(n, "when", None)

        if (node.trips, node.var) != ("m.rows", "row") or node.unroll or {asked(n) for n in node.body} != {ACTIVE}:
            return None
        body = [replace(n, args=n.args | {"when": None}) if isinstance(n, Step) else replace(n, when=None) for n in node.body]
        pad = INDENT * depth
        if len(body) == 1 and isinstance(body[0], (Start, Wait)):
            return [f"{pad}each_active_row(m, lambda row: {self.node(body[0], 0)[0]})"]
        return ["", *self.heading(node, depth), f"{pad}def {node.name}(row):", *self.nodes(tuple(body), depth + 1), "",
                f"{pad}each_active_row(m, {node.name})"]

    def loop(self, node: Loop, depth: int) -> list[str]:
        pad, tape = INDENT * depth, any(advances(n) for n in node.body)
        if lines := self.active_rows(node, depth):
            return lines
        if node.unroll:
            return [f"{pad}for {node.var} in range({node.trips}):", *self.nodes(node.body, depth + 1)]
        if len(node.body) == 1 and isinstance(node.body[0], (Start, Wait)) and node.body[0].when is None and not node.carry:
            for named, trips in (([], node.trips), ([f"{pad}{node.name} = {node.trips}"], node.name)):
                short = [*named, f"{pad}lax.fori_loop(0, {trips}, lambda {node.var}, _: {self.node(node.body[0], 0)[0]}, None)"]
                if all(len(line) <= COLUMNS for line in short):
                    return short
        head = self.heading(node, depth) + ([f"{pad}# {node.doc}"] if node.doc else [])
        if found := streamed(node):
            blocks = found.turns * found.turn
            self.at += blocks
            span = f"{found.first}, {found.first + blocks}" if found.first else blocks
            more = (f", turn={found.turn}" if found.turn > 1 else "") + (f", refills={found.refills}" if found.refills < found.turn else "")
            lines = self.block(node.name, found, depth)
            again = found.first and lines == self.printed                        # further blocks of a matrix
            self.printed = lines
            return [*([] if again else ["", *head, *lines, ""]), f"{pad}g = stream(m, g, range({span}), {node.name}{more})"]
        carry = "g" if tape else node.carry or "_"
        body = self.nodes(node.body, depth + 1)
        last = [] if carry == "_" else [f"{pad}{INDENT}return {carry}"]
        if tape and isinstance(node.body[-1], Advance):
            body, last = body[:-1], [f"{pad}{INDENT}return g + 1"]
        for named, trips in (([], node.trips), ([f"{pad}trips = {node.trips}"], "trips")):
            call = f"{pad}{'' if carry == '_' or not tape else 'g = '}lax.fori_loop(0, {trips}, {node.name}, {node.init or ('g' if tape else 'None')})"
            if len(call) <= COLUMNS:
                break
        return ["", *head, f"{pad}def {node.name}({node.var}, {carry}):", *body, *last, "", *named, call]

    def block(self, name: str, of: Streamed, depth: int) -> list[str]:
        """The function of a block i of a matrix, which lies in chunk g."""
        return [f"{INDENT * depth}def {name}(i, g):", *self.step(of.step, depth + 1)]

    def heading(self, node: Loop, depth: int) -> list[str]:
        """The comment that names the op of a loop's first step, in front of the loop."""
        op = next((n.op for n in walk(node) if isinstance(n, Step)), self.op)
        if op == self.op:
            return []
        self.op = op
        return [f"{INDENT * depth}# -- {op}"]


def stages(names) -> str:
    """A path as a tuple of stages."""
    path = ", ".join(name.upper() for name in names)
    return f"({path},)" if len(names) == 1 else f"({path})"
