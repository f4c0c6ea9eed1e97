"""`specbench faults`: every fault gets its row, whatever happens to the process that judges it, and nothing is lost.

This module is a bank of its own as well: worker processes import it by name.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from specbench import cli, fault_report, fault_run
from specbench.claims import CLAIMS
from specbench.fault_catalogue import CLASSES, catalogue
from specbench.fault_report import MEASURED, FaultRun
from specbench.fault_run import FaultResult, Naming, choose, judge_fault, part_named, run_faults
from specbench.naming.suspect import Suspect
from specbench.reference.faults.bank import FAULTS as BANK
from specbench.reference.faults.equivalent import EQUIVALENT
from specbench.reference.faults.fault import Fault

PAGE = Path(__file__).resolve().parents[1] / "docs" / "faults.md"
FAST = ("future_leak", "sibling_leak", "duplicate_siblings")


def odd_fault(name: str, **keywords: Any) -> Fault:
    return Fault(name, "mask-leak", "for a test", "never", "tree.mask", **keywords)


def leaves_with_3() -> Any:
    os._exit(3)


def never_comes_back() -> Any:
    time.sleep(3600)


def breaks() -> Any:
    raise RuntimeError("no such model\nand more")


FAULTS = {
    "good": odd_fault("good"),
    "leaves": odd_fault("leaves", target=leaves_with_3),
    "hangs": odd_fault("hangs", target=never_comes_back),
    "breaks": odd_fault("breaks", target=breaks),
}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_worker_processes_judge_as_this_one_does(num_workers: int) -> None:
    faults = [BANK[one] for one in FAST]
    results = {one.fault: timeless(one) for one in run_faults(faults, seed=7, num_workers=num_workers)}
    assert results == {one.id: timeless(judge_fault(one, seed=7)) for one in faults}


@pytest.mark.parametrize("fault", FAST)
def test_a_fault_is_caught_by_its_claim(fault: str) -> None:
    assert judge_fault(BANK[fault], seed=7).caught_by == BANK[fault].claim


def test_the_time_to_catch_leaves_out_what_comes_after() -> None:
    result = judge_fault(BANK["sibling_leak"], seed=7)
    assert (0 < result.seconds < result.seconds_total, result.nodes, result.remark) == (True, 2, "")


def test_a_worker_that_dies_or_hangs_costs_its_fault_and_no_other() -> None:
    faults = [FAULTS[one] for one in ("leaves", "breaks", "hangs")]
    results = list(run_faults(faults, seed=7, num_workers=1, bank=__name__, limit=5))
    assert [(one.fault, one.remark) for one in results if one.is_lost] == [
        ("leaves", "its process ended with exit code 3"),
        ("breaks", "judging it broke: RuntimeError: no such model"),
        ("hangs", "took more than 5 s"),
    ]


def test_workers_that_cannot_start_end_the_run() -> None:
    with pytest.raises(RuntimeError, match="a worker process could not start: its process ended with exit code 1"):
        list(run_faults([BANK["sibling_leak"]], seed=7, num_workers=1, bank="no_such_module"))


@pytest.fixture
def three_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_run, "CLAIMS", {one: CLAIMS[one] for one in ("tree.mask", "kv.commit", "greedy.walk")})


@pytest.mark.usefixtures("three_claims")
def test_what_no_claim_catches_has_survived() -> None:
    result = judge_fault(FAULTS["good"], seed=7, bank=__name__)
    assert (result.caught_by, result.is_lost, result.remark) == ("", False, "tree.mask holds")


@pytest.mark.usefixtures("three_claims")
def test_a_fault_that_another_claim_catches_says_so() -> None:
    result = judge_fault(replace(BANK["first_rows"], claim="tree.mask"), seed=7)
    assert (result.caught_by, result.remark) == ("kv.commit", "tree.mask holds")


class FakeEvidence:
    """Right by the whole bank, second without copies, and silent without the class."""

    def near_copies(self, fault: str) -> frozenset[str]:
        return frozenset({fault, "cousin_leak"})

    def rank(self, *, without: frozenset[str] = frozenset(), ignore_classes: Any = frozenset()) -> Sequence[Suspect]:
        if ignore_classes == {"mask-leak"}:
            return ()
        mine, other = Suspect("mask-leak", "sibling_leak", "all 3"), Suspect("position-ids", "", "positions")
        return (other, mine) if without == {"sibling_leak", "cousin_leak"} else (mine, other)


def test_a_fault_is_named_by_three_banks() -> None:
    assert fault_run._namings(BANK["sibling_leak"], FakeEvidence()) == {
        "full": Naming("mask-leak", "sibling_leak", 1),
        "without_copies": Naming("position-ids", "", 2),
        "without_class": Naming(),
        "num_near_copies": 2,
    }


@pytest.mark.parametrize("num_parts", [1, 3, 5])
def test_parts_are_disjoint_complete_and_have_their_share_of_every_class(num_parts: int) -> None:
    parts = [choose((), (number, num_parts)) for number in range(1, num_parts + 1)]
    assert sorted(one.id for part in parts for one in part) == sorted(BANK)
    counts = [Counter(one.fault_class for one in part) for part in parts]
    shares = {name: [count[name] for count in counts] for name in {one.fault_class for one in BANK.values()}}
    assert {name: share for name, share in shares.items() if max(share) - min(share) > 1} == {}


def test_five_days_in_a_row_judge_the_whole_bank() -> None:
    days = [date(2026, 2, day) for day in range(26, 29)] + [date(2026, 3, day) for day in range(1, 3)]
    assert sorted(part_named("auto", today=day) for day in days) == [(number, 5) for number in range(1, 6)]


@pytest.mark.parametrize("text", ["", "0/5", "6/5", "2", "2/", "/5", "a/b", "1/0", "-1/5", "weekly"])
def test_part_that_is_none_is_told_what_is_expected(text: str) -> None:
    with pytest.raises(ValueError, match=f"--part {text!r} must be auto, or N/M with 1 <= N <= M"):
        part_named(text, today=date(2026, 1, 1))


RIGHT = Naming("mask-leak", "sibling_leak", 1)
RESULTS = [
    FaultResult(
        *("sibling_leak", "mask-leak", "", "tree.mask", "tree.mask"), cases=3, seconds=0.25, seconds_total=1.0, nodes=2,
        full=RIGHT, without_copies=Naming("mask-leak", "cousin_leak", 1), without_class=Naming("mask-leak", "", 1),
        num_near_copies=3, likely="mask-leak (sibling_leak): all 3", replay="tree.mask@tiny-fp64@x",
    ),
    FaultResult(
        *("cousin_leak", "mask-leak", "width at depth two", "tree.mask", "tree.layers"), cases=120, seconds=12.5,
        seconds_total=13.0, nodes=5, full=RIGHT, without_copies=Naming("position-ids", "", 2), remark="tree.mask holds",
        num_near_copies=1,
    ),
    FaultResult(
        *("future_leak", "mask-future", "", "tree.mask"), cases=500, seconds=9.75, seconds_total=9.75,
        remark="tree.mask holds",
    ),
    FaultResult(
        *("index_position", "position-ids", "", "tree.positions"), seconds_total=300.0, is_lost=True,
        remark="took more than 300 s",
    ),
]  # fmt: skip
COMMAND = "specbench faults sibling_leak cousin_leak future_leak index_position --seed 0"
TABLE = """\
fault           class         caught by       cases  seconds  nodes  named                          which is
index_position  position-ids  LOST
future_leak     mask-future   SURVIVED          500     9.75
cousin_leak     mask-leak     tree.layers (not tree.mask)    120    12.50      5  mask-leak                      right
sibling_leak    mask-leak     tree.mask           3     0.25      2  mask-leak                      right
"""
SUMMARY = """\
caught 2 of 4 (50.0 %)
SURVIVED future_leak: tree.mask holds, and no other claim catches it
LOST index_position: took more than 300 s
cousin_leak was caught by tree.layers: tree.mask holds
seconds to catch: median 6.38, largest 12.50 (cousin_leak); with reducing and naming: median 7.0
drafted nodes of the reduced case: median 3.5, above 3: 1, cousin_leak (5)
named right by the full bank: first 2 of 2 (100.0 %), among three 2 of 2 (100.0 %); wrong 0, unknown 0
named right without itself and near copies: first 1 of 2 (50.0 %), among three 2 of 2 (100.0 %); wrong 1, unknown 0
named right without its whole class: first 1 of 2 (50.0 %), among three 1 of 2 (50.0 %); wrong 0, unknown 1
near copies taken out, itself included: median 2
SECONDS s with 2 workers, standard on tiny-fp64, seed 0
"""


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of judging: the results above, the last one first."""

    def run(faults: Sequence[Fault], **keywords: Any) -> Iterator[FaultResult]:
        yield from (one for one in reversed(RESULTS) if one.fault in {fault.id for fault in faults})

    monkeypatch.setattr(fault_report, "run_faults", run)


