"""plan -> source text: one kernel module and its face, printed from the templates."""
from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from mkgen.emit.coded import DTYPES, coded, constant, left_operand
from mkgen.emit.printer import Printer
from mkgen.emit.prune import prune
from mkgen.emit.wrap import indent_of, wrap
from mkgen.graph.ops.cache import Seen
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Buffer, Collective, Step, walk
from mkgen.spec.formats import FORMATS

FACE = {"decode_call", "states", "VOCAB_RUN"}       # what the host side reads
SPACES = {"smem": "pltpu.SMEM", "any": "pl.ANY"}


def template_dir() -> Path:
    """The templates: inside the installed package, or beside it in a checkout."""
    packaged = Path(str(files("mkgen"))) / "templates"
    return packaged if packaged.is_dir() else packaged.parent.parent / "templates"


@lru_cache(maxsize=1)
def environment() -> Environment:
    """One for all: a template is compiled once a process."""
    return Environment(loader=FileSystemLoader(template_dir()), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                       keep_trailing_newline=True)


def kernel_environment(plan: Plan) -> Environment:
    """With the names that a kernel's templates find everywhere; they are those of the plan that asked last."""
    env = environment()
    env.globals.update(rounding(plan), coded=coded(plan), constant=constant, left_operand=left_operand, code_dtype=lambda fmt: DTYPES[FORMATS[fmt].code])
    return env


def shape_text(b: Buffer) -> str:
    dims = ", ".join(str(s) for s in b.shape)
    return f"({dims},)" if len(b.shape) == 1 else f"({dims})"


def place_text(b: Buffer) -> str:
    if b.space == "dma_sem":
        return f"dma({shape_text(b)})" if b.shape else "dma"
    return f"{b.space}({shape_text(b)}, {b.dtype})"


def libraries(plan: Plan) -> list[str]:
    """Helper sections that the plan's steps call, in a fixed order."""
    kinds = {op.kind for sub in plan.graph.sublayers() for op in sub.ops}
    wanted = (("recurrence", {"short_conv", "recurrence"}), ("rope", {"rope_table"}), ("attention", {"gqa_attention", "mla_attention"}),
              ("gqa", {"gqa_attention"}), ("mla", {"mla_attention", "mla_rope", "spread_key"}), ("experts", {"routed_experts"}))
    return ["coded"] * coded(plan).on_tape + [name for name, needs in wanted if kinds & needs]


def function(r: Region) -> str:
    """The name of a sub-layer's function: with its role, so that no kind's name meets a helper's."""
    return f"{r.name}_{r.role}" if r.role in ("mixer", "ffn") else r.name


def rounding(plan: Plan) -> dict:
    """What templates write where a value is rounded: nothing if activations stay float32, and products split them."""
    split = plan.spec.build.activations == "f32"
    wide = split or plan.spec.model.residual.dtype == "f32"
    return {"split": split, "cast": "" if split else ".astype(bf16)", "stream_cast": "" if wide else ".astype(bf16)", "rounded": "" if split else "round_bf16",
            "lhs_rows": "TERM_ROWS" if split else "ROWS_PADDED"}


def expert_steps(plan: Plan) -> list[dict]:
    """The arguments of the step that runs an expert, of each kind of routed experts; not those of the step that does for one row."""
    steps = (n for r in plan.regions.values() for n in walk(r.body) if isinstance(n, Step))
    return [n.args for n in steps if n.template == "experts" and n.macro in ("expert", "batch") and n.args.get("lone") != "one"]


def cache_features(plan: Plan) -> set[str]:
    """What the plan's positional caches have beyond the plain one: groups, window, chunk, softcap, sinks."""
    steps = (n for r in plan.regions.values() for n in walk(r.body) if isinstance(n, Step))
    return {key for n in steps if (n.template, n.macro) == ("attention", "cache") for key in n.args["more"]}


def collectives(plan: Plan) -> list[Collective]:
    return [n for r in plan.regions.values() for n in walk(r.body) if isinstance(n, Collective)]


def exchange_kinds(plan: Plan) -> set[str]:
    return {n.kind for n in collectives(plan)}


def sights(plan: Plan) -> list[Seen]:
    """One for each list of tiles, in the order in which they are first used."""
    ops = (op for sub in plan.graph.mixers.values() for op in sub.ops if any(s.positional for s in op.states()))
    return list(dict.fromkeys(getattr(op, "seen", Seen()) for op in ops))


