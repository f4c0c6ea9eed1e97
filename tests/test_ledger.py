"""specbench.ledger: one sentence for whatever is wrong with the file, and what its entries say about a run."""

# ruff: noqa: E501
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.claims import CLAIMS
from specbench.ledger import Entry, Ledger, load_ledger
from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, ClaimRecord, RunRecord

GOOD = {"claim": "kv.commit", "subject": "tiny-*", "issue": "#12", "mode": "run", "why": "the gather drops a row"}
SUBJECTS = ["tiny-fp64", "tiny-bf16", "hf-fp64"]


def ledger(*entries: dict[str, Any], folder: Path) -> Ledger:
    path = folder / "known.json"
    path.write_text(json.dumps({"schema": 1, "entries": list(entries)}))
    return load_ledger(path, name="known.json")


def test_entries_are_read_as_they_stand(tmp_path: Path) -> None:
    assert ledger(GOOD, folder=tmp_path).entries == (
        Entry(0, "kv.commit", "tiny-*", "#12", "run", "the gather drops a row"),
    )


ISSUES = ["#1", "https://example.org/team/issues/7?tab=1", "ABC-123", "owner/name#45"]


@pytest.mark.parametrize("issue", ISSUES)
def test_an_issue_is_a_link_or_a_number_of_a_tracker(issue: str, tmp_path: Path) -> None:
    assert ledger({**GOOD, "issue": issue}, folder=tmp_path).entries[0].issue == issue


