"""Breaks what `ruff format` leaves alone: comments and docstrings that a long name, or a wide number, made too long."""
from __future__ import annotations

import ast
import io
import tokenize

COLUMNS = 100                            # of a line of generated Python


def wrap(text: str, columns: int = COLUMNS) -> str:
    """`text` with its overlong comments and docstring lines broken; a comment behind code goes in front of it. Code stays as it is."""
    lines = text.split("\n")
    if all(len(line) <= columns for line in lines):
        return text
    texts = docstring_lines(text)
    starts = comment_starts(text)
    out, rest = [], ""                   # rest: of the docstring's paragraph, not yet on a line
    for n, line in enumerate(lines, 1):
        if n in texts:
            if rest and joins(line, rest):
                line, rest = f"{rest} {line.strip()}", ""
            elif rest:
                out, rest = [*out, rest], ""
            *whole, last = broken(line, columns, indent_of(line))
            if whole and n < texts[n]:
                out, rest = [*out, *whole], last
            else:
                out += [*whole, last]
        elif len(line) > columns and n in starts:
            at = starts[n]
            code, comment = line[:at].rstrip(), line[at:]
            out += broken(indent_of(line) + comment, columns, indent_of(line) + "# ")
            out += [code] if code.strip() else []
        else:
            out.append(line)
    return "\n".join(out)


def long_lines(files: dict[str, str], columns: int = COLUMNS) -> list[str]:
    """What is still too long in the Python files, a line each: a name that stands alone can be as long as it likes."""
    return [f"{name}:{n} has {len(line)} columns: {line.strip()}" for name, text in files.items() if name.endswith(".py")
            for n, line in enumerate(text.split("\n"), 1) if len(line) > columns]


def indent_of(line: str) -> str:
    return line[:len(line) - len(line.lstrip())]


def joins(line: str, rest: str) -> bool:
    """Does `line` go on with the paragraph whose end is `rest`?"""
    return bool(line.strip()) and indent_of(line) == indent_of(rest)


def broken(line: str, columns: int, indent: str) -> list[str]:
    """The line cut at spaces into lines of at most `columns`, the further ones behind `indent`; a word is never cut."""
    out = []
    while len(line) > columns:
        first = len(indent_of(line)) + (2 if line.lstrip().startswith("# ") else 0)
        at = line.rfind(" ", first, columns + 1)
        at = at if at > first else line.find(" ", columns)
        if at < 0:
            break
        out.append(line[:at].rstrip())
        line = indent + line[at:].lstrip()
    return [*out, line]


def docstring_lines(text: str) -> dict[int, int]:
    """Line -> last line of the docstring that it is in."""
    out = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node, clean=False) is not None:
            first, last = node.body[0].lineno, node.body[0].end_lineno
            out.update((n, last) for n in range(first, last + 1))
    return out


def comment_starts(text: str) -> dict[int, int]:
    """Line -> column where its comment begins."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0]: t.start[1] for t in tokens if t.type == tokenize.COMMENT}
