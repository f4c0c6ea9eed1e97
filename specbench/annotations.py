"""Verdicts as GitHub workflow commands: `::error title=...::message`, one line each, escaped by GitHub's own rules.

GitHub shows ten errors and ten warnings of a step; what is beyond is counted in the last one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.record import BUG, ClaimRecord
from specbench.sanitize import plain

MAX_SHOWN = 10
MAX_MESSAGE = 1_000
MODES = ("auto", "on", "off")


def wanted(mode: str, environment: Mapping[str, str]) -> bool:
    """mode: auto, on or off; auto means in a GitHub workflow."""
    return mode == "on" or (mode == "auto" and environment.get("GITHUB_ACTIONS") == "true")


def annotation_lines(claims: Sequence[ClaimRecord], *, problems: list[str]) -> list[str]:
    """Lines to print: an error a BUG, a warning a known failure. problems: of the run as a whole (ledger, gate)."""
    errors = [("specbench", one) for one in problems]
    warnings = []
    for one in claims:
        where = f"{one.claim} on {one.subject}"
        if one.known:
            said = _first_line(one.message) or one.reason
            warnings.append((f"KNOWN {where}", f"{one.known}: {said}"))
        elif one.verdict == BUG:
            lines = one.message.splitlines()
            reproduce = next((line.strip() for line in lines if line.startswith("  reproduce ")), "")
            errors.append((f"BUG {where}", "\n".join([_first_line(one.message), *([reproduce] if reproduce else [])])))
    return [*_lines("error", errors), *_lines("warning", warnings)]


def command(kind: str, title: str, message: str) -> str:
    """One workflow command. A line break in the message is shown as one, and can start no command of its own."""
    return f"::{kind} title={_property(plain(title, 200, one_line=True))}::{_data(plain(message, MAX_MESSAGE))}"


def _lines(kind: str, found: list[tuple[str, str]]) -> list[str]:
    if len(found) > MAX_SHOWN:
        rest = len(found) - MAX_SHOWN + 1
        more = ("specbench", f"{rest} more like these: see the verdict table")
        found = [*found[: MAX_SHOWN - 1], more]
    return [command(kind, *one) for one in found]


def _first_line(message: str) -> str:
    return message.partition("\n")[0]


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
