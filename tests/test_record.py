"""specbench.record: exact bounds, the JSON file, the table and the footer."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from math import comb
from pathlib import Path

import pytest

from specbench.record import (
    BUG,
    EQUAL,
    NOISE,
    NOT_TESTED,
    ClaimRecord,
    RunRecord,
    footer,
    read,
    share_lower_bound,
    share_sentence,
    table,
)


def upper_tail(num_equal: int, num_tokens: int, p: Fraction) -> Fraction:
    """P(X >= num_equal) of a binomial, in exact fractions."""
    return sum(
        (comb(num_tokens, k) * p**k * (1 - p) ** (num_tokens - k) for k in range(num_equal, num_tokens + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize("num_tokens", [1, 20, 1000, 29_956])
def test_lower_bound_without_a_difference_is_the_nth_root(num_tokens: int) -> None:
    assert share_lower_bound(num_tokens, num_tokens) == pytest.approx(0.05 ** (1 / num_tokens), rel=1e-12)


@pytest.mark.parametrize(("num_equal", "num_tokens"), [(1, 2), (1, 10), (5, 10), (9, 10), (18, 20), (95, 100)])
def test_lower_bound_is_where_so_many_equal_tokens_are_a_one_in_twenty_chance(num_equal: int, num_tokens: int) -> None:
    bound = Fraction(share_lower_bound(num_equal, num_tokens))
    assert float(upper_tail(num_equal, num_tokens, bound)) == pytest.approx(0.05, rel=1e-9)


def test_lower_bound_is_the_root_of_a_quadratic_for_one_of_two() -> None:
    """P(X >= 1) = 1 - (1 - p)^2 = 0.05."""
    assert share_lower_bound(1, 2) == pytest.approx(1 - 0.95**0.5, rel=1e-12)


def test_lower_bound_of_nothing_is_nothing() -> None:
    assert (share_lower_bound(0, 0), share_lower_bound(0, 10)) == (0.0, 0.0)


def test_lower_bound_follows_the_confidence_asked_for() -> None:
    assert share_lower_bound(10, 10, confidence=0.99) == pytest.approx(0.01**0.1, rel=1e-12)


@pytest.mark.parametrize(("num_tokens", "enough"), [(29_000, False), (29_955, False), (29_956, True), (30_000, True)])
def test_thirty_thousand_clean_tokens_are_needed_for_four_nines(num_tokens: int, enough: bool) -> None:
    """0.9999^n <= 0.05 first at n = 29,956."""
    assert (share_lower_bound(num_tokens, num_tokens) >= 0.9999) == enough


SENTENCES = {
    (0, 0): "no tokens compared",
    (30_000, 30_000): "30000 of 30000 tokens equal (100 %), at least 99.99 % at 95 % confidence",
    (29_000, 29_000): (
        "29000 of 29000 tokens equal (100 %), at least 99.989 % at 95 % confidence: not enough tokens for 99.99 %"
    ),
    (100, 100): "100 of 100 tokens equal (100 %), at least 97.048 % at 95 % confidence: not enough tokens for 99.99 %",
    (29_999, 30_000): ("29999 of 30000 tokens equal (99.996 %), at least 99.984 % at 95 % confidence: below 99.99 %"),
    (9, 10): "9 of 10 tokens equal (90 %), at least 60.583 % at 95 % confidence: below 99.99 %",
}


@pytest.mark.parametrize("counts", SENTENCES)
def test_share_is_told_with_its_bound_and_whether_that_is_enough(counts: tuple[int, int]) -> None:
    assert share_sentence(*counts) == SENTENCES[counts]


def test_counts_add_up() -> None:
    record = ClaimRecord("kv.commit", "own")
    record.note_case(nodes=3, rounds=2, tokens=5)
    record.note_case(nodes=1)
    record.note_generation(identical=True)
    record.note_generation(identical=False)
    record.note_share(0.5)
    record.note_share(0.25)
    record.note_threshold(0.2, 3, 4)
    record.note_threshold(0.2, 1, 4)
    assert record == ClaimRecord(
        "kv.commit",
        "own",
        num_cases=2,
        num_nodes=4,
        num_rounds=2,
        num_tokens=5,
        num_generations=2,
        num_identical=1,
        worst=0.5,
        thresholds={"0.2": [4, 8]},
    )


def example() -> RunRecord:
    """A run with every verdict."""
    run = RunRecord(
        "mine:Adapter",
        "0.1.0",
        "quick",
        7,
        subjects=["tiny-fp64", "tiny-bf16"],
        models={"tiny-fp64": "two shapes", "tiny-bf16": "the same, rounded"},
        prompts=["code-1", "zh-2"],
        seconds={"target": 1.25, "total": 3.0},
        peak_bytes=3 * 2**28,
    )
    why = "fill taps.mask in forward_tree"
    run.claims = [
        ClaimRecord("tree.mask", "tiny-fp64", NOT_TESTED, why),
        ClaimRecord("tree.mask", "tiny-bf16", NOT_TESTED, why),
        ClaimRecord("tree.logits", "tiny-fp64", EQUAL, num_cases=20, num_nodes=200, num_rounds=20, seconds=1.24),
        ClaimRecord(
            "tree.logits", "tiny-bf16", NOISE, num_cases=5, num_nodes=50, num_rounds=5, detail="half its bound"
        ),
        ClaimRecord("greedy.walk", "tiny-fp64", BUG, num_cases=3, num_nodes=4, seconds=0.2, message="WalkMismatch: …"),
    ]
    return run


def test_table_has_claims_down_subjects_across_and_counts_at_the_right() -> None:
    assert table(example()) == (
        "claim        verdict     tiny-fp64  tiny-bf16  cases  nodes  seconds\n"
        "--------------------------------------------------------------------\n"
        "tree.mask    NOT TESTED  -          -          0      0      0.0\n"
        "tree.logits  NOISE       EQUAL      NOISE      25     250    1.2\n"
        "greedy.walk  BUG         BUG                   3      4      0.2"
    )


def test_footer_says_what_was_judged_why_not_and_where_the_time_went() -> None:
    assert footer(example()) == [
        "tiny-fp64: two shapes",
        "tiny-bf16: the same, rounded",
        "prompts: code-1, zh-2",
        "tree.logits on tiny-bf16: half its bound",
        "NOT TESTED tree.mask (tiny-fp64), tree.mask (tiny-bf16): fill taps.mask in forward_tree",
        "28 cases, 254 nodes, 25 rounds",
        "seconds: target 1.2, total 3.0",
        "peak memory 0.75 GiB",
    ]


def test_footer_names_four_and_counts_the_rest_of_one_reason() -> None:
    run = RunRecord("it", "0", "quick", 0)
    run.claims = [ClaimRecord(f"claim{number}", "own", NOT_TESTED, "expose it") for number in range(6)]
    assert footer(run)[0] == ("NOT TESTED claim0 (own), claim1 (own), claim2 (own), claim3 (own) and 2 more: expose it")


@pytest.mark.parametrize(
    ("verdicts", "most_severe"),
    [
        ([], NOT_TESTED),
        ([NOT_TESTED], NOT_TESTED),
        ([NOT_TESTED, EQUAL], EQUAL),
        ([EQUAL, NOISE, NOT_TESTED], NOISE),
        ([NOISE, BUG, EQUAL, NOT_TESTED], BUG),
    ],
    ids=lambda one: one if isinstance(one, str) else "-".join(word.replace(" ", "_") for word in one) or "none",
)
def test_bug_outweighs_noise_outweighs_equal_outweighs_not_tested(verdicts: list[str], most_severe: str) -> None:
    run = RunRecord("it", "0", "quick", 0)
    run.claims = [ClaimRecord("progress", f"on{idx}", verdict) for idx, verdict in enumerate(verdicts)]
    assert run.verdict_of("progress") == most_severe


def test_record_survives_the_journey_through_json(tmp_path: Path) -> None:
    example().write(tmp_path / "deep" / "run.json")
    assert read(tmp_path / "deep" / "run.json") == example()


def test_json_names_its_schema_and_keeps_other_scripts_readable(tmp_path: Path) -> None:
    example().write(tmp_path / "run.json")
    text = (tmp_path / "run.json").read_text(encoding="utf-8")
    assert (json.loads(text)["schema"], "WalkMismatch: …" in text) == (1, True)


def test_a_reader_never_sees_half_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that dies on a full disk leaves the old record and no litter."""
    path = tmp_path / "run.json"
    example().write(path)
    before = path.read_bytes()

    def full(self: Path, mode: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "chmod", full)
    with pytest.raises(OSError, match="No space left"):
        RunRecord("other", "0", "quick", 0).write(path)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (before, ["run.json"])


