"""`mkgen pack`: a Hugging Face checkpoint -> each rank's tape, experts and embedding table, one tensor at a time."""
from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path

import numpy as np

from mkgen.errors import MkgenError
from mkgen.graph.ir import Weight
from mkgen.pack.coded import Coded, encode
from mkgen.pack.expect import Source, match
from mkgen.pack.hub import Checkpoint
from mkgen.pack.image import put_embedding, put_expert_everywhere, put_weight
from mkgen.pack.journal import Partial
from mkgen.pack.packed import FORMAT, MANIFEST, check_space, check_target, file_name
from mkgen.pack.places import TapePlaces, embedding_weight, expert_layers, shapes
from mkgen.pack.reading import BadWeights, Reader, grouped
from mkgen.pack.wanted import expected
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan
from mkgen.spec.params import by_role

Progress = Callable[[int, int, str], None]   # bytes read, bytes in all, the weight that was written
SYNC_BYTES, SYNC_SECONDS = 1 << 30, 20.0     # of work that a crash may cost
JOBS = min(8, os.cpu_count() or 1)           # threads that read and write side by side


@dataclass(frozen=True)
class Unit:
    """One weight on its way: of a layer (None: the ends), of an expert. place: of which image, with what of it."""
    place: str                               # embedding | tape | the name of an expert image
    weight: Weight
    layer: int | None
    format: str                              # of build.formats; f32: plain, a bias
    expert: int | None = None
    index: int = 0                           # which of the layers with experts
    which: int = 0                           # of an expert's matrices


def pack(plan: Plan, checkpoint_dir: str | os.PathLike, out_dir: str | os.PathLike, ranks: Iterable[int] | None = None,
         progress: Progress | None = None, *, convert: bool = False, force: bool = False, ignore: Sequence[str] = (),
         say: Callable[[str], None] | None = None) -> dict:
    """Packs a checkpoint for `ranks` (all of them if None) and returns the figures.

    Every tensor is read once and scattered to all ranks' files; each of JOBS threads has one or two in memory, and one expert of a
    stack.
    The files are in `<out_dir>.partial`, which becomes `out_dir` when all is done. A run that is interrupted, however, leaves
    that folder; the next one goes on where it stopped and ends with the same bytes.
    convert: values that the build's format cannot hold exactly are rounded to it. force: weights packed before are replaced.
    ignore: shell patterns of tensors that may be in the checkpoint unused, beside the spec's. say: takes a line for the user.
    Raises MkgenError: for all tensors that are missing, extra, misshapen or misdtyped, at once, before anything is
    written; for all weights that are not finite; for a target or disk that will not do.
    """
    began, out = time.perf_counter(), Path(os.path.abspath(out_dir))
    ranks = _ranks(plan, ranks)
    check_target(out, force)
    wanted, checkpoint = expected(plan), Checkpoint(checkpoint_dir)
    sources = match(wanted, checkpoint, (*plan.spec.model.ignore, *ignore))
    reader, todo = Reader(plan, sources, convert), list(units(plan))
    probe(reader, todo)
    sizes = shapes(plan)
    size = sum(math.prod(s) * 4 for s in sizes.values()) * len(ranks)
    check_space(out, size)
    partial = Partial(out, facts(plan, checkpoint, ranks, convert))
    going_on = partial.done
    try:
        if going_on and say:
            say(f"{partial.path}: going on after {going_on:,} of {len(todo):,} weights")
        files = partial.arrays((file_name(name, r), shape) for name, shape in sizes.items() for r in ranks)
        images = {name: {r: files[file_name(name, r)] for r in ranks} for name in sizes}
        write(plan, reader, todo, images, partial, progress)
        manifest = {"format": FORMAT, "layout_hash": layout_hash(plan), "model": plan.spec.model.name, "ranks": ranks,
                    "mesh": dict(plan.mesh.factors), "expert_format": plan.experts[0].format if plan.experts else None,
                    "shapes": {n: list(s) for n, s in sizes.items()}}
        del images, files
        partial.finish(json.dumps(manifest, indent=2) + "\n", MANIFEST)
    except BadWeights:
        partial.remove()
        raise
    finally:
        partial.close()
    return {"out": str(out), "model": manifest["model"], "layout_hash": manifest["layout_hash"], "ranks": len(ranks),
            "parameters": sum(e.parameters for e in wanted), "published": plan.spec.model.parameters, "tensors": len(wanted),
            "checkpoint_bytes": reader.total_bytes, "bytes": size, "resumed_after": going_on,
            "rounded_to_bf16": grouped(reader.rounded),
            "converted": {fmt: grouped(counts) for fmt, counts in sorted(reader.converted.items())},
            "ignored": ignored(checkpoint, sources, (*plan.spec.model.ignore, *ignore)), "families": families(plan, sources, todo),
            "seconds": round(time.perf_counter() - began, 3)}


