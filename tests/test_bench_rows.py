"""bench.rows: a run can be stopped anywhere and goes on without losing rows; what is not its own is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.metrics import RoundCounts
from specbench.bench.rows import Gate, Row, RowFile, Setting, differences, header_of, key_of, read

SETTINGS = {"plain": Setting("plain"), "lookup": Setting("lookup", drafter="lookup", gamma=4)}
DEFINITION = {"threads": 2, "settings": {name: one.as_fields() for name, one in SETTINGS.items()}}


def header(**changes: Any) -> dict[str, Any]:
    return header_of(DEFINITION | changes, command="specbench bench")


def row(key: str, setting: str = "plain", prompt: str = "a", num: int = 3, seconds: float = 2.0) -> Row:
    rounds = (RoundCounts(4, 4, 1, 2), RoundCounts(None, None, 0, 1))
    return Row(key, setting, prompt, "code", 0, 7, tuple(range(num)), seconds, 0.5, 1, rounds, {"rounds": 1.0}, 9, 0.25)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "new" / "rows.jsonl", header())
    gate = Gate("plain", "EQUAL", "all the same", 1, 3, 1, None, {"bound": 0.1})
    for record in (row("k").as_record(), gate.as_record(), {"kind": "cost", "seconds": {"1": 0.5}}):
        file.append(record)
    run = read(file.path)
    assert (run.rows, run.gates) == ((row("k"),), {"plain": gate})
    assert (run.settings, run.others["cost"][0]["seconds"]) == (SETTINGS, {"1": 0.5})


def test_a_stopped_run_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    """Torn anywhere inside its last line, the file resumes with the rows before it and takes the row again."""
    path = tmp_path / "rows.jsonl"
    file = RowFile(path, header())
    for key in ("one", "two"):
        file.append(row(key).as_record())
    whole = path.read_bytes()
    start = whole.rindex(b"\n", 0, -1) + 1
    for end in range(start + 1, len(whole)):
        path.write_bytes(whole[:end])
        again = RowFile(path, header(), resume=True)
        assert again.keys == {"one"}
        again.append(row("two").as_record())
        assert [one.key for one in read(path).rows] == ["one", "two"]


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    path = RowFile(tmp_path / "rows.jsonl", header()).path
    with pytest.raises(ValueError) as refused:
        RowFile(path, header())
    assert str(refused.value) == f"{path} is there: name another file, or go on with it by --resume"


def test_a_run_of_another_definition_is_not_gone_on_with(tmp_path: Path) -> None:
    path = RowFile(tmp_path / "rows.jsonl", header()).path
    with pytest.raises(ValueError) as refused:
        RowFile(path, header(threads=4), resume=True)
    assert str(refused.value) == (
        f"{path} is of another definition (threads: 2, now 4): its rows cannot be gone on with; name another file"
    )


@pytest.mark.parametrize("what", ["machine", "versions"])
def test_a_run_of_another_machine_or_version_is_not_gone_on_with(what: str, tmp_path: Path) -> None:
    path = RowFile(tmp_path / "rows.jsonl", header()).path
    other = header()
    other[what] = other[what] | {"system": "Plan 9"}
    with pytest.raises(ValueError, match=rf"is of another {what} \(system: .*, now \"Plan 9\"\)"):
        RowFile(path, other, resume=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it holds no whole line"),
        ('{"kind":"row"}\n', "line 1 must be a header"),
        ("[1]\n", "line 1 must be a header"),
        ("no\n", "line 1 is no JSON"),
        (json.dumps({"kind": "header", "schema": 99}) + "\n", "has rows of schema 99, this version reads 1"),
        (json.dumps({"kind": "header", "schema": 1}) + '\n{"kind":"row"}\n', "a record lacks or has a wrong 'rounds'"),
    ],
)
def test_what_is_no_file_of_rows_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(text)
    with pytest.raises(ValueError, match=message):
        read(tmp_path / "x")


def test_a_key_tells_apart_what_defines_a_row() -> None:
    """And nothing else: the order of fields and a setting's name do not."""
    fields = {"setting": SETTINGS["lookup"].as_fields(), "repetition": 0}
    renamed = Setting("another name", drafter="lookup", gamma=4).as_fields()
    assert key_of(fields) == key_of({"repetition": 0, "setting": renamed})
    assert key_of(fields) != key_of(fields | {"repetition": 1})
    assert key_of(fields) != key_of(fields | {"setting": SETTINGS["plain"].as_fields()})


def test_pairs_need_the_same_number_of_tokens_on_both_sides(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl", header())
    for prompt, nums in {"same": (3, 3), "other": (3, 4)}.items():
        for setting, num in zip(SETTINGS, nums, strict=True):
            file.append(row(prompt + setting, setting, prompt, num).as_record())
    file.append(row("alone", "plain", "alone").as_record())
    pairs = read(file.path).pairs("plain", "lookup")
    assert [one.prompt for one in pairs] == ["same"]


def test_pairs_may_be_asked_for_where_both_said_the_same(tmp_path: Path) -> None:
    file = RowFile(tmp_path / "rows.jsonl", header())
    file.append(row("1", "plain").as_record())
    file.append(row("2", "lookup").as_record() | {"tokens": [0, 1, 9]})
    run = read(file.path)
    assert (len(run.pairs("plain", "lookup")), run.pairs("plain", "lookup", same_text=True)) == (1, [])


def test_differences_are_told_by_field() -> None:
    assert list(differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": "x"})) == ["b: 2, now 3", 'c: null, now "x"']


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"side": "ours"}, "side = 'ours' must be one of own, transformers, target"),
        ({"drafter": "lookup"}, "setting x: gamma = 0 must be 0 without a drafter, >= 1 with one"),
        ({"gamma": 3}, "setting x: gamma = 3 must be 0 without a drafter, >= 1 with one"),
    ],
)
def test_impossible_settings_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        Setting("x", **fields)
    assert str(refused.value) == message
