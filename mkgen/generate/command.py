"""`mkgen generate`: a prompt, decoded greedily by the generated kernel itself, weights and all."""
from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mkgen.errors import MkgenError
from mkgen.generate.checkpoint import find
from mkgen.generate.extras import need
from mkgen.plan.plan import Plan


def generate(plan: Plan, source: str, prompt: str, tokens: int, work: Path, on_tpu: bool, as_json: bool) -> dict:
    """Packs (once), writes the module, decodes, prints the text as it comes, and returns what was done.

    work: where the module and the packed weights are kept from call to call. Raises MkgenError for input that will not do."""
    folder = find(source, work)
    tokenizer = need("tokenizers", "cut a prompt into tokens").Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(prompt).ids
    context = plan.spec.build.context
    if not ids or len(ids) + tokens > context:
        raise MkgenError(f"the prompt has {len(ids)} tokens, and {tokens} are to follow\n  why: there must be at least one, and build.context "
                         f"holds {context}\n  fix: " + ("give a prompt" if not ids else "a shorter prompt, fewer --tokens or a larger --context"))
    module, packed = module_of(plan, work), packed_of(plan, folder, work)
    request = {"module": str(module), "packed": str(packed), "prompt": ids, "tokens": tokens, "stop": stops(folder),
               "interpret": not on_tpu}
    began, made = time.perf_counter(), []
    with bar(len(ids) + tokens - 1, plan.spec.model.name) as (advance, write):
        for line in steps(plan, request, on_tpu):
            if "position" in line:
                advance(line["position"] + 1)
                if line["position"] >= len(ids) - 1:
                    made.append(line["token"])
                    if not as_json:
                        write(prompt + tokenizer.decode(made))
    seconds = time.perf_counter() - began
    text = tokenizer.decode(made)
    figures = {"model": plan.spec.model.name, "prompt": prompt, "text": text, "prompt_ids": ids, "ids": made, "seconds": round(seconds, 2),
               "interpreted": not on_tpu, "verdict": "pass"}
    print(json.dumps(figures, indent=2, ensure_ascii=False) if as_json else
          f"{prompt}{text}\n\n{len(made)} tokens by {plan.spec.model.name}'s kernel on {plan.mesh.ranks} "
          f"{'TPU' if on_tpu else 'virtual'} core(s), {seconds:.0f} s{'' if on_tpu else ' (interpreted: no measure of speed)'}")
    return figures


def module_of(plan: Plan, work: Path) -> Path:
    from mkgen.emit.module import write_module
    write_module(plan, work / "module" / plan.spec.model.name)
    return work / "module" / plan.spec.model.name


def packed_of(plan: Plan, folder: Path, work: Path) -> Path:
    """The packed weights: those of an earlier call if layout and checkpoint are the same."""
    from mkgen.pack.write import bar as pack_bar
    from mkgen.pack.write import pack
    from mkgen.plan.layout import layout_hash
    out, mark = work / "packed", work / "packed.json"
    files = sorted(folder.glob("*.safetensors"))
    stamp = {"layout": layout_hash(plan), "checkpoint": [[str(f.resolve()), f.stat().st_size, f.stat().st_mtime_ns] for f in files]}
    if not (out.is_dir() and mark.is_file() and json.loads(mark.read_text()) == stamp):
        mark.unlink(missing_ok=True)
        with pack_bar(f"packing {plan.spec.model.name}", sys.stderr) as progress:
            pack(plan, folder, out, progress=progress, force=True)
        mark.write_text(json.dumps(stamp))
    return out


def stops(folder: Path) -> list[int]:
    """The ids that end a text, as the checkpoint's configs say."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            ids = json.loads(path.read_text()).get("eos_token_id")
            if ids is not None:
                return ids if isinstance(ids, list) else [ids]
    return []


def steps(plan: Plan, request: dict, on_tpu: bool) -> Iterator[dict]:
    """The worker's lines as they come. Raises MkgenError if it ends badly."""
    from mkgen.prove.verify import environment
    env = environment(plan.mesh.ranks)
    if on_tpu:
        env = {k: v for k, v in env.items() if k not in ("JAX_PLATFORMS", "TPU_SKIP_MDS_QUERY")}
    with tempfile.TemporaryFile("w+") as errors:
        worker = subprocess.Popen([sys.executable, "-m", "mkgen.generate.worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                  stderr=errors, text=True, env=env)
        try:
            worker.stdin.write(json.dumps(request))
            worker.stdin.close()
            yield from map(json.loads, worker.stdout)
        finally:
            worker.kill() if worker.poll() is None and sys.exc_info()[0] else worker.wait()
        if worker.returncode:
            errors.seek(0)
            raise MkgenError(f"the decoding process ended with {worker.returncode}:\n{errors.read()[-2000:]}")


@contextmanager
def bar(total: int, title: str):
    """(advance(steps), write(text)) on stderr; nothing is drawn where it is no terminal."""
    from rich.console import Console
    from rich import progress as rich
    columns = (rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn(),
               rich.TextColumn("{task.fields[text]}", markup=False))
    with rich.Progress(*columns, console=Console(file=sys.stderr), disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(title, total=total, text="")
        yield (lambda n: shown.update(task, completed=n)), (lambda text: shown.update(task, text=text[-60:].replace("\n", " ")))
