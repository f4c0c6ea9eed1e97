"""A violation as text: what and where, MUST, expected before actual, the tree, what it narrows to, how to replay it."""

from __future__ import annotations

from specbench.cases import Case
from specbench.claims import CLAIMS, Claim, Violation
from specbench.record import BUG, EQUAL, NOISE, RunRecord

MAX_SHOWN = 160


def render(violation: Violation, claim: Claim, case: Case, *, subject: str, run: RunRecord, command: str) -> str:
    """The whole message. command: what reproduces the case."""
    facts = violation.facts
    first = f"{type(violation).__name__}: {facts.headline}"
    lines = [f"{first}      [claim {claim.id}, level {claim.level}]", ""]
    lines += _entry("MUST", claim.must)
    prompt = getattr(case, "prompt", None)
    place = f"model {case.model}, cache {case.cache}, layout {case.layout}"
    if prompt is not None:
        lines += _entry("prompt", f"{_short(str(list(prompt)))}   {place}")
    lines += _entry("on", f"{subject}, seed {run.seed}, {run.environment.get('device', 'device cpu')}")
    lines += _entry("expected", f"{_short(facts.expected)}   {facts.source}")
    lines += _entry("actual", f"{_short(facts.actual)}   {run.target}")
    if facts.remark:
        lines += _entry("", f"^ {facts.remark}")
    if facts.tree is not None:
        drawing = facts.tree.draw(facts.notes).splitlines()
        if len(drawing) > 40:
            drawing = [*drawing[:38], f"... {len(drawing) - 38} more nodes"]
        lines += _entry("tree", drawing[0])
        lines += [" " * 12 + one for one in drawing[1:]]
    lines += _entry("narrower", narrow(claim, subject, run))
    lines += _entry("reproduce", command)
    return "\n".join(line.rstrip() for line in lines)


def narrow(claim: Claim, subject: str, run: RunRecord) -> str:
    """What the claims below this one said on the same subject, and where that leaves the fault."""
    holds: list[str] = []
    fails: list[Claim] = []
    for one in CLAIMS.values():
        if one.id == claim.id:
            break
        record = run.find(one.id, subject)
        if record and record.verdict in (EQUAL, NOISE):
            holds.append(one.id)
        elif record and record.verdict == BUG:
            fails.append(one)
    if fails:
        names = ", ".join(one.id for one in fails)
        return f"{names} FAILS{'' if len(fails) == 1 else ' (each)'}: look at {fails[0].look_at} first"
    if holds:
        return f"{', '.join(holds)} hold: look at {claim.look_at}"
    return f"no lower claim was tested: look at {claim.look_at}"


def _entry(label: str, text: str) -> list[str]:
    return [f"  {label:<10}{text}"]


def _short(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 20]} ... ({len(text)} characters)"
