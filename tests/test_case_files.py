"""specbench.case_files and specbench.strict_json: what is written comes back, and nothing else is read."""

# ruff: noqa: E501
from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest

from specbench.case_files import CaseFile, case_file_name, is_case_file, read_case_file
from specbench.cases import CommitCase, CommitRound, TreeCase, encode
from specbench.judge import parse_replay
from specbench.record import RunRecord

CASE = TreeCase(prompt=(3, 1), tokens=(1, 5, 9), parents=(-1, 0, 0))
EXAMPLE = CaseFile(
    claim="tree.mask",
    subject="tiny-fp64",
    case=encode(CASE),
    seed=7,
    profile="quick",
    model="none",
    target="./mine.py:Adapter",
    versions={"torch": "2.13.0", "python": "3.11.2"},
)


def written(text: str | bytes, folder: Path) -> Path:
    path = folder / "case.json"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def refusal(text: str | bytes, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        read_case_file(written(text, folder), name="case.json")
    return str(error.value).removeprefix("case file case.json: ")


def test_a_case_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "one.json"
    EXAMPLE.write(path)
    assert read_case_file(path) == EXAMPLE


def test_a_case_file_gives_the_very_case_that_was_encoded(tmp_path: Path) -> None:
    case = CommitCase(prompt=(4, 0), rounds=(CommitRound((0, 2), (-1, 0), 1),), next_roots=(5,), cut=1, model=3)
    path = tmp_path / "one.json"
    CaseFile("kv.commit", "tiny-bf16", encode(case)).write(path)
    assert parse_replay(read_case_file(path).replay) == ("kv.commit", "tiny-bf16", case)


def test_a_case_file_can_be_read_by_a_person(tmp_path: Path) -> None:
    EXAMPLE.write(tmp_path / "one.json")
    assert (tmp_path / "one.json").read_text() == (
        "{\n"
        ' "schema": 1,\n'
        ' "claim": "tree.mask",\n'
        ' "subject": "tiny-fp64",\n'
        ' "case": "TreeCase,prompt=3.1,tokens=1.5.9,parents=-1.0.0",\n'
        ' "seed": 7,\n'
        ' "profile": "quick",\n'
        ' "model": "none",\n'
        ' "target": "./mine.py:Adapter",\n'
        ' "versions": {\n'
        '  "torch": "2.13.0",\n'
        '  "python": "3.11.2"\n'
        " }\n"
        "}\n"
    )


NAMES = {
    ("kv.commit", "tiny-fp64"): "kv.commit@tiny-fp64.json",
    ("kv.commit", "../../etc/x"): "kv.commit@.._.._etc_x-1564e278.json",
    ("kv.commit", "my model"): "kv.commit@my_model-6d0d3f2f.json",
}


@pytest.mark.parametrize("cell", NAMES, ids=["plain", "a path", "a blank"])
def test_a_case_file_is_named_after_claim_and_subject_and_stays_in_its_folder(cell: tuple[str, str]) -> None:
    """What is left out of a name is told apart by the start of its sha256."""
    assert case_file_name(*cell) == NAMES[cell]


def test_names_that_differ_in_odd_characters_only_stay_apart() -> None:
    assert case_file_name("a", "b c") != case_file_name("a", "b_c") != case_file_name("a", "b/c")


@pytest.mark.parametrize("text", [EXAMPLE.replay, "", "tree.mask@own@TreeCase,cache=json"])
def test_a_replay_string_is_never_taken_for_a_file(text: str) -> None:
    assert not is_case_file(text)


GOOD = {"schema": 1, "claim": "tree.mask", "subject": "own", "case": "TreeCase"}

REFUSED: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "the file is not JSON: line 1 column 1: Expecting value"),
    "huge": (b" " * 1_200_001, "the file has more than 1200000 bytes"),
    "deep": ("[" * 100_000, "the file is nested too deeply"),
    "deep object": ('{"a":' * 100_000, "the file is nested too deeply"),
    "a pickle": (pickle.dumps(EXAMPLE, protocol=4), "the file is not UTF-8 text (byte 0)"),
    "a list": ("[]", "not a specbench case of schema 1"),
    "another schema": ('{"schema": 2}', "not a specbench case of schema 1"),
    "true for a schema": ('{"schema": "1"}', "not a specbench case of schema 1"),
    "nothing else": ('{"schema": 1}', "claim is missing"),
    "NaN": ('{"schema": NaN}', "NaN must be a whole number"),
    "infinity": ('{"schema": 1, "seed": -Infinity}', "-Infinity must be a whole number"),
    "a float": ('{"schema": 1, "seed": 1.5}', "1.5 must be a whole number"),
    "an exponent": ('{"schema": 1e0}', "1e0 must be a whole number"),
    "a long number": (f'{{"schema": 1, "seed": {"9" * 5000}}}', "a number has 5000 digits, at most 18 are read"),
    "a key twice": ('{"schema": 1, "claim": "a", "claim": "b"}', "the key 'claim' stands twice in one object"),
    "an unknown field": (
        json.dumps({**GOOD, "module": "os"}),
        "unknown field 'module'; it has schema, claim, subject, case, seed, profile, model, target, versions",
    ),
    "a list for a case": (json.dumps({**GOOD, "case": [1]}), "case must be a string"),
    "a path for a case": (json.dumps({**GOOD, "case": "../../x y"}), "case must be the word behind the last @ of a replay string"),
    "a shell command": (json.dumps({**GOOD, "case": "$(id)"}), "case must be the word behind the last @ of a replay string"),
    "a path for a claim": (json.dumps({**GOOD, "claim": "/etc/passwd"}), "claim = '/etc/passwd' must be a claim's id"),
    "an escape for a subject": (json.dumps({**GOOD, "subject": "\x1b[2J"}), r"subject = '\x1b[2J' must be a column of the table"),
    "a true seed": (json.dumps({**GOOD, "seed": True}), "seed must be a whole number >= 0 and < 2**64"),
    "a negative seed": (json.dumps({**GOOD, "seed": -1}), "seed must be a whole number >= 0 and < 2**64"),
    "a long target": (json.dumps({**GOOD, "target": "x" * 501}), "target has 501 characters, at most 500 are read"),
    "nested versions": (json.dumps({**GOOD, "versions": {"a": {}}}), "versions must hold short strings"),
    "many versions": (
        json.dumps({**GOOD, "versions": {str(one): "" for one in range(21)}}),
        "versions must be an object of at most 20 strings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_hostile_file_is_refused_in_one_sentence(kind: str, tmp_path: Path) -> None:
    text, sentence = REFUSED[kind]
    assert refusal(text, tmp_path) == sentence


def test_a_run_record_is_told_from_a_case_file(tmp_path: Path) -> None:
    RunRecord("mine.py:Adapter", "0.1.0", "quick", 7, seconds={"target": 0.5}).write(tmp_path / "report.json")
    with pytest.raises(ValueError) as error:
        read_case_file(tmp_path / "report.json", name="report.json")
    assert str(error.value) == (
        "report.json is a run record, not a case file: the case of each failure is a file of its own, "
        "in the folder cases beside the record (or where --specbench-cases said)"
    )


def test_a_path_where_a_case_belongs_opens_nothing(tmp_path: Path) -> None:
    """Such a word passes as a word; decoding it finds no case kind."""
    case = read_case_file(written(json.dumps({**GOOD, "case": "/etc/passwd"}), tmp_path))
    with pytest.raises(ValueError, match="replay string names the case kind '/etc/passwd': expected one of TreeCase"):
        parse_replay(case.replay)


def test_a_folder_a_device_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    said = []
    for path in (tmp_path, tmp_path / "pipe.json", Path("/dev/zero"), tmp_path / "none.json"):
        with pytest.raises(ValueError) as error:
            read_case_file(path, name="it")
        said.append(str(error.value))
    regular, missing = "case file it: this is no regular file", "case file it: there is no such file"
    assert said == [regular, regular, regular, missing]
