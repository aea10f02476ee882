"""What `build` says."""
from __future__ import annotations

from pathlib import Path

from mkgen import show
from mkgen.plan.layout import layout_hash
from mkgen.plan.plan import Plan


def built(made: Plan, directory: Path, files: list[Path], seconds: float, as_json: bool) -> None:
    """The files that were written, with their lines; seconds: from the start of the command."""
    lines = {str(p): len(p.read_bytes().splitlines()) for p in files}
    code = sum(n for name, n in lines.items() if name.endswith(".py"))
    if as_json:
        show.put_json({"verdict": "pass", "out": directory, "files": lines, "lines": code,
                       "layout_hash": layout_hash(made), "seconds": round(seconds, 3)})
        return
    t = show.table(f"{made.spec.model.name} for {made.target.name}", "written", ">lines")
    for name, n in lines.items():
        t.add_row(name, show.number(n))
    out = show.console()
    out.print(t)
    out.print(f"{code:,} lines of Python, layout {layout_hash(made)}, {seconds:.2f} s")
    out.print("verdict of the checker:", show.coloured("pass"))


def refused(made: Plan, directory: Path, findings: list, as_json: bool) -> None:
    """Nothing was written, because the checker found something."""
    if as_json:
        show.put_json({"verdict": "fail", "out": directory, "files": {}, "findings": [str(f) for f in findings]})
        return
    listed(made, findings)
    show.console().print(f"{directory}: nothing was written")


def listed(made: Plan, findings: list) -> None:
    """Findings one a line, then the verdict."""
    out = show.console()
    for finding in findings:
        out.print(f"finding: {finding}")
    rows, count = ", ".join(map(str, made.spec.build.rows)), show.several(len(findings), "finding")
    out.print(f"{made.spec.model.name}, rows {rows}: {count}; verdict of the checker:",
              show.coloured(show.verdict(not findings)))