def render_kernel(plan: Plan) -> str:
    return tidy(prune(kernel_text(plan), FACE))


def kernel_text(plan: Plan) -> str:
    """The kernel as the templates print it, with all their helpers."""
    env = kernel_environment(plan)
    spec = plan.spec
    buffers = list(plan.buffers.values())
    used = [t for t in plan.transfers.values()]
    order = {"begin": 0, "mixer": 1, "ffn": 2, "end": 3}
    regions = sorted(plan.regions.values(), key=lambda r: order[r.role])
    vocab = spec.model.vocab
    names = [("tokens", SPACES["smem"], "token id of each row"),
             ("positions", SPACES["smem"], "position of each row; -1: inactive"),
             ("chunks", SPACES["smem"], "first row and rows of each chunk of the tape"),
             ("facts", SPACES["smem"], "per-layer data, FACTS words a layer"),
             ("tape", SPACES["any"], f"u32 [{plan.tape_rows}, 128]"),
             *((image.name, SPACES["any"], "u32 [{}, {}, {}]".format(*image.shape)) for image in plan.experts),
             ("embedding", SPACES["any"], f"u32 [{plan.embed_rows}, 128]")]
    missing = [any(run[i] is None for run in plan.graph.layers) for i in (0, 1)]
    functions = {r.name: function(r) for r in regions}
    kinds = [[functions[n] for n in names] + ["no_sublayer"] * gap for names, gap in zip((plan.graph.mixers, plan.graph.ffns), missing)]
    return env.get_template("kernel.py.j2").render(
        plan=plan, printer=Printer(env, plan), kinds=exchange_kinds(plan), wires={n.wire for n in collectives(plan)},
        beside=any(n.beside for n in collectives(plan)), by_rows=any(n.rows for n in collectives(plan)), then=any(n.over for n in collectives(plan)), regions=regions, function=function, transfers=used, libs=libraries(plan), kv=cache_features(plan),
        local=bool({"window", "chunk"} & cache_features(plan)), sights=sights(plan),
        kv_batch=spec.build.tiles_at_once, expert_steps=expert_steps(plan),
        embed_words=-(-spec.model.hidden // 256), vocab_run=-(-vocab // plan.mesh.ranks), operands=names,
        bytes_on_tape=any(FORMATS[m.format].column and not m.at_once for m in plan.matrices.values()),
        has_lanes=any(m.layout == "lanes" for m in plan.matrices.values()), mixers=kinds[0], ffns=kinds[1],
        state_buffers=[b for b in buffers if b.space == "hbm"], out_buffers=[b for b in buffers if b.space == "out"],
        scratch_buffers=[b for b in buffers if b.space in ("vmem", "smem", "dma_sem")], shape=shape_text, place=place_text,
        vmem_limit=plan.target.vmem_bytes)


def tidy(text: str) -> str:
    """The text as `ruff format` lays it out, at most 100 columns wide (but for what has no place to break), with one blank line between functions."""
    command = [sys.executable, "-m", "ruff", "format", "--quiet", "--isolated", "--line-length", "100",
               "--config", "format.skip-magic-trailing-comma=true", "--stdin-filename", "kernel.py", "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the printed kernel is not Python:\n{done.stderr}")
    return wrap(close_up(done.stdout.replace("\n\n\n", "\n\n")))


def close_up(text: str) -> str:
    """Without the blank line between an inner function and the line right behind it that uses it, or a statement in front of it."""
    out, name, pad = [], None, ""
    lines = text.split("\n")
    for before, line, after in zip(["", *lines], lines, [*lines[1:], ""]):
        if line and not line.startswith(" "):
            name = None                          # another function
        if line.startswith(" ") and line.lstrip().startswith("def "):
            name, pad = line.split("def ")[1].split("(")[0], line[:-len(line.lstrip())]
        if not line and after.startswith(" ") and after.lstrip().startswith(("def ", "@", "# -- ")) and indent_of(before) == indent_of(after):
            continue
        if not line and name and after.startswith(pad) and not after[len(pad):].startswith(" ") and name in after:
            name = None
            continue
        out.append(line)
    return "\n".join(out)