def units(plan: Plan) -> Iterator[Unit]:
    """All that is to be written, always in this order: the embedding table, the ends (a table that is also the head is read
    once), the layers, the experts."""
    places, table = TapePlaces(plan), embedding_weight(plan)
    if table is not None:
        yield Unit("embedding", table, None, "bf16")
    for (layer, name), homes in places.homes.items():
        yield Unit("tape", plan.weights[name], layer, getattr(homes[0].of, "format", "bf16"))
    for image in plan.experts:
        for index, layer in enumerate(expert_layers(plan, image)):
            for expert in range(image.experts):
                for weights, fmt in (image.weights, image.format), (image.biases, "f32"):
                    for which, name in enumerate(weights):
                        yield Unit(image.name, plan.weights[name], layer, fmt, expert, index, which)


def probe(reader: Reader, todo: Sequence[Unit]) -> None:
    """Refuses a checkpoint whose weights cannot be stored as asked at once, for all families, rather than in the middle."""
    first: dict[str, Unit] = {}
    for u in todo:
        first.setdefault(u.weight.name, u)
    problems = []
    for u in first.values():
        coded = any(reader.sources[n].layout.coded for n, _ in reader.keys(u.weight, u.layer, u.expert))
        if (coded or u.format not in ("bf16", "f32")) and not reader.convert:
            try:
                reader.weight(u.weight, u.layer, u.expert, u.format)
            except BadWeights as error:
                problems.append(error)
    if problems:
        raise BadWeights.all(problems)
    reader.read_bytes = 0


def facts(plan: Plan, checkpoint: Checkpoint, ranks: list[int], convert: bool) -> dict:
    """What decides the bytes of a pack, by a word for each part."""
    patterns = json.dumps(plan.spec.model.checkpoint, sort_keys=True)
    return {"spec": [layout_hash(plan), hashlib.sha256(patterns.encode()).hexdigest()[:16]], "checkpoint": checkpoint.fingerprint(),
            "list of ranks": ranks, "--convert": convert}


def write(plan: Plan, reader: Reader, todo: Sequence[Unit], images: dict[str, dict[int, np.ndarray]], partial: Partial,
          progress: Progress | None) -> None:
    """Writes what is not on disk yet. Raises BadWeights for all of the checkpoint's bad weights at the end."""
    for notes in partial.notes:
        reader.rounded |= notes["rounded"]
        for fmt, counts in notes["converted"].items():
            reader.converted.setdefault(fmt, {}).update(counts)
    left = todo[partial.done:]
    reader.will_read((u.weight, u.layer, u.expert) for u in left)
    skipped = {k for u in todo[:partial.done] for k in reader.keys(u.weight, u.layer, u.expert)}
    skipped -= {k for u in left for k in reader.keys(u.weight, u.layer, u.expert)}
    reader.read_bytes = sum(reader.sources[n].layout.bytes(e) for n, e in skipped)
    sync = _Sync(reader, partial)
    work = _Work(plan, reader, images)
    with ThreadPoolExecutor(JOBS) as pool:
        tasks, running = iter(_tasks(left)), deque()
        try:
            for task in tasks:
                running.append((task, pool.submit(work, task)))
                if len(running) > JOBS:
                    _finish(running, work, sync, progress)
            while running:
                _finish(running, work, sync, progress)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            while running and running[0][1].done() and not running[0][1].cancelled() and not running[0][1].exception():
                _finish(running, work, sync, None)
            sync.now()
            raise
    if work.problems:
        raise BadWeights.all(work.problems)
    sync.now()


class _Work:
    """Reads and writes the weights of a task, on any thread. problems: the bad weights of all tasks."""

    def __init__(self, plan: Plan, reader: Reader, images: dict[str, dict[int, np.ndarray]]):
        self.plan, self.reader, self.images, self.places = plan, reader, images, TapePlaces(plan)
        self.problems: list[BadWeights] = []

    def __call__(self, task: Sequence[Unit]) -> None:
        for u in task:
            try:
                put(self.plan, self.places, self.images, u, self.reader.weight(u.weight, u.layer, u.expert, u.format))
            except BadWeights as error:
                self.problems.append(error)


def _tasks(todo: Sequence[Unit]) -> Iterator[list[Unit]]:
    """The ends, each layer, each expert: they share no tensor, and no word of an image."""
    for _, task in groupby(todo, lambda u: (u.layer, u.expert)):
        yield list(task)


def _finish(running: deque, work: _Work, sync: _Sync, progress: Progress | None) -> None:
    """Waits for the first of the tasks, which are counted in their order."""
    task, future = running[0]
    future.result()
    running.popleft()
    if not work.problems:                    # what is bad is met again by a run that goes on
        sync.wrote(len(task))
    if progress:
        progress(work.reader.read_bytes, work.reader.total_bytes, task[-1].weight.name)


