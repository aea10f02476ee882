"""Leaves out what a printed module does not use, so that the templates' helpers need no conditions around them."""
from __future__ import annotations

import ast


def prune(text: str, roots: set[str]) -> str:
    """`text` without the top-level functions, classes, single constants and imports that nothing reachable from `roots`, or from
    any other top-level statement, mentions. Comments and all other lines stay as they are."""
    body = ast.parse(text).body
    owned = {name: node for node in body for name in defined(node)}
    wanted, queue = set(), [n for node in body if not defined(node) for n in mentioned(node)] + sorted(roots)
    while queue:
        name = queue.pop()
        if name in owned and name not in wanted:
            wanted.add(name)
            queue += mentioned(owned[name])
    drop: set[int] = set()
    for node in body:
        if defined(node) and not wanted & set(defined(node)):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            drop |= set(range(first, node.end_lineno + 1))
    return "".join(line for n, line in enumerate(text.splitlines(keepends=True), 1) if n not in drop)


def defined(node: ast.stmt) -> list[str]:
    """The names that a statement makes, if it may be left out."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return [node.targets[0].id]
    if isinstance(node, (ast.Import, ast.ImportFrom)) and getattr(node, "module", "") != "__future__":
        return [a.asname or a.name.split(".")[0] for a in node.names]
    return []


def mentioned(node: ast.AST) -> list[str]:
    return [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
