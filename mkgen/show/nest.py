"""The loop nest and the exchanges of a plan, read off its region trees."""
from __future__ import annotations

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from mkgen import show
from mkgen.plan.plan import Plan, Region
from mkgen.plan.regions import Branch, Collective, Loop, Node, Seq, advances


def runs(made: Plan) -> dict[str, int]:
    """How many times each sub-layer runs in a step."""
    out: dict[str, int] = {name: 0 for name in made.regions}
    for _, region in made.sequence():
        out[region.name] += 1
    return out


def trips(loop: Loop) -> int:
    """Turns of a loop; the largest number where it depends on data, one where that is not known."""
    return int(loop.trips) if loop.trips.isdigit() else loop.bound or 1


def collectives(made: Plan) -> dict[tuple[str, str, str, int], tuple[int, int]]:
    """(sub-layer, kind, factor, bytes sent a row) -> (how many each time it runs, runs in a step), in order."""
    out: dict[tuple[str, str, str, int], tuple[int, int]] = {}
    times = runs(made)

    def visit(region: Region, node: Node, turns: int) -> None:
        if isinstance(node, Collective) and node.part == "start":
            key = (region.name, node.told, node.stage, node.peers * node.message_bytes(1))
            count, layers = out.get(key, (0, times[region.name]))
            out[key] = count + turns, layers
        for child in children(node):
            visit(region, child, turns * (trips(node) if isinstance(node, Loop) else 1))

    for region in ordered(made):
        visit(region, region.body, 1)
    return out


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Loop):
        return node.body
    if isinstance(node, Branch):
        return tuple(case for _, case in node.cases)
    return node.nodes if isinstance(node, Seq) else ()


def ordered(made: Plan) -> list[Region]:
    """Regions in the order of execution."""
    order = {"begin": 0, "mixer": 1, "ffn": 2, "end": 3}
    return sorted(made.regions.values(), key=lambda r: order[r.role])


def nest(out: Console, made: Plan) -> None:
    """Prints the whole step as one tree: the ends, the layer loop, a branch for each kind, and the loops inside."""
    model, times = made.spec.model, runs(made)
    root = Tree(Text(f"Loop nest: mixer {model.mixer}; ffn {model.ffn}", "bold"))
    layers = None
    for region in ordered(made):
        parent = root
        if region.role in ("mixer", "ffn"):
            if layers is None:
                layers = root.add(f"for layer in range({len(made.graph.layers)}): one mixer, one ffn, "
                                  "each a branch on the layer's kind")
            parent = layers
        chunks = len(region.chunks)
        count = f", {show.several(times[region.name], 'layer')}" if parent is layers else ""
        size = f"{show.several(chunks, 'chunk')}, {region.rows * 512:,} bytes" if chunks else "nothing of the tape"
        label = f"{region.role} {region.name}{count}: {size}" if parent is layers else f"{region.name}: {size}"
        loops(parent.add(label), region.body)
    out.print(root)


def loops(tree: Tree, node: Node) -> None:
    """Adds the loops and branches below a node; straight-line work is left out."""
    for child in children(node):
        if isinstance(child, Loop):
            inside = sum(advances(n) for n in child.body)
            bound = f", at most {child.bound}" if child.bound is not None and not child.trips.isdigit() else ""
            notes = [n for n in (f"{show.several(inside, 'chunk')} a turn" if inside else "", child.doc) if n]
            text = f"for {child.var} in range({child.trips}){bound}" + (f": {child.name}" if child.name else "")
            text += f" ({'; '.join(notes)})" if notes else ""
            loops(tree.add(text), child)
        elif isinstance(child, Branch):
            branch = tree.add(f"branch on {child.selector}")
            for name, case in child.cases:
                loops(branch.add(name), case)
        else:
            loops(tree, child)