def put(plan: Plan, places: TapePlaces, images: dict[str, dict[int, np.ndarray]], u: Unit, value: np.ndarray | Coded) -> None:
    """One weight into all images that hold a part of it. Done twice, it is the same."""
    if u.place == "embedding":
        for rank, rows in images["embedding"].items():
            put_embedding(plan, rank, rows, value)
    elif u.place == "tape":
        for rank, tape in images["tape"].items():
            put_weight(places, rank, tape, u.layer, u.weight.name, value)
    else:
        image = next(i for i in plan.experts if i.name == u.place)
        value = value if u.format == "f32" or isinstance(value, Coded) else encode(u.format, value.T)
        put_expert_everywhere(image, images[image.name], u.index, u.expert, u.which, value)


class _Sync:
    """Brings to disk what was written, every so many bytes and seconds: a crash costs no more work than that."""

    def __init__(self, reader: Reader, partial: Partial):
        self.reader, self.partial = reader, partial
        self.done, self.read, self.time = partial.done, reader.read_bytes, time.monotonic()
        self.noted: dict[str, dict] = {"rounded": dict(reader.rounded)} | {f: dict(c) for f, c in reader.converted.items()}

    def wrote(self, weights: int) -> None:
        self.done += weights
        if self.reader.read_bytes - self.read >= SYNC_BYTES or time.monotonic() - self.time >= SYNC_SECONDS:
            self.now()

    def now(self) -> None:
        if self.done > self.partial.done:
            self.partial.record(self.done, self._news())
        self.read, self.time = self.reader.read_bytes, time.monotonic()

    def _news(self) -> dict | None:
        def new(counts: dict[str, int], what: str) -> dict[str, int]:
            old = self.noted.setdefault(what, {})
            out = {k: n for k, n in counts.copy().items() if k not in old}        # other threads go on counting
            old.update(out)
            return out
        rounded = new(self.reader.rounded, "rounded")
        converted = {fmt: new(counts, fmt) for fmt, counts in self.reader.converted.copy().items()}
        return {"rounded": rounded, "converted": converted} if rounded or any(converted.values()) else None


def ignored(checkpoint: Checkpoint, sources: dict[str, Source], patterns: Sequence[str]) -> dict[str, int]:
    """Pattern -> the tensors that were left out for it; of several patterns the first."""
    used = {n for s in sources.values() for n in (*s.layout.names, *s.layout.spare)}
    counts = dict.fromkeys(patterns, 0)
    for name in checkpoint.names:
        first = None if name in used else next((p for p in patterns if fnmatchcase(name, p)), None)
        if first is not None:
            counts[first] += 1
    return counts


def families(plan: Plan, sources: dict[str, Source], todo: Sequence[Unit]) -> dict[str, dict]:
    """Of each role: its parameters in the whole model, how the checkpoint keeps them, and how they are packed."""
    kept: dict[str, set[str]] = {}
    for s in sources.values():
        for p in s.expected.parts:
            kept.setdefault(p.role, set()).add(s.layout.dtype)
    packed: dict[str, set[str]] = {}
    for u in todo:
        for role in u.weight.roles:
            packed.setdefault(role, set()).add(u.format if u.weight.dtype == "bf16" else u.weight.dtype)
    return {role: {"parameters": n, "checkpoint": sorted(kept[role]), "packed": sorted(packed.get(role, ()))}
            for role, n in by_role(plan.spec.model).items()}


def pack_command(plan: Plan, from_dir: Path, out_dir: Path, convert: bool, force: bool, json: bool,
                 ignore: Sequence[str] = ()) -> dict:
    """`mkgen pack`: packs all ranks; a bar on stderr, on stdout the figures (`json`: one object), which it returns."""
    def say(line: str) -> None:
        print(line, file=sys.stderr)

    with bar(plan.spec.model.name, sys.stderr) as progress:
        try:
            figures = pack(plan, from_dir, out_dir, progress=progress, convert=convert, force=force, ignore=ignore, say=say)
        except KeyboardInterrupt:
            say(f"what is packed stays in {out_dir}.partial: the same command goes on with it")
            raise
    figures["verdict"] = "pass"
    print(_json(figures) if json else describe(figures))
    return figures


def describe(figures: dict) -> str:
    """The figures for a person."""
    published = figures["published"]
    told = {None: "", figures["parameters"]: " (as published)"}.get(published, f" (published: {published or 0:,})")
    lines = ["{model}: {parameters:,} parameters{told} in {tensors:,} tensors, packed for {ranks} ranks: {size:.3f} GB in "
             "{seconds:.1f} s".format(**figures, told=told, size=figures["bytes"] / 1e9),
             f"  layout {figures['layout_hash']}, {figures['out']}"]
    lines += [f"  ignored: {n:,} tensors {pattern}" for pattern, n in figures["ignored"].items() if n]
    for text, groups in (("bf16", figures["rounded_to_bf16"]), *figures["converted"].items()):
        lines += [f"  rounded to {text}: {n['values']:,} values of {n['tensors']:,} tensors {pattern}"
                  for pattern, n in groups.items()]
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
