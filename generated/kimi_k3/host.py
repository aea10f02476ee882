"""kimi_k3, seen from the host: weights, state, and the jitted decode step over 32 devices.

Written by `mkgen build`. A step decodes one token of each row, and gives the next:

    mesh = make_mesh()
    weights = load_weights("packed", mesh)  # what `mkgen pack` wrote
    state = init_state(mesh, rows=1)
    step = make_decode_step(mesh, rows=1)  # steps=16: so many a call
    tokens, logits, state = step(weights, state, tokens, positions)

Over several hosts, call `jax.distributed.initialize()` first and run the same program on each.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from . import kernel

SPEC = {
    "name": "kimi_k3",
    "hidden": 7168,
    "vocab": 163840,
    "layers": 93,
    "mesh": {"host": 4, "chip": 4, "core": 2},  # outermost first
    "ranks": 32,  # devices, one core each
    "rows": (1, 8),  # variants: sequences decoded side by side
    "tokens": 1,  # of a row and step
    "context": 4096,  # positions of a row
}
PLAN = {
    "chip": "tpu7x",
    "layout_hash": "76e4c9909a3adee8",  # of the packed weights that this module reads
    "tape_rows": 7092584,  # u32 rows of 512 bytes on a rank
    "ring_depth": 14,
    "padding_fraction": 0.005934,  # beyond the true bytes of a step, at 1 rows
    "vmem_bytes": {1: 50170880, 8: 52715520},  # by rows
    "bytes_per_core": {1: 49095786496, 8: 50071552000},  # in HBM, by rows
}
RANKS = SPEC["ranks"]

WEIGHTS = {  # u32 shape on one rank
    "tape": (7092584, 128),
    "experts": (20608, 4288, 128),
    "embedding": (143360, 128),
}
STATE_ROW_AXIS = {"kda_window": 2, "kda_matrix": 1, "mla_cache": 1}  # counts decode rows

# ---- tables --------------------------------------------------------------------------------------

KINDS = {"mixer": ["kda", "mla"], "ffn": ["dense", "moe"]}  # in the order of the switches
SCHEDULE = {  # the sub-layer of each layer
    "mixer": 23 * (3 * ["kda"] + ["mla"]) + ["mla"],
    "ffn": ["dense"] + 92 * ["moe"],
}
CHUNK_ROWS = {  # u32 rows of each chunk that a sub-layer reads
    "begin": [],
    "kda": [3672, 640] + 12 * [3584] + [64] + 3 * [3584],
    "mla": [2328] + 3 * [3584] + [3472, 768, 768] + 3 * [3584],
    "dense": [88] + 17 * [3584] + 8 * [3696],
    "moe": [984, 3136] + 3 * [3584] + [2688, 2688, 8, 3168],
    "end": [88] + 35 * [4096],
}
FACT_COLUMNS = {  # further data, one number a layer
    "snapshots": np.repeat([1, 2, 3, 4, 5, 6, 7, 8], [12, 12, 12, 12, 12, 12, 12, 9]),
    "opens_block": 7 * ([1] + 11 * [0]) + [1] + 8 * [0],
}

def chunk_table():
    """int32 [2 * chunks]: first row and rows of each chunk of the tape, in the order of use."""
    order = [name for layer in zip(*SCHEDULE.values()) for name in layer if name]
    rows = np.array([r for name in ("begin", *order, "end") for r in CHUNK_ROWS[name]], np.int32)
    return np.stack([np.cumsum(rows) - rows, rows], axis=1).astype(np.int32).reshape(-1)

def fact_table():
    """int32 [layers * facts]: mixer, earlier layers that had it; ffn, likewise; FACT_COLUMNS."""
    columns = []
    for role, names in SCHEDULE.items():
        kinds = KINDS[role]
        columns.append([kinds.index(name) if name else len(kinds) for name in names])
        columns.append([names[:layer].count(name) for layer, name in enumerate(names)])
    return np.stack([*columns, *FACT_COLUMNS.values()], axis=1).astype(np.int32).reshape(-1)

CHUNKS, FACTS = chunk_table(), fact_table()

# ---- mesh, weights, state ------------------------------------------------------------------------

def make_mesh(devices=None):
    """Mesh of 32 devices, axis "tp": rank r is the r-th of `devices` (None: of jax.devices()).

    ValueError if there are too few, or if the given ones are not exactly that many."""
    found = jax.devices()[:RANKS] if devices is None else list(devices)
    if len(found) != RANKS:
        raise ValueError(f"{SPEC['name']} needs {RANKS} devices {SPEC['mesh']}, got {found}")
    return Mesh(np.array(found), ("tp",))

def over_ranks(name_shapes, mesh):
    """name -> global ShapeDtypeStruct of arrays that each rank holds a part of, along axis 0."""
    array = functools.partial(jax.ShapeDtypeStruct, sharding=mesh and NamedSharding(mesh, P("tp")))
    return {n: array((RANKS * s[0], *s[1:]), dtype) for n, (s, dtype) in name_shapes.items()}

def weight_shapes(mesh=None):
    """name -> ShapeDtypeStruct, uint32 [ranks * a rank's rows, ...]; sharded if a mesh is given."""
    return over_ranks({name: (shape, jnp.uint32) for name, shape in WEIGHTS.items()}, mesh)

def state_shapes(rows, mesh=None):
    """name -> ShapeDtypeStruct, [ranks * layers of its kind, ...]; sharded if a mesh is given.

    ValueError if the module has no variant of `rows` rows."""
    if rows not in SPEC["rows"]:
        raise ValueError(f"rows={rows}: this module was built for rows in {SPEC['rows']}")
    return over_ranks({name: (s.shape, s.dtype) for name, s in kernel.states(rows).items()}, mesh)

def load_weights(directory, mesh):
    """What `mkgen pack` wrote to `directory` -> name -> global array, as `weight_shapes` says.

    Each process reads <name>.<rank>.npy of its own devices only. ValueError if the weights have
    another layout (which includes the mesh), lack a rank, or a file has another shape."""
    manifest = json.loads((Path(directory) / "manifest.json").read_text())
    if manifest["layout_hash"] != PLAN["layout_hash"]:
        raise ValueError(
            f"{directory} holds {manifest['model']} in layout {manifest['layout_hash']}; this reads"
            f" {SPEC['name']} in {PLAN['layout_hash']}: pack for the spec it was built from"
        )

    def read(name, index):
        rank = (index[0].start or 0) // WEIGHTS[name][0]
        if rank not in manifest["ranks"]:
            raise ValueError(f"{directory} holds ranks {manifest['ranks']}, rank {rank} is missing")
        path = Path(directory) / f"{name}.{rank}.npy"
        part = np.load(path, mmap_mode="r")
        check_array(path, part, WEIGHTS[name], np.uint32)
        return part

    make, shapes = jax.make_array_from_callback, weight_shapes(mesh).items()
    return {n: make(s.shape, s.sharding, functools.partial(read, n)) for n, s in shapes}

def init_state(mesh, rows):
    """name -> global array of zeros, as `state_shapes` says, made on the devices."""
    shapes = state_shapes(rows)
    zeros = lambda: {name: jnp.zeros(s.shape, s.dtype) for name, s in shapes.items()}
    return jax.jit(zeros, out_shardings=NamedSharding(mesh, P("tp")))()

def reset_row(state, row):
    """`state` with all that it keeps of decode row `row` zeroed. The state passed in is donated.

    Never needed to begin a sequence: a row at position 0 starts clean. ValueError: no such row."""
    rows = min(x.shape[STATE_ROW_AXIS[name]] for name, x in state.items())
    if not 0 <= row < rows:
        raise ValueError(f"row {row}: the state has rows 0 to {rows - 1}")
    return {name: zero_row(x, STATE_ROW_AXIS[name], row) for name, x in state.items()}

@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def zero_row(x, axis, row):
    return x.at[(slice(None),) * axis + (row,)].set(0)

# ---- the step ------------------------------------------------------------------------------------

def make_decode_step(mesh, rows, *, steps=1, interpret=False):
    """The step for `rows` rows on `mesh`, or `steps` of them in one call: a `DecodeStep`.

    interpret: True runs it without a TPU; or pltpu.InterpretParams. ValueError: no such variant."""
    if steps not in range(1, SPEC["context"] + 1):
        raise ValueError(f"steps={steps}: a call decodes 1 to {SPEC['context']} tokens of a row")
    return DecodeStep(mesh, rows, steps, interpret)

class DecodeStep:
    """step(weights, state, tokens, positions) -> (next_tokens, logits, state); compiled once.

    weights      from `load_weights`
    state        from `init_state` or the call before; donated: the arrays passed in are gone
    tokens       int32 [rows, 1]: token id of each row; NumPy's, or the last of the call before
    positions    int32 [rows]: where the token stands, 0 to context - steps; -1: the row is inactive
    next_tokens  int32 [rows, steps]: argmax, of ties the lowest id; each is the next step's token
    logits       f32 [rows, padded vocabulary] of the last step, sharded on axis 1: `whole_logits`

    A row at position 0 starts from clean state. An inactive row reads no experts, writes no state,
    and its results mean nothing. ValueError, before anything runs: position or token out of range,
    a wrong shape or dtype. Positions are checked on the host: those of a device are waited for."""
    def __init__(self, mesh, rows, steps, interpret):
        self.mesh, self.rows, self.steps = mesh, rows, steps
        self.interpret = pltpu.InterpretParams() if interpret is True else interpret
        self.weights, self.state = weight_shapes(), state_shapes(rows)
        ins, outs = (P("tp"), P("tp"), P(), P()), (P(), P(None, "tp"), P("tp"))
        body = jax.shard_map(self.on_rank, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False)
        placed = lambda specs: tuple(NamedSharding(mesh, spec) for spec in specs)
        options = {"xla_allow_excess_precision": False}  # values are rounded where they say so
        jit = functools.partial(jax.jit, donate_argnums=1, compiler_options=options)
        self.jitted = jit(body, in_shardings=placed(ins), out_shardings=placed(outs))

    def on_rank(self, weights, state, tokens, positions):
        fixed = {"chunks": jnp.asarray(CHUNKS), "facts": jnp.asarray(FACTS), **weights}
        begin = tokens[:, 0], positions, jnp.zeros_like(kernel.outputs(self.rows)["logits"]), state
        def one(before, _):
            token, position, _, state = before
            operands = {"tokens": token, "positions": position, **fixed}
            out, state = kernel.decode_call(self.rows, operands, state, self.interpret)
            token = out["token"][: self.rows, 0]
            return (token, position + (position >= 0), out["logits"], state), token

        unroll = int(self.steps > 1)  # 0: all of it, so that a single step is no loop
        after, made = jax.lax.scan(one, begin, length=self.steps, unroll=unroll)
        return made.T, after[2][: self.rows, : kernel.VOCAB_RUN], after[3]

    def __call__(self, weights, state, tokens, positions):
        check_arrays("weights", weights, self.weights)
        check_arrays("state", state, self.state)
        check_array("tokens", tokens, (self.rows, 1), jnp.int32)
        check_array("positions", positions, (self.rows,), jnp.int32)
        positions = np.asarray(positions)
        last, why = SPEC["context"] - self.steps, f" for {self.steps} steps to fit the context"
        check_range("position", positions, -1, last, why if self.steps > 1 else "")
        if isinstance(tokens, np.ndarray):  # not those of the step before, which are in range
            check_range("token", np.where(positions < 0, 0, tokens[:, 0]), 0, SPEC["vocab"] - 1)
        return self.jitted(weights, state, tokens, positions)

    def lower(self):
        """jax.stages.Lowered of the step: nothing runs, and `mesh` may be one of a TPU topology."""
        return self.jitted.lower(*abstract_args(self.mesh, self.rows))

def abstract_args(mesh, rows):
    """(weights, state, tokens, positions) of a step as ShapeDtypeStructs with their shardings."""
    whole = NamedSharding(mesh, P())
    small = [jax.ShapeDtypeStruct(s, jnp.int32, sharding=whole) for s in ((rows, 1), (rows,))]
    return weight_shapes(mesh), state_shapes(rows, mesh), *small

def whole_logits(logits):
    """A step's logits -> f32 [rows, vocab], whole on every device; padding columns are cut off."""
    whole = NamedSharding(logits.sharding.mesh, P())
    return jax.device_put(logits, whole)[:, : SPEC["vocab"]]

def check_arrays(what, got, wanted):
    if got.keys() != wanted.keys():
        raise ValueError(f"{what} has the arrays {sorted(got)}, not {sorted(wanted)}")
    for name, s in wanted.items():
        check_array(f"{what} {name}", got[name], s.shape, s.dtype)

def check_array(what, x, shape, dtype):
    if getattr(x, "shape", None) != shape or x.dtype != dtype:
        got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
        raise ValueError(f"{what}: {got}, not {np.dtype(dtype)}{list(shape)}")

def check_range(what, values, first, last, why=""):
    bad = (values < first) | (values > last)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"row {row} has {what} {values[row]}; it must be {first} to {last}{why}")
