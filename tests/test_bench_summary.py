"""bench.summary: what is told of recorded rows, that the unproved has no speed-up, and when two runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specbench.bench.metrics import RoundCounts
from specbench.bench.rows import Gate, Row, RowFile, Run, Setting, header_of, read
from specbench.bench.summary import baseline_of, compare, comparison_table, lines, summary_of

SETTINGS = {
    "plain": Setting("plain"),
    "theirs": Setting("theirs", side="transformers"),
    **{f"lookup {gamma}": Setting(f"lookup {gamma}", drafter="lookup", gamma=gamma) for gamma in (2, 4)},
    **{
        f"their lookup {gamma}": Setting(f"their lookup {gamma}", side="transformers", drafter="lookup", gamma=gamma)
        for gamma in (2, 4)
    },
}
# Seconds a token: on each of four prompts, two categories.
SECONDS = {
    "plain": 1.0,
    "theirs": 1.25,
    "lookup 2": 0.5,
    "lookup 4": 0.8,
    "their lookup 2": 1.0,
    "their lookup 4": 0.75,
}
PROMPTS = {"a": "code", "b": "code", "c": "chat", "d": "chat"}
WOBBLE = {"a": 1.0, "b": 1.1, "c": 0.9, "d": 1.0}
ROUNDS = (RoundCounts(2, 2, 1, 2), RoundCounts(2, 2, 2, 3))


def definition(**changes: Any) -> dict[str, Any]:
    told = {name: one.as_fields() for name, one in SETTINGS.items()}
    common = {
        "weights": "tiny",
        "forward": "tiny, lean",
        "dtype": "bf16",
        "device": "cpu",
        "threads": 2,
        "max_new_tokens": 5,
        "repetitions": 1,
    }
    return {**common, "settings": told, "prompts": {}, "prompts_hash": "x"} | changes


def run(
    tmp_path: Path,
    seconds: Mapping[str, float] = SECONDS,
    *,
    name: str = "run",
    verdicts: Mapping[str, str] | None = None,
    wobble: Mapping[str, float] = WOBBLE,
    machine: str = "",
    **changes: Any,
) -> Run:
    """Five tokens a row, the first of which came after a second. verdicts: EQUAL unless one is named, "" for none."""
    path = tmp_path / f"{name}.jsonl"
    path.unlink(missing_ok=True)
    header = header_of(definition(**changes), command="specbench bench")
    header["machine"] = header["machine"] | {"processor": machine or "one"}
    file = RowFile(path, header)
    for prompt, category in PROMPTS.items():
        for setting, each in seconds.items():
            whole = 1.0 + 4 * each * (wobble[prompt] if setting != "theirs" else 1.0)
            phases = {"draft": 0.5, "verify": 2.0, "commit": 0.25, "decode": 3.0}
            row = Row(
                prompt + setting, setting, prompt, category, 0, 7, (1, 2, 3, 4, 5), whole, 1.0, 1, ROUNDS, phases, 6
            )
            file.append(row.as_record())
    for setting in seconds:
        if verdict := (verdicts or {}).get(setting, "EQUAL"):
            file.append(Gate(setting, verdict, f"{setting} was judged").as_record())
    file.append({"kind": "cost", "model": "own", "context": 128, "seconds": {"1": 1.0, "3": 1.2, "5": 1.5}})
    return read(path)


def test_the_baseline_is_the_faster_plain_setting_of_the_whole_run(tmp_path: Path) -> None:
    assert baseline_of(run(tmp_path)) == "plain"
    assert baseline_of(run(tmp_path, SECONDS | {"theirs": 0.7})) == "theirs"


def test_a_plain_setting_that_is_wrong_is_no_baseline(tmp_path: Path) -> None:
    fast = SECONDS | {"theirs": 0.7}
    assert baseline_of(run(tmp_path, fast, verdicts={"theirs": "BUG"})) == "plain"


@pytest.mark.parametrize("verdict", ["BUG", "NOT TESTED", ""])
def test_what_is_not_proved_right_has_no_speedup(verdict: str, tmp_path: Path) -> None:
    """Nor may it be recommended, win a duel, or lie on a curve; its row says so."""
    told = summary_of(run(tmp_path, verdicts={"lookup 2": verdict}))
    assert told["settings"]["lookup 2"]["speedup"] is None
    assert "lookup 2" not in told["recommendation"]
    assert not any("lookup 2 " in one["what"] or one["ours"] == "lookup 2" for one in told["duels"])
    assert told["curves"] == []
    line = next(line for line in lines(told) if line.startswith("lookup 2 "))
    assert " ".join(line.split()).startswith(f"lookup 2 {verdict or 'NOT TESTED'} unverified ")


def test_noise_has_a_speedup(tmp_path: Path) -> None:
    told = summary_of(run(tmp_path, verdicts={"lookup 2": "NOISE"}))
    assert told["settings"]["lookup 2"]["speedup"]["decode"]["value"] == pytest.approx(2.0)


def test_speedups_and_categories_are_those_of_the_rows(tmp_path: Path) -> None:
    speedup = summary_of(run(tmp_path))["settings"]["lookup 2"]["speedup"]
    assert speedup["decode"] == {
        "value": pytest.approx(2.0), "low": pytest.approx(2.0), "high": pytest.approx(2.0), "n": 4,
    }  # fmt: skip
    assert speedup["categories"] == {"code": [pytest.approx(2.0), 2], "chat": [pytest.approx(2.0), 2]}


def test_duels_are_of_the_same_drafts_and_of_the_best_of_each(tmp_path: Path) -> None:
    """Ours is best at gamma 2 with 0.5, theirs at gamma 4 with 0.75."""
    duels = {one["what"]: one["decode"]["value"] for one in summary_of(run(tmp_path))["duels"]}
    assert duels == {
        "plain against theirs": pytest.approx(1.25, rel=0.01),
        "lookup 2 against their lookup 2": pytest.approx(2.0),
        "lookup 4 against their lookup 4": pytest.approx(0.75 / 0.8),
        "our best of the shared grid (lookup 2) against transformers' (their lookup 4)": pytest.approx(1.5),
    }


def test_a_curve_has_its_knee_and_a_prediction_beside_it(tmp_path: Path) -> None:
    """Behind the first round of gamma 4 there is one, 2 deep, which accepted 2. It took 3 seconds, 0.5 of them for
    drafting; its forward of 3 rows takes 1.2 by the curve, which leaves 1.3. Cut to 1: 1.1 + 0.25 + 1.3 for 2 tokens;
    to 2: 3 for 3. The baseline needs 1 second a token but for the wobble, whose geometric mean is 0.99 to the quarter.
    """
    curve = summary_of(run(tmp_path))["curves"][0]
    assert (curve["drafter"], curve["knee"], curve["best"]) == ("lookup", 2, 2)
    assert curve["predicted"]["1"] == pytest.approx(0.99**0.25 * 2 / 2.65)
    assert curve["predicted"]["2"] == pytest.approx(0.99**0.25)
    assert curve["predicted_best"] == 2


def test_the_recommendation_is_the_fastest_of_ours_with_its_reasons(tmp_path: Path) -> None:
    """3 rows a round: 6 in 2. Half a second of drafting in three."""
    assert summary_of(run(tmp_path))["recommendation"] == (
        "Use lookup 2: 2.00x [2.00, 2.00] (n = 4) the speed of plain; 2.50 tokens a forward, a forward of its rows "
        "costs 1.20 of a plain one, drafting takes 17% of the time, the host 17%."
    )


def test_the_summary_is_json_without_nan(tmp_path: Path) -> None:
    told = summary_of(run(tmp_path, verdicts=dict.fromkeys(SECONDS, "")))
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_a_prediction_is_held_against_the_baseline_as_the_measured_curve_is(tmp_path: Path) -> None:
    """transformers is the faster plain decoding here, at 0.5 a token on every prompt."""
    curve = summary_of(run(tmp_path, SECONDS | {"theirs": 0.5}))["curves"][0]
    assert curve["predicted"]["2"] == pytest.approx(0.5)


def test_a_target_that_does_not_tell_its_rows_has_no_cost_of_them(tmp_path: Path) -> None:
    """It once said that a forward of its rows costs 1.00 of a plain one."""
    found = run(tmp_path)
    rows = tuple(replace(one, num_rows=None, phases=None) for one in found.rows)
    assert summary_of(replace(found, rows=rows))["recommendation"] == (
        "Use lookup 2: 2.00x [2.00, 2.00] (n = 4) the speed of plain; 2.50 tokens a forward."
    )


def test_names_of_others_move_no_cursor(tmp_path: Path) -> None:
    told = summary_of(run(tmp_path))
    told["settings"] = {"x\x1b[2J\ny": told["settings"]["plain"]}
    assert [line for line in lines(told) if "\x1b" in line or "\n" in line] == []


# Two runs.


def verdicts_of(before: Run, after: Run, **options: Any) -> dict[str, str]:
    return {one.setting: one.verdict for one in compare(before, after, **options)}


def test_the_same_run_shows_no_difference(tmp_path: Path) -> None:
    found = verdicts_of(run(tmp_path), run(tmp_path, name="again"))
    assert set(found.values()) == {"no difference shown", "anchor"}


def test_a_slower_setting_is_a_regression_and_a_faster_one_is_not(tmp_path: Path) -> None:
    after = run(tmp_path, SECONDS | {"lookup 2": 0.55, "lookup 4": 0.6}, name="after")
    changes = {one.setting: one for one in compare(run(tmp_path), after)}
    assert [changes[name].verdict for name in ("lookup 2", "lookup 4", "plain")] == [
        "slower", "faster", "no difference shown",
    ]  # fmt: skip
    assert changes["lookup 2"].ratio.value == pytest.approx(0.5 / 0.55)
    assert [changes[name].is_regression for name in ("lookup 2", "lookup 4", "theirs")] == [True, False, False]


def test_a_difference_that_prompts_do_not_agree_on_is_not_told(tmp_path: Path) -> None:
    """Twice as slow on one prompt, faster on others."""
    after = run(tmp_path, name="after", wobble={"a": 2.0, "b": 1.0, "c": 0.8, "d": 0.9})
    assert verdicts_of(run(tmp_path), after)["lookup 2"] == "no difference shown"


def test_a_machine_that_is_slower_today_is_no_regression(tmp_path: Path) -> None:
    """All take 1.5 times as long, the anchor too."""
    after = run(tmp_path, {name: 1.5 * one for name, one in SECONDS.items()}, name="after")
    changes = {one.setting: one for one in compare(run(tmp_path), after)}
    assert changes["theirs"].ratio.value == pytest.approx(1 / 1.5)
    assert {one.verdict for one in changes.values()} == {"anchor", "no difference shown"}


def test_a_setting_that_is_wrong_now_is_a_regression(tmp_path: Path) -> None:
    changes = compare(run(tmp_path), run(tmp_path, name="after", verdicts={"lookup 2": "BUG"}))
    found = next(one for one in changes if one.setting == "lookup 2")
    assert (found.verdict, found.is_regression) == ("wrong now", True)
    assert comparison_table([found]) == ["lookup 2  wrong now"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [({"machine": "two"}, 'machine: processor: "one", now "two"'), ({"threads": 4}, "definition: threads: 2, now 4")],
    ids=["machine", "definition"],
)
def test_other_machines_and_definitions_are_compared_only_when_told(
    changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    before, after = run(tmp_path), run(tmp_path, name="after", **changes)
    with pytest.raises(ValueError) as refused:
        compare(before, after)
    assert str(refused.value) == (
        f"these runs are of another machine or definition ({told}): what differs between them may be that; say --force "
        "to compare them all the same"
    )
    assert compare(before, after, force=True)


def test_runs_without_a_setting_in_common_are_refused(tmp_path: Path) -> None:
    before, after = run(tmp_path, {"plain": 1.0}), run(tmp_path, {"theirs": 1.0}, name="after")
    with pytest.raises(ValueError, match="the runs have no setting in common that passed the gate"):
        compare(before, after)
