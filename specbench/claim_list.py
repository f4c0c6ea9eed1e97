"""The claims as a list to read: text, Markdown or JSON. What a claim needs is told as what a target has to expose."""

from __future__ import annotations

import json

from specbench.claims import CLAIMS
from specbench.loading import EXPOSE

NOTHING = "nothing but the harness"


def as_text() -> str:
    width = max((len(claim.id) for claim in CLAIMS.values()), default=0)
    return "\n".join(
        f"{claim.id:<{width}}  level {claim.level}  {claim.must}  [needs {', '.join(claim.needs) or NOTHING}]"
        for claim in CLAIMS.values()
    )


def as_markdown() -> str:
    """A table of claims, and below it what each need asks a target to expose."""
    lines = ["| claim | level | a correct decoder must | needs |", "|---|---|---|---|"]
    lines += [
        f"| `{claim.id}` | {claim.level} | {claim.must} | {', '.join(claim.needs) or NOTHING} |"
        for claim in CLAIMS.values()
    ]
    needs = dict.fromkeys(need for claim in CLAIMS.values() for need in claim.needs)
    return "\n".join([*lines, "", *(f"- `{need}`: {EXPOSE[need]}" for need in needs)])


def as_json() -> str:
    """`{"schema": 1, "claims": [{"id", "level", "must", "needs": {need: what to expose}, "look_at"}]}`."""
    claims = [
        {
            "id": claim.id,
            "level": claim.level,
            "must": claim.must,
            "needs": {need: EXPOSE[need] for need in claim.needs},
            "look_at": claim.look_at,
        }
        for claim in CLAIMS.values()
    ]
    return json.dumps({"schema": 1, "claims": claims}, indent=1)