@pytest.fixture
def run(judged: None) -> FaultRun:
    return FaultRun(tuple(RESULTS), seed=0, num_workers=2, seconds=318.6, command=COMMAND)


def test_the_table_comes_line_by_line_and_the_rates_after_it(judged: None, capsys: pytest.CaptureFixture[str]) -> None:
    faults = [BANK[one.fault] for one in RESULTS]
    done = fault_report.report(faults, seed=0, num_workers=2, command=COMMAND)
    assert capsys.readouterr().out == f"{TABLE}\n{SUMMARY.replace('SECONDS', f'{done.seconds:.0f}')}"


def test_results_of_a_run_stand_in_the_order_of_its_faults(judged: None) -> None:
    faults = [BANK[one.fault] for one in RESULTS]
    assert fault_report.report(faults, seed=0, num_workers=2, command=COMMAND).results == tuple(RESULTS)


def test_json_holds_every_field_of_every_fault(run: FaultRun) -> None:
    written = json.loads(fault_report.as_json(run))
    assert {name: written[name] for name in ("schema", "command", "profile", "seed", "workers", "counts")} == {
        "schema": 1,
        "command": COMMAND,
        "profile": "standard",
        "seed": 0,
        "workers": 2,
        "counts": {"caught": 2, "survived": 1, "lost": 1},
    }
    assert set(written["environment"]) == {"python", "machine", "torch", "transformers", "hypothesis"}
    namings = ("full", "without_copies", "without_class")
    assert written["named"]["by the full bank"] == {"first": 2, "among_three": 2, "wrong": 0, "unknown": 0}
    assert [
        FaultResult(**{**one, **{name: Naming(**one[name]) for name in namings}}) for one in written["faults"]
    ] == RESULTS


