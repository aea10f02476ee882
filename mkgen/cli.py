"""The command line. A command loads what it needs, calls one function of a stage, and shows what came back."""
from __future__ import annotations

import os
import time
from pathlib import Path

import click

from mkgen.cli_base import Guarded, Asked, debug_option, finish, finish_input, spec_options, steps_option
from mkgen.commands.report import report, trace
from mkgen.commands.check import check
from mkgen.commands.simulate import profile, simulate
from mkgen.commands.tune import tune


def _version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from importlib import metadata
        try:
            text = metadata.version("mkgen")
        except metadata.PackageNotFoundError:
            text = "(not installed)"
        click.echo(f"mkgen {text}")
        ctx.exit()


@click.group(cls=Guarded, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
@debug_option
def main() -> None:
    """One YAML file that describes a language model to one Pallas program that decodes with it.

    SPEC is that file. Exit codes: 0 good, 1 a verdict is bad, 2 the input is wrong, 3 a defect of mkgen.
    """


@main.command()
@spec_options
@click.option("-o", "--out", type=click.Path(file_okay=False), metavar="DIR",
              help="Where to write; generated/<name> if not given.")
def build(asked: Asked, out: str | None) -> None:
    """Write the generated module, after the checker has passed its plan."""
    began = time.perf_counter()
    plan = asked.plan()
    from mkgen.check import check_plan
    from mkgen.show import build as show
    findings = list(check_plan(plan))
    target = Path(out) if out else Path("generated") / plan.spec.model.name
    if findings:
        show.refused(plan, target, findings, asked.json)
        finish(False)
    from mkgen.emit.module import write_module
    files = write_module(plan, target)
    show.built(plan, target, files, time.perf_counter() - began, asked.json)


@main.command()
@spec_options
def plan(asked: Asked) -> None:
    """Show the plan: memory, tape, bytes a step, loop nest, collectives, floor time."""
    made = asked.plan()
    from mkgen.check import check_plan
    from mkgen.plan.figures import figures
    from mkgen.show import plan as show
    findings = list(check_plan(made))
    show.plan(made, {rows: figures(made, rows) for rows in made.spec.build.rows}, findings, asked.json)
    finish(not findings)


@main.command("compile")
@spec_options
@steps_option
def compile_(asked: Asked, steps: int) -> None:
    """Compile every row variant for the chip at full size, without having one."""
    made = asked.plan()
    from mkgen.prove.compile import compile_spec
    from mkgen.show import prove as show
    finish(show.compiled(made, compile_spec(made, steps=steps), asked.json))


@main.command()
@spec_options
def verify(asked: Asked) -> None:
    """Run a mini model of the same spec against the reference, rung by rung."""
    spec = asked.spec()
    from mkgen.prove.verify import verify_spec
    from mkgen.show import prove as show
    finish(show.verified(spec, verify_spec(spec), asked.json))


@main.command()
@spec_options
@click.option("--from", "from_dir", required=True, type=click.Path(exists=True, file_okay=False), metavar="DIR",
              help="The checkpoint.")
@click.option("--logits", "recorded", required=True, type=click.Path(exists=True, dir_okay=False), metavar="FILE",
              help="An .npz with input_ids [B, T] and logits [B, T, vocab] of the model's own code, in float32.")
@click.option("--bound", type=float, help="Largest |difference| allowed; 0.01 % of the largest logit if not given.")
def compare(asked: Asked, from_dir: str, recorded: str, bound: float | None) -> None:
    """Hold the spec's reference, in float32, against logits recorded from the model's own code."""
    spec = asked.spec()
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1")     # float32 as it is meant; no chip is looked for
    from mkgen.prove.against import compare as run
    from mkgen.show import prove as show
    with show.counting(spec.model.name) as tell:
        found = run(spec, Path(from_dir), Path(recorded), bound, tell)
    show.compared(spec, found, asked.json)
    finish(found.good)


@main.command()
@spec_options
@click.option("--from", "from_dir", required=True, type=click.Path(exists=True, file_okay=False), metavar="DIR",
              help="Where the safetensors of the checkpoint are.")
@click.option("--out", "out_dir", required=True, type=click.Path(file_okay=False), metavar="DIR",
              help="Where each rank's tape and experts are written.")
@click.option("--convert", is_flag=True, help="Re-encode tensors that are not in the build's format.")
@click.option("--force", is_flag=True, help="Write over what --out holds.")
@click.option("--ignore", multiple=True, metavar="PATTERN",
              help="Tensors that may be in the checkpoint unused, beside model.ignore: 'vision_tower.*'. Repeatable.")
def pack(asked: Asked, from_dir: str, out_dir: str, convert: bool, force: bool, ignore: tuple[str, ...]) -> None:
    """Turn a checkpoint into each rank's tape and expert image."""
    made = asked.plan()
    from mkgen.pack.write import pack_command
    figures = pack_command(made, Path(from_dir), Path(out_dir), convert, force, asked.json, ignore)
    finish(figures["verdict"] == "pass")


@main.command()
@spec_options
@click.option("--from", "source", required=True, metavar="WHERE",
              help="The checkpoint: a folder with safetensors and tokenizer.json, a .gguf file, or python:PACKAGE that ships one.")
@click.option("--prompt", required=True, metavar="TEXT", help="What the text begins with.")
@click.option("--tokens", default=16, show_default=True, type=click.IntRange(min=1), metavar="N", help="How many to add at most.")
@click.option("--work", type=click.Path(file_okay=False), metavar="DIR",
              help="Where module and packed weights are kept; build/generate/<name> if not given.")
@click.option("--tpu", is_flag=True, help="Run on the chips of this machine instead of interpreting the kernel.")
def generate(asked: Asked, source: str, prompt: str, tokens: int, work: str | None, tpu: bool) -> None:
    """Continue a prompt with the generated kernel, greedily; without a TPU it is interpreted."""
    made = asked.plan()
    from mkgen.generate.command import generate as run
    run(made, source, prompt, tokens, Path(work or f"build/generate/{made.spec.model.name}"), tpu, asked.json)


@main.command("import-hf")
@click.argument("config", type=click.Path())
@click.option("-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Where the spec goes; if not given, it is printed.")
@click.option("--name", metavar="NAME", help="The model's name; the file's name if not given.")
@click.option("--given", multiple=True, metavar="KEY=VALUE",
              help="Say what the config does not: --given layer_types='(sliding_attention*5 full_attention)*8'. Repeatable.")
@click.option("--ignore", multiple=True, metavar="KEY", help="A key of the config that the decoder does not need. Repeatable.")
@click.option("--model-only", is_flag=True, help="Write no build section.")
@click.option("--chip", default="tpu7x", metavar="NAME", help="The chip of the build section.")
@click.option("--force", is_flag=True, help="Write over an existing FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
@debug_option
def import_hf(config: str, out: str | None, name: str | None, given: tuple[str, ...], ignore: tuple[str, ...], model_only: bool,
              chip: str, force: bool, as_json: bool) -> None:
    """Write the spec of a Hugging Face CONFIG (config.json, or its folder), or say why it cannot be one.

    Every key of the config is used, known to be of no consequence, or refused; all reasons come at once.
    """
    from mkgen.importing import ImportRefused, import_hf as run
    from mkgen.importing.importer import identifier
    from mkgen.show import importing as show
    target = Path(out) if out else None
    if target and target.exists() and not force:
        raise click.UsageError(f"{target} exists; --force writes over it")
    try:
        made = run(config, name or (identifier(target.stem) if target else None), given, ignore, model_only, chip)
    except ImportRefused as refused:
        show.refused(refused, as_json)
        finish_input()
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(made.text, encoding="utf-8")
    show.imported(made, target, as_json)


@main.command()
@click.argument("specs", nargs=-1, type=click.Path(exists=True))
@click.option("--compile/--no-compile", "compile_too", default=True, help="Whether the TPU compiler is run as well; it takes most of the time.")
@click.option("-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Write the page here instead of printing it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list instead of a page.")
@debug_option
def table(specs: tuple[str, ...], compile_too: bool, out: str | None, as_json: bool) -> None:
    """Build, plan, check and compile many specs, by default all of model_specs/, and show what each comes to."""
    from mkgen.show import models
    paths = [Path(s) for s in specs] or list(Path("model_specs").glob("*.yaml"))
    finish(models.make(paths, compile_too, Path(out) if out else None, as_json))


main.add_command(report)
main.add_command(trace)
main.add_command(check)
main.add_command(profile)
main.add_command(simulate)
main.add_command(tune)

if __name__ == "__main__":
    main()
