"""What `mkgen check` says."""

from __future__ import annotations

from mkgen import show
from mkgen.plan.plan import Plan


def checked(made: Plan, findings: list, examined: dict, traced, as_json: bool) -> None:
    """findings: of the plan. examined: `check.examined`. traced: a `CodeCheck`, or None if the code was not looked at."""
    code = [] if traced is None else traced.findings
    good = not findings and not code
    if as_json:
        told = {
            "verdict": show.verdict(good),
            "findings": [str(f) for f in [*findings, *code]],
            "plan": {"verdict": show.verdict(not findings), **examined, "findings": [vars(f) for f in findings]},
        }
        if traced is not None:
            told["code"] = {
                "verdict": show.verdict(not code),
                "moves": traced.moves,
                "accesses": traced.accesses,
                "runs": len(traced.runs),
                "ranks": traced.ranks,
                "messages": traced.messages,
                "seconds": round(traced.seconds, 3),
                "findings": [vars(f) for f in code],
            }
        show.put_json(told)
        return
    out = show.console()
    t = show.table(
        f"{made.spec.model.name}, rows {', '.join(map(str, made.spec.build.rows))}",
        "rule",
        "what must hold",
        ">findings",
    )
    for rule, text in examined["rules"].items():
        count = sum(f.rule == rule for f in findings)
        t.add_row(rule, text, show.number(count) if count else "")
    for rule in dict.fromkeys(f.rule for f in [*findings, *code] if f.rule not in examined["rules"]):
        t.add_row(rule, "", show.number(sum(f.rule == rule for f in [*findings, *code])))
    out.print(t)
    for finding in [*findings, *code]:
        out.print(f"finding: {finding}", markup=False)
    runs, layers = show.several(examined["scenarios"], "scenario"), examined["layers"]
    out.print(
        f"plan: {runs} of {show.several(layers, 'layer')} (every kind behind every kind that it follows):",
        f"{show.several(len(findings), 'finding')},",
        show.coloured(show.verdict(not findings)),
    )
    if traced is not None:
        out.print(
            f"code: {traced.told}, {traced.seconds:.1f} s: {show.several(len(code), 'finding')},",
            show.coloured(show.verdict(not code)),
        )
    elif findings:
        out.print("code: not looked at, its plan is not sound")
    out.print("verdict of the checker:", show.coloured(show.verdict(good)))
