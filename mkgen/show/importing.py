"""What `import-hf` says: what became of each key of the config."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mkgen import show
from mkgen.importing.importer import Imported, ImportRefused
from mkgen.importing.record import Record, shown


def imported(made: Imported, target: Path | None, as_json: bool) -> None:
    """The spec (where no file was asked for) and the account of the keys."""
    if as_json:
        show.put_json({"verdict": "pass", "config": made.file, "model_type": made.model_type, "out": target,
                       "parameters": made.parameters, "weight_bytes": made.build and made.build.bytes, **_record(made.record),
                       **({} if target else {"spec": made.text})})
        return
    if target is None:
        click.echo(made.text, nl=False)
        return
    out, record = show.console(), made.record
    t = show.table(f"{made.file}: {made.model_type}", "key", "value", "what became of it")
    for key, value in record.used.items():
        t.add_row(key, shown(value), "used")
    for key, (value, why) in record.defaults.items():
        t.add_row(key, shown(value), f"not in the config: {why or 'what its absence means'}")
    for key, why in record.ignored.items():
        t.add_row(key, "", f"ignored: {why}")
    out.print(t)
    size = f", {made.build.bytes / 1e9:,.1f} GB of weights" if made.build else ""
    out.print(f"{target}: {made.parameters:,} parameters{size}")


def refused(error: ImportRefused, as_json: bool) -> None:
    """All the reasons: on stderr, or as JSON."""
    if as_json:
        show.put_json({"verdict": "refused", "config": error.file, "model_type": error.model_type,
                       "refused": [{"key": r.key, "why": r.why, "fix": r.fix} for r in error.record.refused], **_record(error.record)})
        return
    click.echo(str(error), err=True)


def _record(record: Record) -> dict[str, Any]:
    return {"used": record.used, "defaults": {k: {"value": v, "why": why} for k, (v, why) in record.defaults.items()},
            "ignored": record.ignored}
