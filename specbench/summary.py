"""A run as Markdown for a job summary: counts, the table, each BUG folded away, what is known, what was not tested.

Whatever comes from a target is text here: no HTML, no links, and no fence that it could close.
"""

from __future__ import annotations

import re
from pathlib import Path

from specbench.record import BUG, EQUAL, KNOWN, NOISE, NOT_TESTED, RunRecord, known_lines, not_tested_lines, table_rows
from specbench.sanitize import plain

# GitHub refuses a step's summary beyond a megabyte: these keep it well below.
MAX_BUGS = 20
MAX_MESSAGE = 6_000
MAX_LINES = 50
_SPECIAL = re.compile(r"[&<>|`*_~\[\]\\#@$:]")


def markdown(run: RunRecord, *, problems: list[str], command: str) -> str:
    """problems: sentences about the run as a whole. command: what repeats it."""
    cells = [("KNOWN" if one.known else one.verdict) for one in run.claims]
    counts = ", ".join(
        f"{cells.count(name)} {name}" for name in (BUG, KNOWN, NOISE, EQUAL, NOT_TESTED) if name in cells
    )
    lines = [f"## specbench: {inline(run.target)}", "", f"{counts or 'nothing was judged'} ({len(cells)} cells)", ""]
    lines += [f"- **{inline(one)}**" for one in problems]
    lines += [""] if problems else []
    lines += _table(run)
    bugs = [one for one in run.claims if one.verdict == BUG and not one.known]
    for one in bugs[:MAX_BUGS]:
        lines += _details(f"BUG {one.claim} on {one.subject}", one.message)
    if len(bugs) > MAX_BUGS:
        lines += [f"{len(bugs) - MAX_BUGS} more BUG cells: see the table and the run record.", ""]
    for found in (known_lines(run), not_tested_lines(run)):
        lines += [f"- {inline(one)}" for one in found[:MAX_LINES]]
        lines += [f"- and {len(found) - MAX_LINES} more"] if len(found) > MAX_LINES else []
        lines += [""] if found else []
    lines += [f"Seed {run.seed}, profile {inline(run.profile)}, specbench {inline(run.version)}. To repeat it:", ""]
    lines += [*fenced(command), ""]
    return "\n".join(lines)


def append(path: Path, text: str) -> None:
    """Behind what other steps wrote. OSError when it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{text}\n")


def inline(text: str) -> str:
    """Text inside a line or a table cell: every character that Markdown or HTML could read is written as an entity."""
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", plain(text, 500, one_line=True))


def fenced(text: str) -> list[str]:
    """A code block whose fence is longer than any run of backticks inside."""
    body = plain(text, MAX_MESSAGE)
    longest = max((len(one) for one in re.findall(r"`+", body)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}text", *body.splitlines(), fence]


def _table(run: RunRecord) -> list[str]:
    rows = table_rows(run)
    if len(rows) == 1:
        return []
    lines = ["| " + " | ".join(inline(cell) for cell in row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:], ""]


def _details(title: str, message: str) -> list[str]:
    return [f"<details><summary>{inline(title)}</summary>", "", *fenced(message), "", "</details>", ""]
