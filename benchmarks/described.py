"""A hand-written kernel's description (benchmarks/handwritten/*.yaml) as events for the simulator.

A schedule says what one core does in a step, phase by phase, in the order of its program. Its numbers are bytes, descriptors,
peers, and cycles from phases.py, each with its source; never a measured step. An action is a mapping, which its first key names:

    work: CYCLES                  the core computes; `op` names it
    pause: SECONDS                neither work nor a wait; `why` names it
    fetch: NAME                   starts a copy of `bytes` in `descriptors`; `stream` says of what; `writes: true`: to HBM;
                                  `next: true`: for the layer after this
    group: KEY                    the fetches under `groups: KEY`; `{mixer}` and `{ffn}` in it stand for the layer's kinds; with
                                  `next: true` those of the next layer
    wait: NAME                    until that copy has arrived; [NAME, …]: all of them
    send: NAME                    a phase of an exchange over `factors`, to `peers`, `bytes` each
    receive: NAME
    exchange: NAME                `rounds`: [factors, peers, bytes] one after another, `work` cycles behind each
    ring: MATRIX                  consumes the loads under `loads: MATRIX`, each refilled when it is consumed; `times`: so many
    prime: ring                   its first loads
    hold: true / false            refills wait from here on / are issued
    experts: first                copies of the first experts: `count` of them, at most one a slot
    experts: all                  the layer's experts in order, so many at once; a slot is refilled when its expert is done;
                                  `release: true`: a hold of the ring ends when the last expert's copies are under way
    tiles: NAME                   under `caches`: `count` tiles through `slots`, each `copies` of `bytes`; `work` cycles a tile
    tiles first: NAME             starts the first of them
    if: CONDITION                 `then`, or `else`
    layers: COLUMN                for each layer, in run-length form: the actions under `kinds` of its names
    repeat: COUNT                 `do`

Expressions know rows, position, layer, experts (of this layer), the file's `values`, which may be expressions, and `options`,
which may not, the names in cycles.yaml, and min, max, ceil and floor. A caller may replace any of them. `{rows}` in a string
is replaced first.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mkgen.simulate.events import Await, Event, Fetch, Pause, Receive, Send, Where, Work
from mkgen.spec.schedule import expand

HERE = Path(__file__).resolve().parent / "handwritten"
SEED = 20260
OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
FUNCTIONS = {"min": min, "max": max, "ceil": math.ceil, "floor": math.floor}


class Expression(str):
    """A value of the file that is worked out wherever it is used; any other string is a name."""


@cache
def cycles_table() -> dict[str, float]:
    """Name of a phase -> cycles, as phases.py has written them."""
    return {name: entry["cycles"] for name, entry in yaml.safe_load((HERE / "cycles.yaml").read_text()).items()}


@cache
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(text: Any, names: dict[str, Any]) -> Any:
    """An expression, or whatever is no string."""
    if not isinstance(text, str):
        return text
    return _value(_tree(filled(text, names)), names)


def filled(text: str, names: dict[str, Any]) -> str:
    """The text with each {expression} in it replaced by its value."""
    if "{" not in text:
        return text
    return re.sub(r"\{([^}]*)\}", lambda found: str(evaluate(found.group(1), names)), text)


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            found = names[name] if name in names else cycles_table()[name]
            return evaluate(found, names) if isinstance(found, Expression) else found
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, names)
        case ast.UnaryOp(op=op, operand=operand):
            return OPERATORS[type(op)](_value(operand, names))
        case ast.BoolOp(op=op, values=values):
            found = (_value(v, names) for v in values)
            return any(found) if isinstance(op, ast.Or) else all(found)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return OPERATORS[type(op)](_value(left, names), _value(right, names))
        case ast.IfExp(test=test, body=body, orelse=other):
            return _value(body if _value(test, names) else other, names)
        case ast.Call(func=ast.Name(id=name), args=args):
            return FUNCTIONS[name](*(_value(a, names) for a in args))
    raise ValueError(f"an expression may not hold {ast.unparse(node)!r}")


@dataclass(frozen=True)
class Schedule:
    """One file. `options`: values that a caller may replace (`wire`, `dense`, …)."""

    name: str
    text: dict[str, Any]

    def layer_count(self) -> int:
        return len(expand(self.text["layers"][0]))


def load(name: str) -> Schedule:
    return Schedule(name, yaml.safe_load((HERE / f"{name}.yaml").read_text()))


def draw(experts: int, top_k: int, rows: int, groups: int, layers: int, seed: int) -> np.ndarray:
    """Distinct experts of the busiest of `groups` equal groups, for each layer; every row takes top_k, all equally likely."""
    rng = np.random.default_rng(seed)
    chosen = rng.random((layers, rows, experts)).argpartition(top_k, axis=-1)[..., :top_k]
    hit = np.zeros((layers, experts), bool)
    np.put_along_axis(hit, chosen.reshape(layers, -1), True, axis=1)
    return hit.reshape(layers, groups, -1).sum(-1).max(-1)


@dataclass(frozen=True)
class _Load:
    """A place where the ring's next load is consumed."""

    where: Where
    bytes: int
    descriptors: int
    cycles: float


