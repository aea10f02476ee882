"""Names in printed Python: what a piece of straight code needs, what it makes, and which definitions stand behind it."""
from __future__ import annotations

import ast
import builtins
import textwrap
from functools import lru_cache


@lru_cache(maxsize=65536)
def names(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(read before they are bound, bound) at the outer level of straight code; builtins are left out."""
    free: dict[str, None] = {}
    bound: dict[str, None] = {}

    def take(nodes: list[ast.AST]) -> None:
        """Nodes in the order in which they run."""
        for node in nodes:
            if isinstance(node, (ast.For, ast.If, ast.With)):
                heads = {ast.For: ("iter", "target"), ast.If: ("test",), ast.With: ("items",)}[type(node)]
                for head in (getattr(node, h) for h in heads):
                    take(head if isinstance(head, list) else [head])
                take(node.body)
                take(getattr(node, "orelse", []))
                continue
            for name in sorted(loads(node)):
                if name not in bound and not hasattr(builtins, name):
                    free.setdefault(name)
            for name in sorted(stores(node)):
                bound.setdefault(name)

    take(ast.parse(text).body)
    return tuple(free), tuple(bound)


def loads(node: ast.AST) -> set[str]:
    """Names that a node reads from around it."""
    if isinstance(node, (ast.Lambda, ast.FunctionDef)):
        a = node.args
        own = {p.arg for p in (*a.args, *a.kwonlyargs, *a.posonlyargs, *filter(None, (a.vararg, a.kwarg)))}
        inside = node.body if isinstance(node.body, list) else [node.body]
        outer = set().union(*(loads(d) for d in (*a.defaults, *filter(None, a.kw_defaults))), set())
        local = own | set().union(*(stores(n) for n in inside), set())
        return outer | set().union(*(loads(n) for n in inside), set()) - local
    if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
        own = {n.id for g in node.generators for n in ast.walk(g.target) if isinstance(n, ast.Name)}
        return set().union(*(loads(n) for n in ast.iter_child_nodes(node)), set()) - own
    if isinstance(node, ast.Name):
        return {node.id} if isinstance(node.ctx, ast.Load) else set()
    found = set().union(*(loads(n) for n in ast.iter_child_nodes(node)), set())
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        found.add(node.target.id)
    return found


def stores(node: ast.AST) -> set[str]:
    """Names that a node binds around it."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
        return set()
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    return set().union(*(stores(n) for n in ast.iter_child_nodes(node)), set())


class Definitions:
    """The top level of a kernel's source: each name's statement, and what it mentions."""

    def __init__(self, source: str):
        self.source = source
        self.tree = ast.parse(source)
        self.owner: dict[str, int] = {}
        self.statements = [n for n in self.tree.body if not isinstance(n, ast.Expr)]
        for i, statement in enumerate(self.statements):
            found = stores(statement)
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                found = {a.asname or a.name.split(".")[0] for a in statement.names}
            for name in found:
                self.owner[name] = i
        self.texts: dict[int, tuple[str, set[str]]] = {}
        self.closures: dict[int, set[int]] = {}

    def text(self, i: int) -> tuple[str, set[str]]:
        """A statement without comments and layout, and the top-level names in it."""
        if i not in self.texts:
            mentioned = {n.id for n in ast.walk(self.statements[i]) if isinstance(n, ast.Name)}
            self.texts[i] = ast.unparse(self.statements[i]), {n for n in mentioned if n in self.owner}
        return self.texts[i]

    def behind(self, text: str) -> list[str]:
        """The statements that `text` rests on, directly or not, in the order of the source."""
        wanted: set[int] = set()
        for name in mentioned(text):
            if name in self.owner:
                wanted |= self.closure(self.owner[name])
        return [self.text(i)[0] for i in sorted(wanted)]

    def closure(self, i: int) -> set[int]:
        """Statement i and all that it rests on."""
        if i not in self.closures:
            found, queue = set(), [i]
            while queue:
                n = queue.pop()
                if n not in found:
                    found.add(n)
                    queue += [self.owner[name] for name in self.text(n)[1]]
            self.closures[i] = found
        return self.closures[i]

    def body(self, function: str) -> list[str]:
        """The statements of a function, each as text."""
        node = self.statements[self.owner[function]]
        return [ast.unparse(n) for n in node.body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]


@lru_cache(maxsize=65536)
def mentioned(text: str) -> frozenset[str]:
    """All names in a text."""
    return frozenset(n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name))


def indent(text: str, depth: int) -> str:
    return textwrap.indent(text, "    " * depth)