MODE = "must be run or quarantine"
WRONG: dict[str, tuple[Any, str]] = {
    "no issue": ({**GOOD, "issue": ""}, ": issue is missing: a known failure needs the issue that it is known by"),
    "a word": ({**GOOD, "issue": "todo"}, ": issue = 'todo' must be a URL, #123, owner/name#123 or ABC-123"),
    "a command": ({**GOOD, "issue": "#1\n::error::"}, r": issue = '#1\n::error::' must be a URL, #123, owner/name#123 or ABC-123"),
    "an unknown claim": ({**GOOD, "claim": "kv.comit"}, ": no claim 'kv.comit'; did you mean kv.commit?"),
    "a glob over no claim": ({**GOOD, "claim": "zz*"}, f": no claim 'zz*'; claims: {', '.join(CLAIMS)}"),
    "no claim": ({key: GOOD[key] for key in GOOD if key != "claim"}, ": claim = '' must be a name, or a glob over names"),
    "a blank subject": ({**GOOD, "subject": "my model"}, ": subject = 'my model' must be a name, or a glob over names"),
    "an unknown mode": ({**GOOD, "mode": "skip"}, f": mode = 'skip' {MODE}"),
    "no mode": ({key: GOOD[key] for key in GOOD if key != "mode"}, f": mode = '' {MODE}"),
    "an unknown field": ({**GOOD, "clam": "x"}, ": unknown field 'clam'; did you mean claim?"),
    "a number": ({**GOOD, "why": 3}, ": why must be a string"),
    "two lines": ({**GOOD, "why": "a\nb"}, ": why must be one printable line of at most 300 characters"),
    "no object": ("kv.commit", ": must be an object with claim, subject, issue, mode, why"),
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_entry_is_told_with_its_number(kind: str, tmp_path: Path) -> None:
    entry, sentence = WRONG[kind]
    with pytest.raises(ValueError) as error:
        ledger({**GOOD, "subject": "hf-*"}, entry, folder=tmp_path)
    assert str(error.value) == f"ledger known.json, entries[1]{sentence}"


def test_the_same_entry_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        ledger(GOOD, GOOD, folder=tmp_path)
    assert str(error.value) == "ledger known.json, entries[1]: kv.commit on tiny-* stands in entries[0] already"


FILES = {
    "bad JSON": ("{", "ledger l: the file is not JSON: line 1 column 2: Expecting property name enclosed in double quotes"),
    "a list": ("[]", 'ledger l must be {"schema": 1, "entries": [...]}'),
    "another schema": ('{"schema": 2, "entries": []}', 'ledger l must be {"schema": 1, "entries": [...]}'),
    "more fields": ('{"schema": 1, "entries": [], "x": 1}', "ledger l: unknown field 'x'; it has schema and entries"),
    "many": (
        json.dumps({"schema": 1, "entries": [GOOD] * 1001}),
        "ledger l has 1001 entries, at most 1000 are read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_ledger_is_refused(kind: str, tmp_path: Path) -> None:
    text, sentence = FILES[kind]
    (tmp_path / "l.json").write_text(text)
    with pytest.raises(ValueError) as error:
        load_ledger(tmp_path / "l.json", name="l")
    assert str(error.value) == sentence


def test_an_entry_that_matches_no_subject_of_the_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        ledger({**GOOD, "subject": "smollm2-*"}, folder=tmp_path).check_subjects(SUBJECTS)
    assert str(error.value) == (
        "ledger known.json, entries[0]: subject 'smollm2-*' matches no subject of this run; "
        "it has tiny-fp64, tiny-bf16, hf-fp64"
    )


def test_a_near_subject_is_suggested(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="did you mean tiny-fp64"):
        ledger({**GOOD, "subject": "tiny-f64"}, folder=tmp_path).check_subjects(SUBJECTS)


def test_two_entries_for_one_cell_are_refused(tmp_path: Path) -> None:
    """Otherwise it would depend on the order whether the cell is judged, and under which issue."""
    one = ledger(GOOD, {**GOOD, "claim": "kv.*", "subject": "tiny-bf16", "issue": "#13"}, folder=tmp_path)
    with pytest.raises(ValueError) as error:
        one.check_subjects(SUBJECTS)
    assert str(error.value) == (
        "ledger known.json, entries[1]: kv.commit on tiny-bf16 is spoken of by entries[0] already"
    )


def test_globs_cover_what_they_match(tmp_path: Path) -> None:
    one = ledger(GOOD, folder=tmp_path)
    assert [one.find(*cell) is not None for cell in (("kv.commit", "tiny-bf16"), ("kv.commit", "hf-fp64"), ("kv.rollback", "tiny-bf16"))] == [
        True, False, False,
    ]  # fmt: skip


STALE = {
    "all hold": ({"tiny-fp64": EQUAL, "tiny-bf16": NOISE}, True),
    "one fails": ({"tiny-fp64": EQUAL, "tiny-bf16": BUG}, False),
    "one was left out of the run": ({"tiny-fp64": EQUAL}, False),
    "one holds, the other cannot be judged": ({"tiny-fp64": EQUAL, "tiny-bf16": NOT_TESTED}, True),
    "none can be judged": ({"tiny-fp64": NOT_TESTED, "tiny-bf16": NOT_TESTED}, False),
}


@pytest.mark.parametrize("kind", STALE)
def test_an_entry_is_stale_when_everything_it_names_was_judged_and_holds(kind: str, tmp_path: Path) -> None:
    verdicts, stale = STALE[kind]
    run = RunRecord("it", "0", "quick", 0, subjects=SUBJECTS)
    run.claims = [ClaimRecord("kv.commit", subject, verdict) for subject, verdict in verdicts.items()]
    sentence = (
        "ledger known.json, entries[0]: kv.commit holds on tiny-fp64, tiny-bf16, though #12 says that it fails: "
        "remove the entry"
    )
    assert ledger(GOOD, folder=tmp_path).stale(run) == ([sentence] if stale else [])


def test_a_quarantined_entry_is_never_stale_because_it_is_never_judged(tmp_path: Path) -> None:
    run = RunRecord("it", "0", "quick", 0, subjects=["tiny-fp64"])
    run.claims = [ClaimRecord("kv.commit", "tiny-fp64", EQUAL)]
    assert ledger({**GOOD, "mode": "quarantine"}, folder=tmp_path).stale(run) == []
