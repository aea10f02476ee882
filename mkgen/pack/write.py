"""`mkgen pack`: a Hugging Face checkpoint -> each rank's tape, experts and embedding table, one tensor at a time."""
from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from mkgen.errors import MkgenError
from mkgen.pack.expect import match
from mkgen.pack.hub import Checkpoint
from mkgen.pack.image import put_embedding, put_expert_everywhere, put_weight
from mkgen.pack.packed import FORMAT, MANIFEST, check_space, check_target, file_name, new_array, new_folder
from mkgen.pack.places import TapePlaces, embedding_weight, expert_layers, shapes
from mkgen.pack.reading import Reader, grouped
from mkgen.pack.wanted import expected, tensor_names
from mkgen.plan.experts import ExpertImage
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan

Progress = Callable[[int, int, str], None]   # bytes read, bytes in all, the tensor that was written


def pack(plan: Plan, checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, ranks: Iterable[int] | None = None,
         progress: Progress | None = None, *, convert: bool = False, force: bool = False,
         ignore: Sequence[str] = ()) -> dict:
    """Packs a checkpoint for `ranks` (all of them if None) and returns the figures.

    Every tensor is read once and scattered to all ranks' files; no more than one or two are in memory. The files are
    in `<out_dir>.partial`, which becomes `out_dir` when all is done.
    convert: unpacked experts that are not exact in mxfp4 are rounded to it. force: weights packed before are replaced.
    ignore: shell patterns of tensors that may be in the checkpoint unused.
    Raises MkgenError: for all tensors that are missing, extra, misshapen or misdtyped, at once, before anything is
    written; for a weight that is not finite; for a target or disk that will not do.
    """
    began, out = time.perf_counter(), Path(os.path.abspath(out_dir))
    ranks = _ranks(plan, ranks)
    check_target(out, force)
    wanted = expected(plan)
    reader = Reader(plan, match(wanted, Checkpoint(checkpoint_dir), (*plan.spec.model.ignore, *ignore)), convert)
    reader.check_first_expert()
    sizes = shapes(plan)
    size = sum(math.prod(s) * 4 for s in sizes.values()) * len(ranks)
    check_space(out, size)

    def tell(name: str) -> None:
        if progress:
            progress(reader.read_bytes, reader.total_bytes, name)

    with new_folder(out, force) as folder:
        files = {name: {r: new_array(folder / file_name(name, r), shape) for r in ranks}
                 for name, shape in sizes.items()}
        images = {name: {r: np.asarray(f) for r, f in of.items()} for name, of in files.items()}
        write_weights(plan, reader, images, tell)
        for image in plan.experts:
            write_experts(plan, image, reader, images[image.name], tell)
        for f in (f for of in files.values() for f in of.values()):
            f.flush()
        manifest = {"format": FORMAT, "layout_hash": layout_hash(plan), "model": plan.spec.model.name, "ranks": ranks,
                    "mesh": dict(plan.mesh.factors), "expert_format": plan.experts[0].format if plan.experts else None,
                    "shapes": {n: list(s) for n, s in sizes.items()}}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    return {"out": str(out), "model": manifest["model"], "layout_hash": manifest["layout_hash"], "ranks": len(ranks),
            "parameters": sum(math.prod(e.shape) for e in wanted), "tensors": len(wanted),
            "checkpoint_bytes": reader.total_bytes, "bytes": size,
            "rounded_to_bf16": grouped(reader.rounded), "converted_to_mxfp4": grouped(reader.converted),
            "seconds": round(time.perf_counter() - began, 3)}


def write_weights(plan: Plan, reader: Reader, images: dict[str, dict[int, np.ndarray]],
                  tell: Callable[[str], None]) -> None:
    """Embedding tables and tapes. The ends come first: a table that is also the head is read once."""
    places, table = TapePlaces(plan), embedding_weight(plan)
    wanted = [(layer, plan.weights[name]) for layer, name in places.homes]
    if table is not None:
        wanted.insert(0, (None, table))
    for layer, weight, value in reader.weights(wanted):
        if weight is table:
            for rank, rows in images["embedding"].items():
                put_embedding(plan, rank, rows, value)
        else:
            for rank, tape in images["tape"].items():
                put_weight(places, rank, tape, layer, weight.name, value)
        tell((tensor_names(plan, weight, layer) or (weight.name,))[0])       # a constant of the spec has no tensor


def write_experts(plan: Plan, image: ExpertImage, reader: Reader, images: dict[int, np.ndarray],
                  tell: Callable[[str], None]) -> None:
    """Every routed expert of a kind, to the ranks that share it."""
    for index, layer in enumerate(expert_layers(plan, image)):
        for expert in range(image.experts):
            for weights, read in ((image.weights, reader.expert), (image.biases, reader.expert_bias)):
                for which, weight in enumerate(weights):
                    name, = tensor_names(plan, plan.weights[weight], layer, expert)
                    put_expert_everywhere(image, images, index, expert, which, read(name))
                    tell(name)


def pack_command(plan: Plan, from_dir: Path, out_dir: Path, convert: bool, force: bool, json: bool,
                 ignore: Sequence[str] = ()) -> dict:
    """`mkgen pack`: packs all ranks; a bar on stderr, on stdout the figures (`json`: one object), which it returns."""
    with bar(plan.spec.model.name, sys.stderr) as progress:
        figures = pack(plan, from_dir, out_dir, progress=progress, convert=convert, force=force,
                       ignore=ignore)
    figures["verdict"] = "pass"
    print(_json(figures) if json else describe(figures))
    return figures


def describe(figures: dict) -> str:
    """The figures for a person."""
    lines = ["{model}: {parameters:,} parameters in {tensors:,} tensors, packed for {ranks} ranks: {size:.3f} GB in "
             "{seconds:.1f} s".format(**figures, size=figures["bytes"] / 1e9),
             f"  layout {figures['layout_hash']}, {figures['out']}"]
    for key, text in (("rounded_to_bf16", "bf16"), ("converted_to_mxfp4", "mxfp4")):
        lines += [f"  rounded to {text}: {n['values']:,} values of {n['tensors']:,} tensors {pattern}"
                  for pattern, n in figures[key].items()]
    return "\n".join(lines)


@contextmanager
def bar(title: str, stream):
    """A progress bar on `stream`, as a `Progress`; nothing is drawn where it is no terminal."""
    from rich.console import Console
    from rich import progress as rich
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.DownloadColumn(),
               rich.TransferSpeedColumn(), rich.TimeRemainingColumn(), rich.TextColumn("{task.fields[tensor]}"))
    with rich.Progress(*columns, console=Console(file=stream), disable=not stream.isatty()) as shown:
        task = shown.add_task(title, total=None, tensor="")
        yield lambda done, total, name: shown.update(task, completed=done, total=total, tensor=name)


def _json(figures: dict) -> str:
    return json.dumps(figures, indent=2)


def _ranks(plan: Plan, ranks: Iterable[int] | None) -> list[int]:
    every = range(plan.mesh.ranks)
    out = sorted(set(every if ranks is None else ranks))
    wrong = [r for r in out if r not in every]
    if wrong or not out:
        raise MkgenError(f"no rank {wrong[0]}: the mesh has {len(every)}, 0 to {len(every) - 1}" if wrong else
                         "no ranks to pack for")
    return out
