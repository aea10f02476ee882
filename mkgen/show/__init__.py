"""What the commands print: tables for a person, one JSON object for a program. Every function takes finished data."""
from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_WIDTH = 132                                 # columns where there is no terminal to ask
STYLES = {"pass": "green", "fail": "bold red", "skipped": "yellow"}


def console() -> Console:
    """Where tables go. Markup is off: shapes are written in square brackets."""
    out = Console(markup=False, highlight=False, emoji=False)
    if not out.is_terminal:
        out.width = PIPE_WIDTH
    return out


def table(title: str, *columns: str) -> Table:
    """A table whose columns are named; a name that begins with '>' is aligned to the right."""
    made = Table(title=Text(title, "bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in columns:
        right = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return made


def put_json(value: Any) -> None:
    """One JSON object on stdout. Numbers and paths of other libraries become plain ones."""
    print(json.dumps(value, indent=2, default=lambda x: x.item() if hasattr(x, "item") else str(x)))


def verdict(good: bool) -> str:
    return "pass" if good else "fail"


def coloured(word: str) -> Text:
    """A verdict in its colour."""
    return Text(word, STYLES.get(word.split(" ")[0].rstrip(":"), ""))


def several(n: int, what: str) -> str:
    """`1 row`, `8 rows`."""
    return f"{n:,} {what}{'s' * (n != 1)}"


def number(n: float) -> str:
    return f"{n:,.0f}"


def mib(n: float) -> str:
    return f"{n / 2**20:,.2f}"


def percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f}" if whole else "0.00"
