"""The builder's view of the region: nodes to add, places and copies to declare."""
from __future__ import annotations

import re
from contextlib import contextmanager

from mkgen.graph.ir import Op, State, Value
from mkgen.plan.memory import identifier
from mkgen.plan.regions import Buffer, Collective, Loop, Node, Start, Step, Transfer, Wait
from mkgen.plan.tape import Matrix
from mkgen.plan.values import Target


class Nodes:
    def step(self, op: Op, template: str, macro: str, reads: tuple[str, ...] = (), writes: tuple[str, ...] = (), **args) -> None:
        """Adds work. Buffers named in its arguments are what it touches: a Target is written, anything else is read; `reads`
        and `writes` add those that only the macro names."""
        texts = [a for a in args.values() if isinstance(a, str)]
        read = {name for t in texts for name in re.findall(r"\bm\.(\w+)", t)} - {"rows"} | set(reads)           # m.rows is a number
        if isinstance(args.get("matrix"), Matrix) or any(re.search(r"\b(tape_rows|vector|panels|columns)\(m, g", t) for t in texts):
            read.add("ring")
        written = {a.ref[2:] for a in args.values() if isinstance(a, Target)} | set(writes)
        self.nodes[-1].append(Step(op.name, template, macro, args, tuple(sorted(read)), tuple(sorted(written))))

    def start(self, transfer: str, *args: str, when: str | None = None) -> None:
        self.nodes[-1].append(Start(transfer, args, when))

    def wait(self, transfer: str, *args: str, when: str | None = None) -> None:
        self.nodes[-1].append(Wait(transfer, args, when))

    def wait_late(self, transfer: str, *args: str, when: str | None = None, rows: bool = False) -> None:
        """A wait at the end of the sub-layer; `rows`: once a row."""
        self.late.append(self.each_row(Wait(transfer, args, when), rows))

    def start_early(self, transfer: str, *args: str, when: str | None = None, rows: bool = False) -> None:
        """A start at the beginning of the sub-layer; `rows`: once a row."""
        self.early.append(self.each_row(Start(transfer, args, when), rows))

    @contextmanager
    def first(self):
        """Nodes added inside go to the beginning of the sub-layer, whatever op comes first."""
        self.nodes.append([])
        yield
        self.early += self.nodes.pop()

    def start_early_loop(self, transfer: str, var: str, trips: str, *args: str, bound: int) -> None:
        self.early.append(Loop(f"first_{transfer}", var, trips, (Start(transfer, args),), bound=bound))

    def each_row(self, node: Node, rows: bool) -> Node:
        return Loop(f"{node.transfer}_rows", "row", "m.rows", (node,)) if rows else node

    @contextmanager
    def after(self, op: str):
        """Nodes added inside go right behind the last node of an earlier op."""
        at = self.ends[op]
        self.nodes.append([])
        yield
        self.nodes[0][at:at] = self.nodes.pop()

    @contextmanager
    def before_finish(self, op: str):
        """Nodes added inside go in front of the first finish of an exchange behind an earlier op, if others work in between; else here."""
        nodes, first = self.nodes[0], self.ends[op]
        at = next((i for i in range(first, len(nodes)) if isinstance(nodes[i], Collective) and nodes[i].part == "finish"), len(nodes))
        at = at if any(isinstance(n, Step) and n.op not in (op, self.op.name) for n in nodes[first:at]) else len(nodes)
        self.nodes.append([])
        yield
        nodes[at:at] = self.nodes.pop()

    @contextmanager
    def loop(self, name: str, var: str, trips: str, doc: str = "", bound: int | None = None, unroll: bool = False,
             carry: str | None = None, init: str | None = None, first: int = 0):
        self.nodes.append([])
        yield
        body = tuple(self.nodes.pop())
        self.nodes[-1].append(Loop(name, var, trips, body, doc, bound, unroll, carry, init, first))

    def buffer(self, name: str, shape: tuple, dtype: str, purpose: str, space: str = "vmem", remote: bool = False) -> str:
        return self.memory.declare(Buffer(identifier(name), tuple(shape), dtype, space, purpose, remote))

    def shared(self, name: str, own: str, shape: tuple, dtype: str, purpose: str, space: str = "vmem") -> str:
        """A buffer that is empty between sub-layers: kinds share it if it is of one shape for them, else each has its own."""
        wanted = Buffer(name, tuple(shape), dtype, space, purpose)
        return name if self.memory.buffers.setdefault(name, wanted) == wanted else self.buffer(own, shape, dtype, purpose, space)

    def semaphores(self, name: str, shape: tuple, purpose: str) -> str:
        return self.buffer(name, shape, "dma", purpose, space="dma_sem")

    def state(self, s: State, shape: tuple, dtype: str, purpose: str) -> str:
        """An array in HBM, [layers of this kind, *shape], updated in place."""
        layers = sum(self.sub.name in run for run in self.memory.graph.layers)
        name = self.buffer(s.name, (layers, *shape), dtype, purpose, space="hbm")
        self.memory.states[s.name] = (s, self.memory.buffers[name])
        return f"m.{name}"

    def transfer(self, name: str, params: tuple[str, ...], source: str, target: str, semaphore: str, size: int, doc: str, *,
                 setup: tuple[str, ...] = (), reads: tuple[str, ...] = (), writes: tuple[str, ...] = ()) -> None:
        self.memory.transfers[name] = Transfer(name, params, source, target, semaphore, size, doc, setup, reads, writes)

    @property
    def max_rows(self) -> int:
        return max(self.build.rows)

    def maker(self, v: Value) -> str:
        """The op of this sub-layer that makes v."""
        return next(op.name for op in self.sub.ops if v in op.outputs())

    def activation(self, act, gated: bool = True) -> dict:
        """Source text, float32, of an activation of the names `gate` and `up`, or of `up` alone: lines that cut them first
        (`cut`), then the expression (`activation`)."""
        x = "gate" if gated else "up"
        cut = [f"{x} = jnp.minimum({x}, {act.limit})"] if act.limit else []
        if gated and act.limit:
            cut.append(f"up = jnp.clip(up, -{act.limit}, {act.limit})")
        up = f"(up + {act.up_offset})" if act.up_offset else "up"
        if act.kind == "situ":
            phi, up = f"situ({x}, {act.beta})", f"({act.linear_beta} * jnp.tanh({up} / {act.linear_beta}))"
        else:
            phi = f"{act.kind}({x})" if act.alpha == 1 else f"{x} * jax.nn.sigmoid({act.alpha} * {x})"
        return dict(cut=tuple(cut), activation=f"({phi} * {up})" if gated else f"({phi})")

    def fact(self, name: str) -> str:
        return f"m.facts[layer * FACTS + {name.upper()}]"
