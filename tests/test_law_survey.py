"""`specbench law`: its table, its verdict on rules that break their word, its files, and its sentences."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from specbench import cli
from specbench.law import survey
from specbench.law.survey import Case, Line, Survey
from specbench.law.toys import Toy
from specbench.reference.verify.rules import RULES
from specbench.types import VerifyResult

F = Fraction
LIAR = replace(
    RULES["chain"], name="liar", needs_draft_probs=False, function=lambda tree, p, q, chance: VerifyResult((1,), 0)
)


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a rule that claims to be lossless, and always accepts one draft and says 0."""
    monkeypatch.setitem(RULES, "liar", LIAR)
    return "liar"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    try:
        code = cli.main(["law", *words])
    except SystemExit as left:
        code = int(left.code or 0)
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_rule_that_keeps_its_word_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "chain", "typical", "--models", "1")
    verdicts = [tuple(line.split()[:4]) for line in out.splitlines() if line.startswith(("chain ", "typical "))]
    assert (code, verdicts[:2], [words[2] for words in verdicts[2:]]) == (
        0,
        [("chain", "iid", "lossless", "0"), ("chain", "without_replacement", "lossless", "0")],
        ["LOSSY", "LOSSY", "LOSSY"],
    )


def test_rule_that_breaks_its_word_fails_the_run(capsys: pytest.CaptureFixture[str], liar: str) -> None:
    code, out, _ = run(capsys, liar, "--models", "1")
    assert (code, out.splitlines()[-1].split(": ")[-2:]) == (
        1,
        ["NOT LOSSLESS, though they say so", "liar (iid), liar (without_replacement)"],
    )


def test_chain_rule_reaches_all_of_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "chain", "--models", "2")
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("chain ")] == ["100.0%", "100.0%"]


def test_rules_that_couple_paths_are_held_against_the_bound_over_paths() -> None:
    """On some of these block verification exceeds what deciding node by node could reach."""
    cases = [
        survey.measure(RULES["block"], "iid", Toy(size, seed), (-1, 0, 1), num_tokens=4, num_rounds=1)
        for size in (3, 4)
        for seed in range(8)
    ]
    assert all(case.accepted <= case.best for case in cases)


def test_json_holds_every_case_with_its_fractions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], liar: str
) -> None:
    run(capsys, liar, "--models", "1", "--json", str(tmp_path / "law.json"))
    record = json.loads((tmp_path / "law.json").read_text("utf-8"))
    cases: list[dict[str, Any]] = [case for rule in record["rules"] for case in rule["cases"]]
    assert record["command"] == "specbench law liar --seed 0 --models 1"
    assert [(F(case["tv"]["exact"]) > 0, F(case["accepted"]["exact"])) for case in cases] == [(True, 1)] * 8


def test_markdown_is_the_table_and_what_was_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "block", "--models", "1", "--markdown", str(tmp_path / "law.md"))
    lines = (tmp_path / "law.md").read_text("utf-8").splitlines()
    assert lines[0].startswith("| rule | drafts | law |") and lines[2].startswith("| block | iid | lossless | 0 |")
    assert lines[-1] == out.splitlines()[-1]


CASES = (
    Case(3, 0, (-1, 0), 3, 1, F(0), F(1, 2), F(1)),
    Case(3, 1, (-1, 0), 3, 1, F(1, 4), F(1, 4), F(1)),
    Case(3, 0, (-1, 0, 0), 3, 1, F(1, 8), F(1), F(1)),
)


def test_cells_of_a_line_are_its_worst_and_its_means() -> None:
    """Chains: (1/2 + 1/4) / 2 of 1. Trees: 1 of 1. In all 7/4 of 3."""
    found = survey.cells(Line(RULES["entropy"], "iid", CASES))
    assert found == ("entropy", "iid", "LOSSY", "1/4 = 0.25", "0.3750", "1.0000", "1.0000", "1.0000", "58.3%")


def test_what_was_run_is_said_in_a_sentence() -> None:
    line = Line(RULES["chain"], "iid", CASES[:1])
    assert survey.summary(Survey((line,), seed=4, num_models=1, seconds=2.4)) == (
        "1 model a vocabulary, seed 4; V = 3: chain of 3, (2,1), (2,2); V = 4: chain of 2, (3), (2,1); "
        "V = 5: chain of 2, (3), (2,1); and over many rounds V = 3: chain of 2, (2). "
        "1 law in 2 s: every rule keeps its word"
    )


def test_page_has_a_row_for_every_rule() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "law.md").read_text("utf-8")
    assert [name for name in RULES if f"| `{name}` | " not in page or f"\n| {name} | " not in page] == []


FRACTIONS = {F(0): "0", F(1): "1", F(2, 7): "2/7 = 0.2857", F(1, 10**9): "1e-09"}


@pytest.mark.parametrize("value", FRACTIONS)
def test_fraction_is_printed_while_it_is_short(value: Fraction) -> None:
    assert survey.fraction_text(value) == FRACTIONS[value]


KNOWN = (
    "greedy, chain, recursive, without_replacement, k_seq, deterministic, sample_and_match, block, traversal, gumbel, "
    "threshold, typical, relaxed, entropy"
)
MESSAGES = {
    "chian": f"specbench: unknown rule 'chian': did you mean chain? Known: {KNOWN}\n",
    "--lossiness x.gif": "specbench law: --lossiness x.gif must end in .png or .json\n",
    "chain --lossiness x.png": (
        "specbench law: --lossiness draws every lossy rule, and takes no RULE, --json or --markdown\n"
    ),
    "--json /nowhere/law.json": "specbench: cannot write /nowhere/law.json: No such file or directory\n",
    "--models 0": "specbench law: argument --models: '0' must be a number of at least 1\n",
}


@pytest.mark.parametrize("words", MESSAGES)
def test_wrong_word_is_told_in_a_sentence(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run(capsys, *words.split())
    assert (code, error) == (2, MESSAGES[words])


def test_lines_that_were_done_before_an_interrupt_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    measured, calls = survey._cases, []

    def interrupted(*asked: Any) -> Any:
        calls.append(asked)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measured(*asked)

    monkeypatch.setattr(survey, "_cases", interrupted)
    file = tmp_path / "law.json"
    assert cli.main(["law", "greedy", "--models", "1", "--json", str(file)]) == 2
    assert len(json.loads(file.read_text("utf-8"))["rules"]) == 1