def test_others_may_read_the_record(tmp_path: Path) -> None:
    example().write(tmp_path / "run.json")
    assert (tmp_path / "run.json").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("text", ["{}", "[]", '{"schema": 2}'])
def test_another_json_file_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        read(path)
    assert str(error.value) == f"{path}: not a specbench run record of schema 1"


def test_a_record_from_before_a_field_was_added_is_read(tmp_path: Path) -> None:
    """What version 0.1.0 wrote had neither a ledger nor flips."""
    path = tmp_path / "run.json"
    example().write(path)
    data = json.loads(path.read_text())
    for name in ("ledger", "problems"):
        del data[name]
    for one in data["claims"]:
        for name in ("num_flips", "num_plain_flips", "num_flip_tokens", "num_worse", "num_better", "known"):
            del one[name]
    path.write_text(json.dumps(data))
    assert read(path) == example()


@pytest.mark.parametrize("change", [{"speed": 3}, {"claims": [{"claim": "a", "subject": "b", "speed": 3}]}])
def test_a_record_with_fields_of_a_newer_version_is_refused_with_a_sentence(
    change: dict[str, object], tmp_path: Path
) -> None:
    path = tmp_path / "run.json"
    example().write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError) as error:
        read(path)
    sentence = f"{path}: a run record of schema 1 with other fields, of a newer specbench?"
    assert (str(error.value).startswith(sentence), "speed" in str(error.value)) == (True, True)