@dataclass(frozen=True)
class _Mark:
    """prime, hold or release of the ring."""

    where: Where
    what: str


@dataclass
class Reader:
    """Walks the actions of a schedule; `events()` gives the step, the ring's refills put in."""

    schedule: Schedule
    names: dict[str, Any]
    seed: int = SEED
    layer: int | None = None
    phase: str = "ends"
    started: int = 0  # experts of this layer whose copies are under way
    out: list[Event | _Load | _Mark] = field(default_factory=list)

    def __post_init__(self):
        text = self.schedule.text
        columns = [expand(column) for column in text["layers"]]
        self.kinds = list(zip(*columns))
        known = {k: v["value"] if isinstance(v, dict) else v for k, v in text["values"].items()}
        known = {k: Expression(v) if isinstance(v, str) else v for k, v in known.items()}
        self.names = {k: Expression(v) if isinstance(v, str) and k in known else v for k, v in self.names.items()}
        self.names = {**known, **text["options"], "layer": None, "experts": 0, **self.names}
        routed = text.get("experts")
        self.counts = None
        if routed:
            spread = 1 if self.names.get("identical") else self.names["rows"]
            self.counts = draw(routed["total"], routed["top_k"], spread, routed.get("groups", 1), len(self.kinds), self.seed)

    def events(self, actions: list[dict] | None = None) -> list[Event]:
        """Of the step, or of other actions outside any layer."""
        self.run(self.schedule.text["step"] if actions is None else actions)
        return refilled(self.out, self.schedule.text.get("ring", {}).get("banks", 0))

    # -- helpers --------------------------------------------------------------------------------------------------------

    def of(self, text: Any) -> Any:
        return evaluate(text, self.names)

    def at(self, op: str) -> Where:
        return Where(self.layer, self.phase, op)

    def key(self, name: str, ahead: bool = False):
        return filled(name, self.names), (self.layer + 1 if ahead and self.layer is not None else 0 if ahead else self.layer)

    def run(self, actions: list[dict]) -> None:
        for action in actions:
            verb = next(iter(action))
            getattr(self, "do_" + verb.replace(" ", "_"))(action[verb], action)

    # -- actions --------------------------------------------------------------------------------------------------------

    def do_work(self, cycles: Any, action: dict) -> None:
        self.out.append(Work(self.at(action.get("op", self.phase)), float(self.of(cycles))))

    def do_pause(self, seconds: Any, action: dict) -> None:
        self.out.append(Pause(self.at(action["why"]), float(self.of(seconds)), action["why"]))

    def do_fetch(self, name: str, action: dict) -> None:
        ahead = action.get("next", False)
        self.out.append(
            Fetch(
                self.at(name),
                self.key(name, ahead),
                int(self.of(action["bytes"])),
                action["stream"],
                action.get("writes", False),
                int(self.of(action.get("descriptors", 1))),
            )
        )

    def do_group(self, key: str, action: dict) -> None:
        layer = (self.layer + 1 if self.layer is not None else 0) if action.get("next") else self.layer
        if layer is not None and layer >= len(self.kinds):
            return
        names = dict(zip(("mixer", "ffn"), self.kinds[layer])) if layer is not None else {}
        for fetch in self.schedule.text["groups"].get(filled(key, names), ()):
            if self.of(fetch.get("if", True)):
                self.do_fetch(fetch["fetch"], {**fetch, "next": action.get("next", False)})

    def do_wait(self, names: str | list[str], action: dict) -> None:
        for name in [names] if isinstance(names, str) else names:
            self.out.append(Await(self.at(name), self.key(name)))

    def do_send(self, name: str, action: dict) -> None:
        self.out.append(
            Send(
                self.at(name),
                self.key("x " + name),
                tuple(action["factors"].split()),
                int(self.of(action["peers"])),
                int(self.of(action["bytes"])),
            )
        )

    def do_receive(self, name: str, action: dict) -> None:
        self.out.append(Receive(self.at(name), self.key("x " + name)))

    def do_exchange(self, name: str, action: dict) -> None:
        for n, (factors, peers, size) in enumerate(action["rounds"]):
            self.do_send(f"{name} {n}", {"factors": factors, "peers": peers, "bytes": size})
            self.do_receive(f"{name} {n}", {})
            self.do_work(action.get("work", 0), {"op": name})

    def do_ring(self, matrix: str, action: dict) -> None:
        loads = self.schedule.text["loads"][filled(matrix, self.names)]
        for _ in range(int(self.of(action.get("times", 1))) * int(self.of(loads["loads"]))):
            self.out.append(
                _Load(
                    self.at(matrix),
                    int(self.of(loads["bytes"])),
                    int(self.of(loads.get("descriptors", 1))),
                    float(self.of(loads["cycles"])),
                )
            )

    def do_prime(self, _: Any, action: dict) -> None:
        self.out.append(_Mark(self.at("prime"), "prime"))

    def do_hold(self, on: Any, action: dict) -> None:
        self.out.append(_Mark(self.at("hold"), "hold" if self.of(on) else "release"))

    def do_experts(self, which: str, action: dict) -> None:
        routed, count = self.schedule.text["experts"], int(self.names["experts"])
        slots = int(self.of(routed["slots"]))
        if which == "first":
            upto = min(slots, count, int(self.of(action.get("count", slots))))
            for e in range(self.started, upto):
                self.fetch_expert(routed, e)
            self.started = max(self.started, upto)
            return
        together = int(self.of(routed.get("together", 1)))
        freed = not action.get("release")
        for first in range(0, count, together):
            now = range(first, min(first + together, count))
            if not freed and self.started == count:
                self.do_hold(False, {})
                freed = True
            for part in routed["parts"]:
                for e in now:
                    for copy in part["copies"]:
                        self.out.append(Await(self.at("expert"), self.key(f"expert {e} {copy['name']}")))
                names = {**self.names, "now": len(now)}
                self.out.append(Work(self.at(part["op"]), float(evaluate(part["work"], names))))
            for e in now:
                if e + slots < count:
                    self.fetch_expert(routed, e + slots)
                    self.started = e + slots + 1
        self.started = 0

    def fetch_expert(self, routed: dict, e: int) -> None:
        for part in routed["parts"]:
            for copy in part["copies"]:
                self.do_fetch(
                    f"expert {e} {copy['name']}",
                    {"bytes": copy["bytes"], "stream": "experts", "descriptors": copy.get("descriptors", 1)},
                )

    def do_tiles(self, name: str, action: dict) -> None:
        cache = self.schedule.text["caches"][name]
        count, slots = int(self.of(cache["count"])), int(self.of(cache["slots"]))
        for t in range(count):
            self.out.append(Await(self.at(name), self.key(f"{name} {t}")))
            self.do_work(cache["work"], {"op": name})
            if t + slots < count:
                self.fetch_tile(name, cache, t + slots)

    def do_tiles_first(self, name: str, action: dict) -> None:
        cache = self.schedule.text["caches"][name]
        for t in range(min(int(self.of(cache["count"])), int(self.of(cache["slots"])))):
            self.fetch_tile(name, cache, t)

    def fetch_tile(self, name: str, cache: dict, t: int) -> None:
        self.do_fetch(f"{name} {t}", {"bytes": cache["bytes"], "stream": "cache", "descriptors": cache.get("copies", 1)})

    def do_if(self, condition: Any, action: dict) -> None:
        self.run(action.get("then" if self.of(condition) else "else", []))

    def do_repeat(self, count: Any, action: dict) -> None:
        for _ in range(int(self.of(count))):
            self.run(action["do"])

    def do_layers(self, first: int, action: dict) -> None:
        for self.layer in range(first, len(self.kinds)):
            self.names["layer"] = self.layer
            self.names["experts"] = 0 if self.counts is None else int(self.counts[self.layer])
            self.started = 0
            self.names.update(zip(("mixer", "ffn"), self.kinds[self.layer]))
            for kind in self.kinds[self.layer]:
                if kind is not None:
                    self.phase = kind
                    self.run(self.schedule.text["kinds"][kind])
        self.phase, self.layer = "ends", None
        self.names["layer"] = None


def refilled(items: list[Event | _Load | _Mark], banks: int) -> list[Event]:
    """The events with the ring's refills in them: load g + banks starts when load g has been consumed, or when the hold ends."""
    loads = [i for i in items if isinstance(i, _Load)]
    out: list[Event] = []
    issued = consumed = 0
    held: int | None = None  # refills wait: so many loads may be issued when it ends

    def issue(upto: int, where: Where) -> None:
        nonlocal issued
        while issued < min(upto, len(loads)):
            load = loads[issued]
            out.append(Fetch(where, ("ring", issued), load.bytes, "tape", False, load.descriptors))
            issued += 1

    for item in items:
        if isinstance(item, _Load):
            if consumed >= issued:  # a hold may not starve the ring
                issue(consumed + 1, item.where)
            out.append(Await(item.where, ("ring", consumed)))
            out.append(Work(item.where, item.cycles))
            consumed += 1
            if held is None:
                issue(consumed + banks, item.where)
        elif isinstance(item, _Mark):
            if item.what == "prime":
                issue(banks, item.where)
            elif item.what == "hold":
                held = consumed
            else:
                held = None
                issue(consumed + banks, item.where)
        else:
            out.append(item)
    return out
