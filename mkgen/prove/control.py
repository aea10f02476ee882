"""The control slice of a traced kernel: its jaxpr as a plain Python function of ints, without any arithmetic on arrays.

What a kernel copies, waits for and touches is decided by scalars: tables in SMEM, loop counters, the rank. Scalar
equations become Python; copies, semaphores and accesses of the buffers that copies move become calls (`CALLS`);
everything else is left out. Nothing is assumed about how the kernel was written: this is what the TPU compiler gets.
"""

from __future__ import annotations

import numpy as np
from jax._src import core
from jax._src.state import indexing
from jax._src.state.types import TransformedRef

from mkgen.check.names import div, rem
from mkgen.prove.jaxprs import Place, needed, nested, scalar, used

INDENT = "    "
CALLS = ("start", "send", "wait", "signal", "await_signal", "read", "write", "fetch", "put", "made", "need", "unknown")
BINARY = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "and": "&",
    "or": "|",
    "xor": "^",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "shift_left": "<<",
    "shift_right_arithmetic": ">>",
    "shift_right_logical": ">>",
}
CALLED = {
    "div": "div({}, {})",
    "rem": "rem({}, {})",
    "max": "max({}, {})",
    "min": "min({}, {})",
    "clamp": "min(max({1}, {0}), {2})",
    "neg": "-{}",
    "sign": "sign({})",
    "abs": "abs({})",
    "clz": "clz({})",
    "stop_gradient": "{}",
    "copy": "{}",
    "squeeze": "{}",
    "reshape": "{}",
    "broadcast_in_dim": "{}",
}


class Unfollowable(Exception):
    """A kernel whose control flow this reading does not know."""