MEASURED_PART = f"""\
## Measured

```bash
{COMMAND}
```

{"".join(f"- {line}{chr(10)}" for line in SUMMARY.replace("SECONDS", "319").splitlines())}
Seconds are those to the failing case; nodes are the drafted ones of the reduced case.

| fault | class | caught by | cases | seconds | nodes | named | which is |
| --- | --- | --- | --- | --- | --- | --- | --- |
| sibling_leak | mask-leak | tree.mask | 3 | 0.25 | 2 | mask-leak | right |
| cousin_leak | mask-leak | tree.layers (not tree.mask) | 120 | 12.50 | 5 | mask-leak | right |
| future_leak | mask-future | SURVIVED | 500 | 9.75 |  |  |  |
| index_position | position-ids | LOST |  |  |  |  |  |
"""


def test_the_page_ends_with_what_was_measured(run: FaultRun) -> None:
    page = fault_report.page(run)
    assert page[page.index(MEASURED) :] == MEASURED_PART


def test_renewing_the_page_keeps_what_was_measured(run: FaultRun, tmp_path: Path) -> None:
    file = tmp_path / "faults.md"
    file.write_text(f"# Old\n\n{MEASURED_PART}", encoding="utf-8")
    fault_report.renew(file)
    assert file.read_text("utf-8") == fault_report.page(run)


def test_the_catalogue_tells_a_fault_with_its_claim_and_origin() -> None:
    fault = Fault(
        *("wide_leak", "mask-leak", "a | b", "two siblings", "tree.mask"), origin="owner/it#12", subtle="depth two"
    )
    lines = catalogue([fault, replace(fault, id="other", fault_class="unheard of", origin="", subtle="")], [fault])
    start = lines.index("## Attention and positions")
    assert "\n".join(lines[start:]) == (
        "## Attention and positions\n\n[mask-leak](#mask-leak)\n\n### mask-leak\n\n"
        "A draft attends to a draft that is not its ancestor.\n\n"
        "| fault | what it does | shows with | needs | caught by | origin |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `wide_leak` | a \\| b | two siblings | depth two | `tree.mask` | "
        "[owner/it#12](https://github.com/owner/it/issues/12) |\n\n"
        "## Further classes\n\n[unheard of](#unheard-of)\n\n### unheard of\n\n"
        "| fault | what it does | shows with | needs | caught by | origin |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| `other` | a \\| b | two siblings |  | `tree.mask` |  |\n\n"
        "## Equivalent faults\n\nChanges that no input can show. They are not counted above.\n\n"
        "| fault | class | what it does | why nothing shows it |\n"
        "| --- | --- | --- | --- |\n"
        "| `wide_leak` | mask-leak | a \\| b | two siblings |"
    )


