"""A failing case as a JSON file: the word behind `--replay`, and what a person wants to know beside it. Never code.

Nothing in a file is loaded, imported or opened: the target to judge comes from the command line alone, and the case is
decoded and checked like a replay string (see `cases`).
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from specbench.strict_json import read_json

MAX_BYTES = 1_200_000  # a replay string has at most a million characters
MAX_WORD = 500
MAX_VERSIONS = 20
MAX_LINE = 2_000  # longer replay strings are awkward in a shell: the failure names the file instead
SCHEMA = 1
_RUN_RECORD = re.compile(rb'\{\s*"schema":\s*1,\s*"target":')  # how one begins; it may be long, and has floats
_CASE = re.compile(r"[A-Za-z0-9_,=.:/-]+")
_CLAIM = re.compile(r"[a-z0-9_.]{1,80}")


@dataclass(frozen=True)
class CaseFile:
    """claim, subject, case: what is replayed. The rest says where it failed; only the seed is used, for the message."""

    claim: str
    subject: str
    case: str
    seed: int = 0
    profile: str = ""
    model: str = ""
    target: str = ""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def replay(self) -> str:
        return f"{self.claim}@{self.subject}@{self.case}"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1) + "\n", encoding="utf-8")


def case_file_name(claim: str, subject: str) -> str:
    """`kv.commit@tiny-fp64.json`, of characters that no shell or file system minds; unlike names stay unlike."""
    name = f"{claim}@{subject}"
    plain = re.sub(r"[^A-Za-z0-9_.@+-]", "_", name)[:120].lstrip(".-")
    if plain != name:
        plain = f"{plain}-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:8]}"
    return f"{plain}.json"


def is_case_file(text: str) -> bool:
    """Whether the argument of --specbench-replay names a file. No replay string ends like one."""
    return text.endswith(".json")


def read_case_file(path: Path, *, name: str = "") -> CaseFile:
    """The case behind a file. ValueError when the file is anything but one that `CaseFile.write` wrote."""
    name = name or str(path)
    try:
        return _case_file(read_json(path, max_bytes=MAX_BYTES))
    except ValueError as error:
        if _is_run_record(path):
            raise ValueError(
                f"{name} is a run record, not a case file: the case of each failure is a file of its own, "
                "in the folder cases beside the record (or where --specbench-cases said)"
            ) from error
        raise ValueError(f"case file {name}: {error}") from error


def _is_run_record(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return _RUN_RECORD.match(file.read(100)) is not None
    except OSError:
        return False


def _case_file(data: Any) -> CaseFile:
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"not a specbench case of schema {SCHEMA}")
    known = {one.name: one for one in fields(CaseFile)}
    for name, value in data.items():
        if name not in known:
            raise ValueError(f"unknown field {name[:40]!r}; it has schema, {', '.join(known)}")
        if name == "versions":
            _check_versions(value)
        elif name == "seed":
            if type(value) is not int or not 0 <= value < 2**64:
                raise ValueError("seed must be a whole number >= 0 and < 2**64")
        elif not isinstance(value, str):
            raise ValueError(f"{name} must be a string")
        elif name != "case" and len(value) > MAX_WORD:
            raise ValueError(f"{name} has {len(value)} characters, at most {MAX_WORD} are read")
    for name in ("claim", "subject", "case"):
        if not data.get(name):
            raise ValueError(f"{name} is missing")
    if not _CLAIM.fullmatch(data["claim"]):
        raise ValueError(f"claim = {data['claim'][:40]!r} must be a claim's id")
    if "@" in data["subject"] or not data["subject"].isprintable():
        raise ValueError(f"subject = {data['subject'][:40]!r} must be a column of the table")
    if not _CASE.fullmatch(data["case"]):
        raise ValueError("case must be the word behind the last @ of a replay string")
    return CaseFile(**data)


def _check_versions(value: object) -> None:
    if not isinstance(value, dict) or len(value) > MAX_VERSIONS:
        raise ValueError(f"versions must be an object of at most {MAX_VERSIONS} strings")
    for name, version in value.items():
        if not isinstance(version, str) or len(name) > 80 or len(version) > 200:
            raise ValueError("versions must hold short strings")