class Control:
    """Python source of one kernel. refs: names of the jaxpr's arguments; watched: accesses of these are told."""

    def __init__(self, jaxpr, refs: list[str]):
        self.count = 0
        self.shapes = dict(zip(refs, (v.aval.shape for v in jaxpr.invars)))
        env = {v: Place(name, whole(v.aval.shape)) for v, name in zip(jaxpr.invars, refs)}
        self.smem = {name for v, name in zip(jaxpr.invars, refs) if "smem" in str(v.aval).lower()}
        self.watched: set[str] = set()
        self.relevance: dict[tuple, bool] = {}
        self.used = set(used(jaxpr))
        self.find_moved(jaxpr, env)
        self.watched -= self.smem
        body = needed(self.block(jaxpr, env, 1)[0])
        self.text = "\n".join(["def kernel(rank, " + ", ".join(CALLS) + "):", *(body or [INDENT + "pass"])])

    def function(self):
        """kernel(rank, *calls); see `CALLS`."""
        made: dict = {"div": div, "rem": rem, "sign": lambda x: (x > 0) - (x < 0), "clz": lambda x: 32 - (x & 0xFFFFFFFF).bit_length()}
        exec(compile(self.text, "<control slice>", "exec"), made)
        return made["kernel"]

    # -- what copies move -----------------------------------------------------------------------------------------------

    def find_moved(self, jaxpr, env: dict) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("dma_start", "dma_wait"):
                for ref in eqn.params["tree"].unflatten(eqn.invars)[:2]:
                    base = ref.ref if isinstance(ref, TransformedRef) else ref
                    self.watched.add(env[base].buffer)
            for inner, pairs in nested(eqn):
                self.find_moved(inner, {v: env[a] for v, a in pairs if not isinstance(a, core.Literal) and a in env})

    def relevant(self, jaxpr, env: dict) -> bool:
        """Does it copy, signal, fill a table, or touch what copies move?"""
        refs = tuple(env[v].buffer if isinstance(env.get(v), Place) else "" for v in jaxpr.invars)
        key = (id(jaxpr), refs)
        if key not in self.relevance:
            self.relevance[key] = any(self.matters(eqn, env) for eqn in jaxpr.eqns)
        return self.relevance[key]

    def matters(self, eqn, env: dict) -> bool:
        name = eqn.primitive.name
        if name.startswith(("dma_", "semaphore_")):
            return True
        if name in ("get", "swap", "addupdate"):
            place = env.get(eqn.invars[0])
            return place is not None and (place.buffer in self.watched or name != "get" and place.buffer in self.smem)
        return any(self.relevant(inner, refs_only(pairs, env)) for inner, pairs in nested(eqn))

    # -- blocks ---------------------------------------------------------------------------------------------------------

    def block(self, jaxpr, env: dict, depth: int) -> tuple[list[str], list]:
        """(lines, what its outputs are: source text, or None if unknown)."""
        lines: list[str] = []
        for eqn in jaxpr.eqns:
            self.equation(eqn, env, lines, depth)
        return lines, [self.value(v, env) for v in jaxpr.outvars]

    def equation(self, eqn, env: dict, lines: list[str], depth: int) -> None:
        name, pad = eqn.primitive.name, INDENT * depth
        special = getattr(self, "on_" + name, None)
        if special:
            special(eqn, env, lines, depth)
        elif (
            name in BINARY
            or name in CALLED
            or name in ("not", "select_n", "convert_element_type", "multiple_of", "axis_index")
        ):
            out = eqn.outvars[0]
            given = [self.value(v, env) for v in eqn.invars]
            if scalar(out.aval) and None not in given:
                text = self.expression(eqn, given)
                if text is not None:
                    env[out] = self.fresh()
                    lines.append(f"{pad}{env[out]} = {text}")
        else:
            for inner, pairs in nested(eqn):
                if name not in (
                    "jit",
                    "pjit",
                    "closed_call",
                    "core_call",
                    "custom_jvp_call",
                    "custom_vjp_call",
                    "checkpoint",
                ):
                    if self.relevant(inner, refs_only(pairs, env)):
                        raise Unfollowable(f"copies inside {name}")
                    continue
                if self.relevant(inner, refs_only(pairs, env)) or any(scalar(v.aval) for v in eqn.outvars):
                    new, outs = self.block(inner, self.inside(pairs, env), depth)
                    lines += new
                    env.update({v: o for v, o in zip(eqn.outvars, outs) if o is not None})

    def expression(self, eqn, given: list[str]) -> str | None:
        name = eqn.primitive.name
        if name in BINARY:
            return f"{given[0]} {BINARY[name]} {given[1]}"
        if name in CALLED:
            return CALLED[name].format(*given)
        if name == "not":
            return f"not {given[0]}" if eqn.outvars[0].aval.dtype == bool else f"~{given[0]}"
        if name == "select_n":
            return f"({', '.join(given[1:])},)[{given[0]}]"
        if name == "convert_element_type":
            return f"{given[0]} != 0" if eqn.outvars[0].aval.dtype == bool else f"int({given[0]})"
        if name == "multiple_of":
            return f"need({given[0]}, {eqn.params['values'][0]})"
        return "rank"  # axis_index

    def inside(self, pairs, env: dict) -> dict:
        """The names of an inner jaxpr's arguments."""
        out = {}
        for v, a in pairs:
            if isinstance(a, core.Literal):
                if scalar(v.aval):
                    out[v] = self.value(a, env)
            elif a in env:
                out[v] = env[a]
        return out

    def fresh(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def value(self, v, env: dict) -> str | None:
        """Source text of a scalar that is known."""
        if isinstance(v, core.Literal):
            known = np.ndim(v.val) == 0 and np.asarray(v.val).dtype.kind in "biu"
            return str(bool(v.val) if np.asarray(v.val).dtype == bool else int(v.val)) if known else None
        known = env.get(v)
        return known if isinstance(known, str) else None

    # -- control flow -----------------------------------------------------------------------------------------------------

    def on_scan(self, eqn, env, lines, depth):
        p, (inner, pairs) = eqn.params, nested(eqn)[0]
        self.loop(
            eqn,
            inner,
            pairs[: p["num_consts"]],
            pairs[p["num_consts"] :][: p["num_carry"]],
            env,
            lines,
            depth,
            f"for _ in range({p['length']}):",
        )

    def on_while(self, eqn, env, lines, depth):
        p = eqn.params
        first, consts = p["cond_nconsts"], p["body_nconsts"]
        body, args = p["body_jaxpr"].jaxpr, eqn.invars[first:]
        pairs = list(zip(body.invars, args))
        ask = p["cond_jaxpr"].jaxpr
        self.loop(
            eqn,
            body,
            pairs[:consts],
            pairs[consts:],
            env,
            lines,
            depth,
            "while True:",
            (ask, list(zip(ask.invars, eqn.invars[:first]))),
        )

    def loop(self, eqn, inner, consts, carry, env, lines, depth, head, ask=None) -> None:
        if not self.relevant(inner, refs_only([*consts, *carry], env)):
            return
        pad, fixed = INDENT * depth, self.inside(consts, env)
        known = [self.value(a, env) if scalar(v.aval) else None for v, a in carry]
        while True:
            names = [None if k is None else self.fresh() for k in known]
            body, test = [], []
            if ask:
                cond, given = ask
                held = self.inside(given, env) | {v: n for v, n in zip(cond.invars[len(given) :], names) if n}
                test, (go,) = self.block(cond, held, depth + 1)
                if go is None:
                    raise Unfollowable("a loop with copies that ends when data says so")
                test.append(f"{pad}{INDENT}if not {go}: break")
            body, outs = self.block(inner, fixed | {v: n for (v, _), n in zip(carry, names) if n}, depth + 1)
            again = [k if o is not None else None for k, o in zip(known, outs)]
            if again == known:
                break
            known = again
        kept = [(n, k, o) for n, k, o in zip(names, known, outs) if n]
        if kept:
            lines.append(f"{pad}{', '.join(n for n, _, _ in kept)} = {', '.join(k for _, k, _ in kept)}")
        lines += [pad + head, *test, *body]
        lines.append(
            f"{pad}{INDENT}{', '.join(n for n, _, _ in kept)} = {', '.join(o for _, _, o in kept)}"
            if kept
            else f"{pad}{INDENT}pass"
        )
        env.update({v: n for v, n in zip(eqn.outvars, names) if n})

    def on_cond(self, eqn, env, lines, depth):
        branches = nested(eqn)
        outs = [v for v in eqn.outvars if scalar(v.aval)]
        if not outs and not any(self.relevant(inner, refs_only(pairs, env)) for inner, pairs in branches):
            return
        pad, case = INDENT * depth, self.value(eqn.invars[0], env)
        if case is None:
            if any(self.relevant(inner, refs_only(pairs, env)) for inner, pairs in branches):
                lines.append(f"{pad}unknown('a branch with copies, tables or moved buffers, taken as data says')")
            return
        made = [self.block(inner, self.inside(pairs, env), depth + 1) for inner, pairs in branches]
        known = [k for k, v in enumerate(eqn.outvars) if scalar(v.aval) and all(o[k] is not None for _, o in made)]
        names = {k: self.fresh() for k in known}
        for i, (body, result) in enumerate(made):
            ask = f"int({case}) == {i}" if i else f"int({case}) <= 0"
            lines.append(pad + (f"{'el' if i else ''}if {ask}:" if i < len(made) - 1 else "else:"))
            lines += body + [f"{pad}{INDENT}{n} = {result[k]}" for k, n in names.items()] + [pad + INDENT + "pass"]
        env.update({eqn.outvars[k]: n for k, n in names.items()})

    # -- memory -----------------------------------------------------------------------------------------------------------

    def place(self, ref, env: dict, transforms=()) -> Place:
        if isinstance(ref, TransformedRef):
            ref, transforms = ref.ref, ref.transforms
        at = env[ref]
        dims = list(at.dims)
        for t in transforms:
            if not isinstance(t, indexing.NDIndexer):
                raise Unfollowable(f"{type(t).__name__} on {at.buffer}")
            open_ = [k for k, (_, n) in enumerate(dims) if n is not None]
            for k, index in zip(open_, t.indices):
                a, n = dims[k]
                if isinstance(index, indexing.Slice):
                    first, size = (
                        str(x) if isinstance(x, (int, np.integer)) else self.value(x, env)
                        for x in (index.start, index.size)
                    )
                    if index.stride not in (1, None):
                        raise Unfollowable(f"a stride on {at.buffer}")
                else:
                    first, size = (
                        (str(int(index)) if isinstance(index, (int, np.integer)) else self.value(index, env)),
                        None,
                    )
                if first is None or isinstance(index, indexing.Slice) and size is None:
                    first, size = a, n  # somewhere within: all of it
                elif a != "0":
                    first = f"{a} + {first}"
                dims[k] = (first, size)
        return Place(at.buffer, tuple(dims))

    def on_get(self, eqn, env, lines, depth):
        name = env[eqn.invars[0]].buffer
        if name not in self.watched | self.smem:
            return
        at = self.place(eqn.invars[0], env, eqn.params["tree"].unflatten(eqn.invars[1:]))
        if name in self.smem:
            if scalar(eqn.outvars[0].aval):
                out = env[eqn.outvars[0]] = self.fresh()
                lines.append(f"{INDENT * depth}{out} = fetch('{name}', {at.dims[0][0] if at.dims else 0})")
        else:
            lines.append(f"{INDENT * depth}read({at.text})")

    def on_swap(self, eqn, env, lines, depth):
        name, pad = env[eqn.invars[0]].buffer, INDENT * depth
        if name not in self.watched | self.smem:
            return
        at = self.place(eqn.invars[0], env, eqn.params["tree"].unflatten(eqn.invars[2:]))
        if name not in self.smem:
            if eqn.outvars[0] in self.used:
                lines.append(f"{pad}read({at.text})")
            lines.append(f"{pad}write({at.text})")
            return
        index, new = at.dims[0][0] if at.dims else "0", self.value(eqn.invars[1], env)
        if eqn.outvars[0] in self.used:
            out = env[eqn.outvars[0]] = self.fresh()
            lines.append(f"{pad}{out} = fetch('{name}', {index})")
        lines.append(f"{pad}put('{name}', {index}, {new})" if new is not None else f"{pad}made('{name}', {index})")

    def on_addupdate(self, eqn, env, lines, depth):
        name = env[eqn.invars[0]].buffer
        if name in self.smem:
            raise Unfollowable(f"{name} is added to")
        if name in self.watched:
            at = self.place(eqn.invars[0], env, eqn.params["tree"].unflatten(eqn.invars[2:]))
            lines += [f"{INDENT * depth}read({at.text})", f"{INDENT * depth}write({at.text})"]

    # -- copies and semaphores ----------------------------------------------------------------------------------------------

    def on_dma_start(self, eqn, env, lines, depth):
        source, target, arrived, sent, device = eqn.params["tree"].unflatten(eqn.invars)
        three = ", ".join(self.place(x, env).text for x in (source, target, arrived))
        if device is None:
            lines.append(f"{INDENT * depth}start({three})")
        else:
            lines.append(f"{INDENT * depth}send({three}, {self.place(sent, env).text}, {self.device(device, env)})")

    def on_dma_wait(self, eqn, env, lines, depth):
        source, target, semaphore, *_ = eqn.params["tree"].unflatten(eqn.invars)
        lines.append(f"{INDENT * depth}wait({', '.join(self.place(x, env).text for x in (source, target, semaphore))})")

    def device(self, device, env: dict) -> str:
        axes = (
            list(device.values())
            if isinstance(device, dict)
            else list(device)
            if isinstance(device, (tuple, list))
            else [device]
        )
        known = [self.value(x, env) if not isinstance(x, (int, np.integer)) else str(x) for x in axes]
        if len(known) != 1 or known[0] is None:
            raise Unfollowable("a remote copy or signal to a device that is not one number")
        return known[0]

    def on_get_barrier_semaphore(self, eqn, env, lines, depth):
        env[eqn.outvars[0]] = Place("barrier", ())

    def on_semaphore_signal(self, eqn, env, lines, depth):
        ref, transforms, count, device, _ = eqn.params["args_tree"].unflatten(eqn.invars)
        to = "rank" if device is None else self.device(device, env)
        lines.append(f"{INDENT * depth}signal({self.place(ref, env, transforms).text}, {self.value(count, env)}, {to})")

    def on_semaphore_wait(self, eqn, env, lines, depth):
        ref, transforms, count, _ = eqn.params["args_tree"].unflatten(eqn.invars)
        lines.append(f"{INDENT * depth}await_signal({self.place(ref, env, transforms).text}, {self.value(count, env)})")


def whole(shape: tuple) -> tuple:
    return tuple(("0", str(n)) for n in shape)


def refs_only(pairs, env: dict) -> dict:
    return {v: env[a] for v, a in pairs if not isinstance(a, core.Literal) and isinstance(env.get(a), Place)}
