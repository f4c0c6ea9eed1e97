"""A violation as text: what and where, MUST, expected before actual, the tree, what it narrows to, how to replay it."""

from __future__ import annotations

from specbench.cases import AttentionCase, Case
from specbench.claims import CLAIMS, Claim, Violation
from specbench.record import BUG, EQUAL, NOISE, RunRecord
from specbench.sanitize import plain

MAX_SHOWN = 160
MAX_HEADLINE = 300
MAX_NAMED = 8


def render(
    violation: Violation,
    claim: Claim,
    case: Case,
    *,
    subject: str,
    run: RunRecord,
    command: str,
    likely: str = "",
) -> str:
    """The whole message. command: what reproduces the case. likely: which fault it may be, "" where nobody looked."""
    facts = violation.facts
    first = f"{type(violation).__name__}: {plain(facts.headline, MAX_HEADLINE, one_line=True)}"
    lines = [f"{first}      [claim {claim.id}, level {claim.level}]", ""]
    lines += _entry("MUST", claim.must)
    prompt = getattr(case, "prompt", None)
    place = f"model {case.model}, cache {case.cache}, layout {case.layout}"
    if prompt is not None:
        lines += _entry("prompt", f"{_short(str(list(prompt)))}   {place}")
    if isinstance(case, AttentionCase):
        lines += _entry("inputs", case.described)
        lines += _entry("parents", _short(" and ".join(str(list(one)) for one in case.trees)))
    lines += _entry("on", f"{subject}, seed {run.seed}, {run.environment.get('device', 'device cpu')}")
    lines += _entry("expected", f"{_short(facts.expected)}   {_short(facts.source)}")
    lines += _entry("actual", f"{_short(facts.actual)}   {plain(run.target, MAX_HEADLINE, one_line=True)}")
    if facts.remark:
        lines += _entry("", f"^ {plain(facts.remark, MAX_HEADLINE, one_line=True)}")
    if facts.tree is not None:
        notes = {node: plain(note, MAX_SHOWN, one_line=True) for node, note in facts.notes.items()}
        drawing = facts.tree.draw(notes).splitlines()
        if len(drawing) > 40:
            drawing = [*drawing[:38], f"... {len(drawing) - 38} more nodes"]
        lines += _entry("tree", drawing[0])
        lines += [" " * 12 + one for one in drawing[1:]]
    lines += _entry("narrower", narrow(claim, subject, run))
    if likely:
        lines += _entry("likely", likely)
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
        names = ", ".join([*(one.id for one in fails[:MAX_NAMED]), *_rest(len(fails) - MAX_NAMED)])
        return f"{names} FAILS{'' if len(fails) == 1 else ' (each)'}: look at {fails[0].look_at} first"
    if holds:
        named = ", ".join([*holds[-MAX_NAMED:], *_rest(len(holds) - MAX_NAMED)])  # the nearest narrow the most
        return f"{named} hold: look at {claim.look_at}"
    return f"no lower claim was tested: look at {claim.look_at}"


def _rest(count: int) -> list[str]:
    return [f"{count} more"] if count > 0 else []


def _entry(label: str, text: str) -> list[str]:
    return [f"  {label:<10}{text}"]


def _short(text: str) -> str:
    text = plain(text, 100_000, one_line=True)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 20]} ... ({len(text)} characters)"
