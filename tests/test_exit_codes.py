"""specbench.exit_codes: each code of the table, as it really comes out of a run. Codes 1, 4 and 7 on targets that are
wrong, unusable or hang stand in tests/test_plugin.py as well."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_plugin import FAULT, WRONG, forked

import specbench.judge
from specbench.exit_codes import EXIT_CODES, FAILED, HELD, HUNG, INTERNAL, INTERRUPTED, NOTHING_RAN, UNUSABLE, markdown

SUITE = ("suites/consistency", "--specbench-model=none", "--hypothesis-profile=quick")
ONE = "judged_by and tiny-fp64"  # greedy.walk on one subject
BREAKING_OFF = "def pytest_runtest_call(item):\n    raise KeyboardInterrupt\n"
BREAKING = "def pytest_runtest_protocol(item):\n    raise RuntimeError('a plugin of theirs')\n"
PASSING = "def test_it():\n    pass\n"

RUNS: dict[str, tuple[int, tuple[str, ...], str]] = {
    "every tested claim holds": (HELD, (*SUITE, "-k", ONE), ""),
    "a claim fails": (FAILED, (*SUITE, "-k", "sees_the_prefix and tiny-fp64", f"--target={FAULT}"), ""),
    "a required claim was left out": (FAILED, (*SUITE, "-k", ONE, "--specbench-require=progress"), ""),
    "interrupted": (INTERRUPTED, ("FOLDER",), BREAKING_OFF),
    "a plugin breaks": (INTERNAL, ("FOLDER",), BREAKING),
    "a wrong target": (UNUSABLE, (*SUITE, "--target=nowhere.py:Adapter"), ""),
    "a wrong option": (UNUSABLE, (*SUITE, "--specbench-annotations=maybe"), ""),
    "nothing selected": (NOTHING_RAN, (*SUITE, "-k", "no_such_test"), ""),
    "a call that hangs": (HUNG, (*SUITE, "--specbench-timeout=1", f"--target={WRONG}:HangsAtOnce"), ""),
}


def test_the_processes_below_start_with_what_they_need() -> None:
    assert specbench.judge.CHECKS


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_ends_with_the_code_of_the_table(kind: str, tmp_path: Path) -> None:
    code, arguments, conftest = RUNS[kind]
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_it.py").write_text(PASSING)
    words = [one.replace("FOLDER", str(tmp_path)) for one in arguments]
    options = ["-p", "specbench.plugin", "-p", "no:cacheprovider", f"--specbench-json={tmp_path / 'run.json'}",
               "-W", "ignore::pytest.PytestAssertRewriteWarning"]  # fmt: skip
    found = forked([*words, *options], tmp_path / "out.txt", {})
    assert found == code, (tmp_path / "out.txt").read_text()


def test_every_code_of_the_table_is_tested() -> None:
    assert {code for code, _, _ in RUNS.values()} == set(EXIT_CODES)


def test_the_table_is_one_line_a_code() -> None:
    assert [line.split("|")[1].strip() for line in markdown().splitlines()[2:]] == ["0", "1", "2", "3", "4", "5", "7"]
