"""Known failures: a JSON file that names claims and subjects that are known to fail, each with its issue.

A known failure is judged and reported as known, never as passed; an entry that no longer fails makes the run fail, so
that the file cannot rot. A quarantined one is not judged at all, and counts as NOT TESTED.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from specbench.claims import CLAIMS
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, RunRecord
from specbench.strict_json import read_json

MAX_BYTES = 1_000_000
MAX_ENTRIES = 1_000
MODES = ("run", "quarantine")
FIELDS = ("claim", "subject", "issue", "mode", "why")
_ISSUE = re.compile(
    r"https?://[!-~]{3,200}|([\w.-]{1,40}/[\w.-]{1,60})?#[0-9]{1,9}|[A-Z][A-Z0-9_]{0,19}-[0-9]{1,9}", re.ASCII
)
_PATTERN = re.compile(r"[\w.*?\[\]!@+-]{1,100}", re.ASCII)
MAX_WHY = 300


@dataclass(frozen=True)
class Entry:
    """One known failure. claim, subject: globs. number: its place in the file, from 0."""

    number: int
    claim: str
    subject: str
    issue: str
    mode: str
    why: str

    def covers(self, claim: str, subject: str) -> bool:
        return fnmatchcase(claim, self.claim) and fnmatchcase(subject, self.subject)

    @property
    def quarantined(self) -> bool:
        return self.mode == "quarantine"

    @property
    def reason(self) -> str:
        """Why a quarantined claim is not judged."""
        return f"quarantined by the ledger, {self.issue}: {self.why}" if self.why else f"quarantined, {self.issue}"


@dataclass(frozen=True)
class Ledger:
    """The entries of one file. path: as given."""

    path: str = ""
    entries: tuple[Entry, ...] = ()

    def find(self, claim: str, subject: str) -> Entry | None:
        return next((one for one in self.entries if one.covers(claim, subject)), None)

    def check_subjects(self, subjects: Sequence[str]) -> None:
        """ValueError for an entry that speaks of no subject of the run, or of what another entry speaks of already."""
        for one in self.entries:
            if not any(fnmatchcase(name, one.subject) for name in subjects):
                near = difflib.get_close_matches(one.subject, subjects, n=3, cutoff=0.75)
                hint = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(subjects)}"
                raise ValueError(f"{self._at(one)}: subject {one.subject!r} matches no subject of this run; {hint}")
        taken: dict[tuple[str, str], Entry] = {}
        for one in self.entries:
            for cell in ((claim, subject) for claim in CLAIMS for subject in subjects if one.covers(claim, subject)):
                if cell in taken:
                    raise ValueError(
                        f"{self._at(one)}: {cell[0]} on {cell[1]} is spoken of by entries[{taken[cell].number}] already"
                    )
                taken[cell] = one

    def stale(self, run: RunRecord) -> list[str]:
        """A sentence for every "run" entry whose claims were all judged, on every subject it names, and all hold."""
        sentences = []
        for one in self.entries:
            if one.quarantined:
                continue
            cells = [(claim, subject) for claim in CLAIMS for subject in run.subjects if one.covers(claim, subject)]
            records = [run.find(*cell) for cell in cells]
            verdicts = [NOT_TESTED if record is None else record.verdict for record in records]
            if None in records or BUG in verdicts or not {EQUAL, NOISE} & set(verdicts):
                continue
            where = ", ".join(dict.fromkeys(subject for _, subject in cells))
            sentences.append(
                f"{self._at(one)}: {one.claim} holds on {where}, though {one.issue} says that it fails: "
                "remove the entry"
            )
        return sentences

    def _at(self, one: Entry) -> str:
        return f"ledger {self.path}, entries[{one.number}]"


def load_ledger(path: Path, *, name: str = "") -> Ledger:
    """The ledger in a file. name: how messages call it. ValueError says which entry is wrong, and how."""
    name = name or str(path)
    try:
        data = read_json(path, max_bytes=MAX_BYTES)
    except ValueError as error:
        raise ValueError(f"ledger {name}: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != 1 or not isinstance(data.get("entries"), list):
        raise ValueError(f'ledger {name} must be {{"schema": 1, "entries": [...]}}')
    if unknown := set(data) - {"schema", "entries"}:
        raise ValueError(f"ledger {name}: unknown field {min(unknown)[:40]!r}; it has schema and entries")
    if len(data["entries"]) > MAX_ENTRIES:
        raise ValueError(f"ledger {name} has {len(data['entries'])} entries, at most {MAX_ENTRIES} are read")
    entries: list[Entry] = []
    for number, one in enumerate(data["entries"]):
        try:
            entry = _entry(number, one)
        except ValueError as error:
            raise ValueError(f"ledger {name}, entries[{number}]: {error}") from None
        for other in entries:
            if (other.claim, other.subject) == (entry.claim, entry.subject):
                raise ValueError(
                    f"ledger {name}, entries[{number}]: {entry.claim} on {entry.subject} stands in "
                    f"entries[{other.number}] already"
                )
        entries.append(entry)
    return Ledger(name, tuple(entries))


def _entry(number: int, data: Any) -> Entry:
    if not isinstance(data, dict):
        raise ValueError(f"must be an object with {', '.join(FIELDS)}")
    for name, value in data.items():
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(FIELDS)}"
            raise ValueError(f"unknown field {name[:40]!r}; {hint}")
        if not isinstance(value, str):
            raise ValueError(f"{name} must be a string")
    if not data.get("issue"):
        raise ValueError("issue is missing: a known failure needs the issue that it is known by")
    if not _ISSUE.fullmatch(data["issue"]):
        raise ValueError(f"issue = {data['issue'][:60]!r} must be a URL, #123, owner/name#123 or ABC-123")
    for name in ("claim", "subject"):
        if not _PATTERN.fullmatch(data.get(name, "")):
            raise ValueError(f"{name} = {data.get(name, '')[:60]!r} must be a name, or a glob over names")
    if data.get("mode", "") not in MODES:
        raise ValueError(f"mode = {data.get('mode', '')[:40]!r} must be run or quarantine")
    if not any(fnmatchcase(claim, data["claim"]) for claim in CLAIMS):
        near = difflib.get_close_matches(data["claim"], CLAIMS, n=3, cutoff=0.75)
        hint = f"did you mean {' or '.join(near)}?" if near else f"claims: {', '.join(CLAIMS)}"
        raise ValueError(f"no claim {data['claim']!r}; {hint}")
    why = data.get("why", "")
    if len(why) > MAX_WHY or not why.isprintable():
        raise ValueError(f"why must be one printable line of at most {MAX_WHY} characters")
    return Entry(number, data["claim"], data["subject"], data["issue"], data["mode"], why)