def test_every_class_of_the_bank_is_explained() -> None:
    assert {one.fault_class for one in BANK.values()} - {name for group in CLASSES.values() for name in group} == set()


def test_the_page_lists_every_fault_as_the_bank_has_it() -> None:
    kept = PAGE.read_text("utf-8").partition(f"\n{MEASURED}\n")[0].splitlines()
    command = "specbench faults --list --markdown docs/faults.md"
    assert kept == catalogue(BANK.values(), EQUIVALENT), f"docs/faults.md is behind the bank: run `{command}`"


def exit_of(line: str) -> int:
    """The exit code, whether argparse left or main returned."""
    try:
        return cli.main(["faults", *line.split()])
    except SystemExit as left:
        return int(left.code or 0)


@pytest.mark.parametrize(
    ("ids", "code"),
    [("sibling_leak cousin_leak", 0), ("sibling_leak future_leak", 1), ("sibling_leak index_position", 1)],
)
def test_exit_code_says_whether_all_were_caught(judged: None, ids: str, code: int) -> None:
    assert exit_of(ids) == code


def test_command_says_what_it_judges_and_writes_both_files(
    judged: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = tmp_path / "faults.json", tmp_path / "faults.md"
    exit_of(f"cousin_leak sibling_leak --part 2/2 --seed 3 --workers 2 --json {files[0]} --markdown {files[1]}")
    assert capsys.readouterr().out.startswith(
        "1 faults: specbench faults cousin_leak sibling_leak --part 2/2 --seed 3\n"
    )
    assert [one["fault"] for one in json.loads(files[0].read_text("utf-8"))["faults"]] == ["sibling_leak"]
    assert "\n| sibling_leak | mask-leak | tree.mask | 3 |" in files[1].read_text("utf-8")


@pytest.mark.parametrize("num_done", [0, 1])
def test_what_was_judged_before_an_interrupt_is_printed_and_written(
    num_done: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(faults: Sequence[Fault], **_: Any) -> Iterator[FaultResult]:
        for one in faults[:num_done]:
            yield FaultResult(one.id, one.fault_class, one.subtle, one.claim, caught_by=one.claim)
        raise KeyboardInterrupt

    monkeypatch.setattr(fault_report, "run_faults", interrupted)
    files = tmp_path / "faults.json", tmp_path / "faults.md"
    assert exit_of(f"cousin_leak sibling_leak --json {files[0]} --markdown {files[1]}") == 2
    data = json.loads(files[0].read_text("utf-8"))
    assert [len(data["faults"]), data["is_whole"]] == [num_done, False]
    assert f"interrupted: {num_done} of 2 faults were judged" in capsys.readouterr().out
    assert files[1].read_text("utf-8")


def test_one_file_for_two_reports_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert exit_of(f"cousin_leak --json {tmp_path / 'x'} --markdown {tmp_path / 'x'}") == 2
    assert capsys.readouterr().err.endswith("x is named twice: one report would overwrite the other\n")


def test_list_judges_nothing_and_renews_the_catalogue(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "faults.md"
    assert exit_of(f"--list sibling_leak cousin_leak --markdown {file}") == 0
    assert capsys.readouterr().out == (
        "cousin_leak   mask-leak  tree.mask  width at depth two\nsibling_leak  mask-leak  tree.mask\n"
    )
    assert file.read_text("utf-8").splitlines() == catalogue(BANK.values(), EQUIVALENT)


MESSAGES = {
    "siblin_leak": "specbench: unknown fault 'siblin_leak': did you mean sibling_leak or",
    "--part 6/5": "specbench: --part '6/5' must be auto, or N/M with 1 <= N <= M\n",
    "--workers 0": "specbench faults: argument --workers: '0' must be a number of at least 1\n",
    "--list --json x": "specbench faults: --json needs a run, and --list makes none\n",
    "--json /no/folder/x": "specbench: cannot write /no/folder/x: No such file or directory\n",
}


def test_an_unknown_fault_is_not_answered_with_five_hundred_names() -> None:
    with pytest.raises(ValueError, match=rf"did you mean sibling_leak .* and {len(BANK) - 40} more$"):
        choose(["siblin_leak"], None)


@pytest.mark.parametrize("line", MESSAGES)
def test_wrong_words_get_one_sentence_and_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = exit_of(line)
    assert (code, capsys.readouterr().err[: len(MESSAGES[line])]) == (2, MESSAGES[line])


def timeless(result: FaultResult) -> FaultResult:
    return replace(result, seconds=0.0, seconds_total=0.0)
