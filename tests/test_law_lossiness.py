"""The lossiness report: where its curves must end, its data, and its drawing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specbench import cli
from specbench.law.lossiness import Curve, Point, curves, table
from specbench.reports.lossiness import figure


@pytest.fixture(scope="module")
def drawn() -> dict[str, Curve]:
    return {curve.rule: curve for curve in curves(num_models=2)}


def test_lossless_rules_have_the_law_they_are_lossless_for(drawn: dict[str, Curve]) -> None:
    found = {name: (drawn[name].points[0].tv, drawn[name].points[0].tv_greedy) for name in ("chain", "block", "greedy")}
    assert (found["chain"][0], found["block"][0], found["greedy"][1]) == (0.0, 0.0, 0.0)


def test_threshold_above_one_half_is_greedy_and_sampling_it_is_not(drawn: dict[str, Curve]) -> None:
    """A token above one half is the argmax, and the argmax is what the rule emits after the path."""
    upper = [point for point in drawn["threshold"].points if point.value is not None and point.value >= 0.5]
    assert {(point.tv_greedy, point.tv > 0.5) for point in upper} == {(0.0, True)}


def test_entropy_that_is_never_reached_leaves_speculative_sampling(drawn: dict[str, Curve]) -> None:
    """Three tokens have at most ln 3 = 1.0986 nats, so nothing is deferred at 1.1."""
    last, chain = drawn["entropy"].points[-1], drawn["chain"].points[0]
    assert (last.value, last.acceptance_length, last.tv) == (1.1, chain.acceptance_length, 0.0)


@pytest.mark.parametrize("rule", ["threshold", "typical", "relaxed", "entropy"])
def test_laxer_parameter_accepts_no_less(rule: str, drawn: dict[str, Curve]) -> None:
    lengths = [point.acceptance_length for point in drawn[rule].points]
    assert lengths == sorted(lengths, reverse=rule != "relaxed") and lengths[0] != lengths[-1]


def test_threshold_of_one_accepts_points_alone(drawn: dict[str, Curve]) -> None:
    """No probability exceeds one."""
    assert drawn["threshold"].points[-1].acceptance_length == 1.0


CURVE = Curve("typical", "epsilon", (Point(0.1, 2.5, 0.25, 0.5, 0.75), Point(1.0, 1.25, 0.125, 0.25, 0.5)))
STAR = Curve("chain", "", (Point(None, 2.0, 0.0, 0.0, 1.0),))


def test_table_of_a_curve() -> None:
    assert table(CURVE).splitlines() == [
        "typical: epsilon",
        "    0.1  length 2.5000  TV 0.2500 (largest 0.5000)  TV to greedy 0.7500",
        "      1  length 1.2500  TV 0.1250 (largest 0.2500)  TV to greedy 0.5000",
    ]


def test_figure_has_a_panel_a_law_and_a_line_a_curve() -> None:
    records = [
        {"rule": one.rule, "parameter": one.parameter, "points": [vars(point) for point in one.points]}
        for one in (CURVE, STAR)
    ]
    panels = figure(records, title="two curves").axes
    assert [[line.get_xydata().tolist() for line in panel.lines] for panel in panels] == [
        [[[2.5, 0.25], [1.25, 0.125]], [[2.0, 0.0]]],
        [[[2.5, 0.75], [1.25, 0.5]], [[2.0, 1.0]]],
    ]


def test_command_writes_drawing_and_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawing, data = tmp_path / "lossiness.png", tmp_path / "lossiness.json"
    code = cli.main(["law", "--models", "1", "--lossiness", str(drawing), "--lossiness", str(data)])
    rules = [curve["rule"] for curve in json.loads(data.read_text("utf-8"))["curves"]]
    assert (code, drawing.read_bytes()[:4], rules) == (
        0,
        b"\x89PNG",
        ["threshold", "typical", "relaxed", "entropy", "chain", "block", "greedy"],
    )