KNOWN_CELLS = {
    "a known failure alone": ({"a": (BUG, "#1"), "b": (EQUAL, "")}, "KNOWN"),
    "a known and a new one": ({"a": (BUG, "#1"), "b": (BUG, "")}, BUG),
    "quarantined beside one that holds": ({"a": (NOT_TESTED, "#1"), "b": (EQUAL, "")}, "KNOWN"),
    "nothing known": ({"a": (NOISE, ""), "b": (EQUAL, "")}, NOISE),
}


@pytest.mark.parametrize("kind", KNOWN_CELLS)
def test_a_claim_is_shown_as_known_unless_another_subject_fails_anew(kind: str) -> None:
    cells, shown = KNOWN_CELLS[kind]
    run = RunRecord("it", "0", "quick", 0, subjects=list(cells))
    run.claims = [ClaimRecord("progress", name, verdict, known=known) for name, (verdict, known) in cells.items()]
    assert run.shown_verdict("progress") == shown


def test_the_table_shows_known_cells_and_the_footer_names_their_issues() -> None:
    run = RunRecord("it", "0", "quick", 0, subjects=["own", "tiny"])
    run.claims = [
        ClaimRecord("progress", "own", BUG, message="NoProgress: stuck\n\nmore", known="#12"),
        ClaimRecord("progress", "tiny", NOT_TESTED, "quarantined by the ledger, ABC-3", known="ABC-3"),
    ]
    assert table(run).splitlines()[2].split() == ["progress", "KNOWN", "KNOWN", "KNOWN", "0", "0", "0.0"]
    assert footer(run)[:2] == [
        "KNOWN progress on own: #12: NoProgress: stuck",
        "KNOWN progress on tiny: ABC-3: quarantined by the ledger, ABC-3",
    ]


def test_a_known_failure_is_still_a_bug_in_the_record() -> None:
    run = RunRecord("it", "0", "quick", 0, subjects=["own"], claims=[ClaimRecord("progress", "own", BUG, known="#12")])
    assert run.verdict_of("progress") == BUG
