"""specbench.annotations: one line a BUG, escaped by GitHub's rules for workflow commands, ten at most."""

# ruff: noqa: E501
from __future__ import annotations

import pytest

from specbench.annotations import annotation_lines, command, wanted
from specbench.record import BUG, EQUAL, NOT_TESTED, ClaimRecord

MESSAGE = "CommitMismatch: layer 0 k, row 2 is off      [claim kv.commit, level 3]\n\n  MUST      keep\n  reproduce specbench check m:A --replay x"


def bug(subject: str = "tiny-fp64", message: str = MESSAGE, known: str = "") -> ClaimRecord:
    return ClaimRecord("kv.commit", subject, BUG, message=message, known=known)


def test_a_bug_is_an_error_with_its_first_and_its_last_line() -> None:
    assert annotation_lines([bug(), ClaimRecord("progress", "own", EQUAL)], problems=[]) == [
        "::error title=BUG kv.commit on tiny-fp64::CommitMismatch: layer 0 k, row 2 is off      "
        "[claim kv.commit, level 3]%0Areproduce specbench check m:A --replay x"
    ]


def test_a_known_failure_is_a_warning_with_its_issue() -> None:
    assert annotation_lines([bug(known="#12")], problems=[]) == [
        "::warning title=KNOWN kv.commit on tiny-fp64::#12: CommitMismatch: layer 0 k, row 2 is off      "
        "[claim kv.commit, level 3]"
    ]


def test_a_quarantined_claim_is_a_warning_with_its_reason() -> None:
    one = ClaimRecord("kv.commit", "own", NOT_TESTED, "quarantined by the ledger, #12: it crashes", known="#12")
    assert annotation_lines([one], problems=[]) == [
        "::warning title=KNOWN kv.commit on own::#12: quarantined by the ledger, #12: it crashes"
    ]


def test_what_fails_the_run_as_a_whole_is_an_error() -> None:
    assert annotation_lines([], problems=["remove the entry"]) == ["::error title=specbench::remove the entry"]


def test_message_and_title_are_escaped_as_github_reads_them() -> None:
    """The title is a property: there a colon ends it and a comma begins the next."""
    assert command("error", "a:b,c%d", "50 %, so: done\nnext") == (
        "::error title=a%3Ab%2Cc%25d::50 %25, so: done%0Anext"
    )


HOSTILE = ["x\n::set-env name=A::1", "x\r::error::boo", "x\r\n::add-mask::e", "\x1b[2J", "a::b", "x\u2028::error::y"]


@pytest.mark.parametrize("text", HOSTILE)
def test_a_target_cannot_start_a_command_of_its_own(text: str) -> None:
    (line,) = annotation_lines([bug(subject=text, message=text)], problems=[])
    title = line.removeprefix("::error title=").partition("::")[0]
    assert (len(line.splitlines()), "\x1b" in line, ":" in title) == (1, False, False)


def test_ten_errors_are_shown_and_the_rest_is_counted() -> None:
    lines = annotation_lines([bug(f"own{number}") for number in range(25)], problems=[])
    assert (len(lines), lines[-1]) == (10, "::error title=specbench::16 more like these: see the verdict table")


WANTED = {("auto", "true"): True, ("auto", ""): False, ("on", ""): True, ("off", "true"): False}


@pytest.mark.parametrize("mode", WANTED, ids=["-".join(one) for one in WANTED])
def test_auto_means_in_a_github_workflow(mode: tuple[str, str]) -> None:
    assert wanted(mode[0], {"GITHUB_ACTIONS": mode[1]}) == WANTED[mode]
