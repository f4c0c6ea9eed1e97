"""specbench report: its numbers by hand, its HTML read by a parser, its bytes twice. bench_file makes up the rows."""

from __future__ import annotations

import colorsys
import csv
import io
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import bench_file
import pytest
from bench_file import LONG

from specbench import cli
from specbench.bench.rows import Gate, read
from specbench.record import BUG, EQUAL, NOT_TESTED, ClaimRecord, RunRecord
from specbench.reports import bench, figures, page, report, theme, trees
from specbench.reports.bench import Headline, Study
from specbench.reports.sections import Drawing, Listing, Section
from specbench.reports.table import Column, Table, count, text
from specbench.tree import DraftTree

ROOT = Path(__file__).resolve().parents[1]
NGRAM_4 = 32 ** (1 / 6)  # of the six prompts 4, 2, 1, 2, 2 and 1 times as fast as plain decoding
VOID = {"br", "hr", "img", "input", "link", "meta", "source", "col", "wbr"}
SHOWN_HOSTILE = '<script>alert("x")</script> & \\u202eabc\\u202c \\x1b[31m $a_b$ |`*'


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bench_file.write(tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def study(rows: Path) -> Study:
    return Study(read(rows))


@pytest.fixture(scope="module")
def folder(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A written report."""
    return report.write([rows], tmp_path_factory.mktemp("out")).parent


def row_of(table: Table, **wanted: Any) -> dict[str, Any]:
    """The one row that has these values."""
    (found,) = [row for row in table.rows if wanted.items() <= row.items()]
    return dict(found)


# Numbers


def test_headline_says_what_how_much_against_what_where_and_whether_it_was_right(study: Study) -> None:
    told = bench.headline(study)
    assert (told.sentence, told.place, told.facts) == (
        "ngram-4 decodes 1.78× as fast as plain (95 % interval 1.26 to 2.52 over 6 prompts), and its output was right "
        "but for ties that rounding explains.",
        "Made-Up CPU <b>9000</b> (2 cores, cpu), made-up-135M in bf16",
        (
            ("output", "NOISE, 5 of 6 equal"),
            ("time a token", "100.0 → 50.0 ms"),
            ("time to the first token", "500 → 500 ms"),
            ("acceptance length", "2.20 tokens a forward"),
        ),
    )


def test_headline_of_a_run_in_which_nothing_is_faster_says_so(tmp_path: Path) -> None:
    names = ("plain", "early_exit-2")
    told = bench.headline(study_of(tmp_path, lambda one: one.get("setting") in (None, *names)))
    assert told.sentence == (
        "No setting is shown to be faster than plain: the best, early_exit-2, is at 1.00× (95 % interval 0.95 to 1.05 "
        "over 6 prompts), and its output was right: plain decoding's, token for token."
    )


def test_headline_without_a_verdict_has_no_speedup(tmp_path: Path) -> None:
    told = bench.headline(study_of(tmp_path, lambda one: one["kind"] != "gate"))
    assert told.sentence == "No speed-up can be given: no plain decoding was both right and timed."


def test_headline_of_one_prompt_has_no_interval(tmp_path: Path) -> None:
    told = bench.headline(study_of(tmp_path, lambda one: one.get("prompt", "p0") == "p0"))
    assert told.sentence == (
        "No setting is shown to be faster than plain: the best, ngram-4, is at 4.00× (over 1 prompt, too few for an "
        "interval), and its output was right but for ties that rounding explains."
    )


def test_speedups_are_the_hand_computed_ones(study: Study) -> None:
    found = {row["setting"]: (row["speedup"], row["n"]) for row in bench.speeds(study).rows}
    assert found == {
        "ngram-4": (pytest.approx(NGRAM_4), 6),
        "ngram-8": (pytest.approx(1.6), 6),
        "ngram-2": (pytest.approx(1.25), 6),
        "early_exit-2": (pytest.approx((10 / 11 * 10 / 9) ** (1 / 6)), 6),
        "slow": (pytest.approx(0.5), 6),
        "plain": (pytest.approx(1.0), 6),
        "transformers-plain": (pytest.approx(0.5), 6),
    }


def test_speeds_are_the_hand_computed_ones(study: Study) -> None:
    """Of ngram-4 the median prompt takes 0.05 s a token; 0.5 + 10 x 0.1 s in all against 0.5 + 10 x its own."""
    row = row_of(bench.speeds(study), setting="ngram-4")
    whole = [1.5 / (0.5 + 10 * pace) for pace in bench_file.PACE["ngram-4"]]
    product = whole[0] * whole[1] * whole[2] * whole[3] * whole[4] * whole[5]
    assert (row["seconds_a_token"], row["tokens_a_second"], row["first_seconds"], row["end_to_end"]) == (
        pytest.approx(0.05),
        pytest.approx(20.0),
        0.5,
        pytest.approx(product ** (1 / 6)),
    )


def test_categories_are_points_with_their_n(study: Study) -> None:
    found = {row["category"]: (row["speedup"], row["n"]) for row in bench.categories(study).rows if is_best(row)}
    assert found == {
        "code": (pytest.approx(8**0.5), 2),
        "prose": (pytest.approx(4 ** (1 / 3)), 3),
        "中文": (pytest.approx(1.0), 1),
    }


def is_best(row: Any) -> bool:
    return row["setting"] == "ngram-4"


def test_a_setting_that_is_not_verified_has_no_speed_anywhere(study: Study, folder: Path) -> None:
    """The hostile one would be at 10.00x, the lookup at 2.00x."""
    cells = {
        row["setting"]: (row["verdict"], row["speedup"], row["low"], row["high"]) for row in bench.verdicts(study).rows
    }
    texts = (folder / "index.html").read_text("utf-8") + (folder / "summary.md").read_text("utf-8")
    timed = [(folder / f"data/{name}.csv").read_text("utf-8") for name in ("speedups", "rounds", "categories", "duels")]
    assert (cells[SHOWN_HOSTILE], cells["lookup"], "10.00×" in texts, [one for one in timed if "lookup," in one]) == (
        (BUG, None, None, None),
        (NOT_TESTED, None, None, None),
        False,
        [],
    )


def test_planted_gate_that_passes_everything_shows_what_the_one_above_looks_for(
    rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Gate, "passed", property(lambda self: True))
    table = bench.verdicts(Study(read(rows)))
    found = row_of(table, setting=SHOWN_HOSTILE)["speedup"]
    assert (found, table.columns[2].shown(found)) == (pytest.approx(10.0), "10.00×")


@pytest.mark.parametrize(("checked", "law"), [(True, "checked"), (False, "not checked")])
def test_sampled_setting_says_whether_its_law_was_checked_and_counts_no_equal_outputs(
    checked: bool, law: str, tmp_path: Path
) -> None:
    records = bench_file.records()
    for one in records:
        if one["kind"] == "gate" and one["setting"] == "ngram-4":
            one.update(law_checked=checked, verdict="EQUAL" if checked else "NOT TESTED")
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    sampled = Study(read(path))
    row = row_of(bench.verdicts(sampled), setting="ngram-4")
    told = bench.headline(sampled).sentence
    assert (row["law"], row["equal"], row["at_least"], row["speedup"] is not None) == (law, None, None, checked)
    assert (told.startswith("ngram-4 "), told.endswith("its draws were right: their law was checked.")) == (
        checked,
    ) * 2


def test_share_of_equal_outputs_has_its_exact_bound(study: Study) -> None:
    """All of 6: 0.05^(1/6)."""
    row = row_of(bench.verdicts(study), setting="ngram-8")
    assert (row["equal"], row["outputs"], row["at_least"]) == (6, 6, pytest.approx(0.05 ** (1 / 6)))


def test_knee_is_the_shortest_draft_that_the_best_one_does_not_beat(study: Study) -> None:
    """1.25 at 2 is below 1.26, the lower end of the best one's interval."""
    marks = {row["gamma"]: row["mark"] for row in bench.gammas(study).rows if row["speedup"] is not None}
    assert ("knee" in marks[2], "knee" in marks[8], marks[4]) == (False, False, "knee, measured best")


def test_acceptance_by_depth_is_the_hand_counted_one(study: Study) -> None:
    """Each request has five rounds 4 deep that accept 4, 2, 0, 0 and 0; there are 12 requests."""
    table = bench.depths(study)
    found = [
        (row["depth"], row["drafted"], row["reached"], row["accepted"], row["conditional"], row["joint"])
        for row in table.rows
        if is_best(row)
    ]
    assert found == [
        (1, 60, 60, 24, 0.4, 0.4),
        (2, 60, 24, 24, 1.0, 0.4),
        (3, 60, 24, 12, 0.5, 0.2),
        (4, 60, 12, 12, 1.0, 0.2),
    ]


def test_decoder_that_does_not_say_how_deep_it_drafted_has_a_length_and_no_depths(study: Study) -> None:
    row = row_of(bench.acceptances(study), setting="lookup")
    depths = [one for one in bench.depths(study).rows if one["setting"] == "lookup"]
    assert (row["length"], row["rate"], row["verified"], depths) == (pytest.approx(11 / 5), None, "no", [])


def test_histogram_counts_rounds(study: Study) -> None:
    found = [(row["length"], row["rounds"], row["share"]) for row in bench.lengths(study).rows if is_best(row)]
    assert found == [(1, 36, 0.6), (3, 12, 0.2), (5, 12, 0.2)]


def test_round_breakdown_is_the_hand_computed_one(study: Study) -> None:
    """Draft, verify, commit and all take 1, 8, 0.5 and 10 paces of 10 tokens in 4 rounds; the mean pace is 1/16 s."""
    row = row_of(bench.phases(study), setting="ngram-4")
    found = [row[name] for name in ("draft", "verify", "commit", "host", "total", "host_share", "round")]
    assert found == pytest.approx([0.00625, 0.05, 0.003125, 0.003125, 0.0625, 0.05, 0.15625])


def test_rows_that_do_not_tell_their_phases_are_counted(study: Study) -> None:
    row = row_of(bench.phases(study), setting="slow")
    assert (row["n"], row["untold"]) == (10, 2)


def test_memory_stands_beside_its_prediction(study: Study) -> None:
    row = row_of(bench.memory(study), setting="ngram-4")
    found = {name: row[name] / 2**20 for name in ("weights", "measured_weights", "measured_working", "peak")}
    assert found == {"weights": 290, "measured_weights": 300, "measured_working": 60, "peak": 460}


def test_forward_cost_is_told_as_a_multiple_of_one_row(study: Study) -> None:
    assert [(row["rows"], row["times"]) for row in bench.costs(study).rows] == [
        (1, 1.0),
        (8, pytest.approx(1.1)),
        (16, pytest.approx(1.25)),
    ]


def test_looping_share_is_of_the_baselines_tokens(study: Study) -> None:
    found = {row["category"]: (row["looping"], row["tokens"]) for row in bench.loops(study).rows}
    assert found == {
        "code": (0, 22),
        "prose": (0, 33),
        "中文": (pytest.approx(5 / 11), 11),
        "all": (pytest.approx(5 / 66), 66),
    }


def study_of(tmp_path: Path, keep: Any) -> Study:
    """Of the records that are kept; the settings without rows stay in the header."""
    lines = [json.dumps(one) for one in bench_file.records() if one["kind"] == "header" or keep(one)]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return Study(read(path))


def test_best_setting_with_a_hostile_name_has_its_figures(tmp_path: Path) -> None:
    """Its name is another in tables than in the rows."""
    records = [{**one, "verdict": "EQUAL"} if one["kind"] == "gate" else one for one in bench_file.records()]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    found = {one.id: one for one in report.read([path])[1]}
    titles = [one.title for one in found["speedups"].drawings]
    svg = found["acceptance"].drawings[0].svg
    assert (titles[1], svg.count(">&lt;script&gt;alert")) == (f"{SHOWN_HOSTILE}, by category", 1)


# The page


class Page(HTMLParser):
    """problems: what is not well-formed, not self-contained, or runs."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.problems: list[str] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._rows: list[list[str]] = []
        self._is_cell = self._has_value = False
        self.feed(html)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]
        self.problems += [f"id {one} stands twice" for one in {one for one in self.ids if self.ids.count(one) > 1}]
        styles = re.findall(r"(?:url\(|@import)[^;)]*", html)
        self.problems += [f"{one} reaches out" for one in styles if not one.startswith("url(#")]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "iframe", "object", "embed", "link", "base", "form", "img"):
            self.problems.append(f"there is a <{tag}>")
        for name, value in attributes:
            if name.startswith("on"):
                self.problems.append(f"<{tag}> has {name}")
            if name in ("href", "src", "xlink:href", "srcset", "action") and not (value or "").startswith("#"):
                self.problems.append(f"<{tag}> reaches out to {value}")
            if name == "id":
                self.ids.append(value or "")
        found = dict(attributes)
        if tag == "table":
            self._rows = self.tables[found["data-name"] or ""] = []
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._is_cell, self._has_value = True, False
            self._rows[-1].append("")
        if tag == "data":
            self._has_value = True
            self._rows[-1][-1] = found["value"] or ""

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> closes something else")
        if tag in ("td", "th"):
            self._is_cell = False

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self._is_cell and not self._has_value and self.open[-1] in ("td", "th"):
            self._rows[-1][-1] += data


@pytest.fixture(scope="module")
def parsed(folder: Path) -> Page:
    return Page((folder / "index.html").read_text("utf-8"))


def test_page_is_well_formed_self_contained_and_runs_nothing(parsed: Page) -> None:
    assert parsed.problems == []


BAD_PAGES = {
    "<p><script>1</script></p>": ["there is a <script>"],
    '<p onclick="x">a</p>': ["<p> has onclick"],
    '<a href="https://example.com">a</a>': ["<a> reaches out to https://example.com"],
    "<p><b>a</p>": ["</p> closes something else", "<p> is never closed"],
    '<p id="a">a</p><p id="a">b</p>': ["id a stands twice"],
    "<style>p{background:url(https://example.com/x.png)}</style>": ["url(https://example.com/x.png reaches out"],
}


@pytest.mark.parametrize("html", BAD_PAGES)
def test_planted_bad_page_is_caught(html: str) -> None:
    assert Page(html).problems == BAD_PAGES[html]


def test_names_of_a_target_are_shown_as_text(parsed: Page) -> None:
    said = "".join(parsed.texts)
    assert (SHOWN_HOSTILE in said, LONG in said, 'onerror="alert(1)"' in said, "</pre><script>" in said) == (True,) * 4


def test_files_hold_no_control_characters_and_no_marks_that_turn_text_round(folder: Path) -> None:
    texts = "".join(path.read_text("utf-8") for path in folder.rglob("*.*") if path.suffix != ".png")
    assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", texts) == []


def test_every_table_of_the_page_is_its_csv(parsed: Page, folder: Path) -> None:
    """Numbers with all their digits; a text that a spreadsheet would compute has an apostrophe in CSV alone."""
    files = {path.stem: list(csv.reader(io.StringIO(path.read_text("utf-8")))) for path in folder.glob("data/*.csv")}
    shown = {
        name: [["" if cell == "–" else re.sub("^[●◐✕○] ", "", cell) for cell in row] for row in rows[1:]]
        for name, rows in parsed.tables.items()
    }
    assert shown == {name: rows[1:] for name, rows in files.items()}


def test_every_figure_has_its_numbers_beside_it_and_its_files(folder: Path) -> None:
    html = (folder / "index.html").read_text("utf-8")
    figures_in_page = re.findall(r"<figure.*?</figure>", html, re.DOTALL)
    tables = [re.findall(r'data-name="([^"]+)"', one) for one in figures_in_page]
    assert (len(figures_in_page), tables) == (
        len(list(folder.glob("figures/*.svg"))),
        [
            ["speedups"],
            ["categories"],
            ["gamma"],
            ["depths"],
            ["lengths"],
            ["rounds"],
            ["memory"],
            ["costs"],
            ["looping"],
        ],
    )
    assert {path.stem for path in folder.glob("figures/*.png")} == {path.stem for path in folder.glob("figures/*.svg")}


def test_sections_come_in_the_order_of_a_reader_with_one_minute(folder: Path) -> None:
    assert re.findall(r'<section id="(\w+)"', (folder / "index.html").read_text("utf-8")) == [
        *("verdicts", "speedups", "gamma", "acceptance", "lengths", "rounds", "memory", "costs", "looping", "machine")
    ]


def test_same_rows_give_the_same_bytes_in_another_process_without_torch(
    rows: Path, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "again"
    code = (
        "import sys; from specbench import cli\n"
        f"code = cli.main(['report', {str(rows)!r}, '--out', {str(out)!r}])\n"
        "sys.exit(code or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", f"{out / 'index.html'}\n")
    assert files_of(out) == files_of(folder)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_page_of_a_wide_sweep_stays_below_two_megabytes(tmp_path: Path) -> None:
    """Sixteen gammas of six drafters, eight categories of prompts."""
    records = bench_file.records()
    header, some = records[0], [one for one in records if one.get("setting") == "ngram-8"]
    settings = header["definition"]["settings"]
    for drafter in "abcdef":
        for gamma in range(1, 17):
            name = f"{drafter} {gamma}"
            settings[name] = {**settings["ngram-8"], "drafter": drafter, "gamma": gamma}
            records += [{**one, "setting": name, "key": f"{name}/{idx}"} for idx, one in enumerate(some)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    written = report.write([path], tmp_path / "out")
    assert written.stat().st_size < 2_000_000 and Page(written.read_text("utf-8")).problems == []


# Markdown


def test_markdown_is_headline_findings_tables_and_commands() -> None:
    table = Table("t", "A table", (text("name", "name"), count("n", "n")), ({"name": "a|b <i>", "n": 1234},))
    drawing = Drawing("d", "A drawing", "<svg/>", b"", table)
    section = Section("s", "Why?", "It *is*.", ("n: a count.",), (drawing,), (table,), (), (Listing("Run", "a ```b"),))
    assert page.markdown(Headline("Fast.", "A machine", (), ("A note.",)), [section], title="report") == (
        "# report\n\n**Fast.**\n\nA machine\n\nA note.\n\n## Why?\n\nIt &#42;is&#42;.\n\n"
        "A drawing: [data](data/t.csv), [figure](figures/d.png)\n\n"
        "| name | n |\n|---|---:|\n| a&#124;b &#60;i&#62; | 1,234 |\n\n- n: a count.\n\nRun:\n\n"
        "````text\na ```b\n````\n"
    )


# Tables


def test_csv_keeps_every_digit_and_defuses_formulas() -> None:
    columns = (text("name", "name"), Column("value", "value", 1))
    made = ({"name": "=1+1", "value": 1 / 3}, {"name": None, "value": float("nan")})
    assert Table("t", "t", columns, made).as_csv() == "name,value\n'=1+1,0.3333333333333333\n,\n"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"n": "many"}, "table t: n = 'many' must be a number or null"),
        ({"m": 1}, "table t: row 0 has ['m'], must have ['n']"),
    ],
)
def test_wrong_row_of_a_table_is_told(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Table("t", "t", (count("n", "n"),), (row,))
    assert str(caught.value) == message


# Figures


def test_dots_of_the_speedups_are_the_tables(study: Study) -> None:
    rows = bench.speeds(study).rows
    with theme.style():
        drawn = figures.speedups(rows, bench.categories(study).rows)
    dots = [line for line in drawn.axes[0].lines if line.get_markersize() == 6.5]
    assert [line.get_xdata()[0] for line in dots] == [row["speedup"] for row in rows]


def test_name_that_begins_with_an_underscore_is_in_the_legend(study: Study) -> None:
    """matplotlib leaves such labels out."""
    rows = [{**row, "setting": "_mine"} for row in bench.depths(study).rows if is_best(row)]
    with theme.style():
        (legend,) = figures.depths(rows).legends
    assert [one.get_text().strip() for one in legend.get_texts()] == ["_mine"]


@pytest.fixture
def ladder(tmp_path: Path) -> Path:
    """The same rows, of the preset `ladder`."""
    header, *others = bench_file.records()
    path = tmp_path / "ladder.jsonl"
    lines = [{**header, "command": "specbench bench --preset ladder"}, *others]
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return path


def test_steps_of_a_ladder_are_our_own_settings_in_their_order(ladder: Path, study: Study) -> None:
    """Of the last, which has no verdict, nothing but its rounds: 11 tokens of 5, as of all that draft."""
    rows = bench.ladder(Study(read(ladder))).rows
    found = [(row["setting"], row["verdict"], row["length"], row["speedup"]) for row in rows]
    assert found[:2] == [("plain", "EQUAL", 1.0, 1.0), ("ngram-2", "EQUAL", 2.2, pytest.approx(1.25))]
    assert found[-1][1:] == ("NOT TESTED", 2.2, None)
    assert [one[0] for one in found[2:6]] == ["ngram-4", "ngram-8", "early_exit-2", "slow"]
    assert bench.ladder(study).rows == ()


def test_each_step_of_a_ladder_has_its_plot(ladder: Path) -> None:
    rows = bench.ladder(Study(read(ladder))).rows
    with theme.style():
        panels = figures.ladder(rows).axes
    bars = [panel.patches[0].get_width() for panel in panels]
    dots = [[line.get_xdata()[0] for line in panel.lines if line.get_markersize() == 6.5] for panel in panels]
    assert bars == [row["length"] for row in rows]
    assert dots == [[] if row["speedup"] is None else [row["speedup"]] for row in rows]


def test_section_of_a_ladder_stands_behind_the_verdicts(ladder: Path) -> None:
    found = report.read([ladder])[1]
    assert [one.id for one in found][:3] == ["verdicts", "ladder", "speedups"]
    assert found[1].finding == "6 of 7 steps are verified."


def test_curves_of_gamma_are_the_tables(study: Study) -> None:
    with theme.style():
        (panel,) = figures.gamma(bench.gammas(study).rows).axes
    (measured,) = [line for line in panel.lines if line.get_markersize() == 4]
    assert measured.get_xydata().tolist() == [[2, pytest.approx(1.25)], [4, pytest.approx(NGRAM_4)], [8, 1.6]]


def test_figures_wear_the_pages_colours_and_no_text_is_taken_for_a_tag() -> None:
    with theme.style():
        drawing = theme.figure(1.0)
        drawing.text(0.1, 0.5, f'id="a" href="#b" {theme.ACCENT} <b>', color=theme.ACCENT)
        svg = theme.for_page(theme.as_svg(drawing), "x")
    (said,) = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert said == f'id="a" href="#b" {theme.ACCENT} &lt;b&gt;'
    assert (re.findall("#[0-9a-f]{6}", svg.replace(said, "")), "var(--accent)" in svg) == ([], True)


def channel(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4


def linear(colour: str) -> tuple[float, float, float]:
    red, green, blue = (channel(int(colour[at : at + 2], 16)) for at in (1, 3, 5))
    return red, green, blue


def contrast(one: str, other: str) -> float:
    """WCAG 2.2."""
    lights = sorted(0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in (linear(one), linear(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


@pytest.mark.parametrize("colours", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_text_and_series_stand_out_from_the_paper(colours: dict[str, str]) -> None:
    """4.5 to 1 for text, which every series' colour is used for, too."""
    names = ("ink", "soft", *theme.SERIES)
    assert {name: contrast(colours[name], colours["paper"]) >= 4.5 for name in names} == dict.fromkeys(names, True)


# Machado, Oliveira & Fernandes (2009), severity 1, on linear RGB.
BLIND = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.3039)),
}


def lab(rgb: tuple[float, ...]) -> tuple[float, float, float]:
    """CIE L*a*b* of linear sRGB, white D65."""
    red, green, blue = (min(1.0, max(0.0, one)) for one in rgb)
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    fx, fy, fz = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def distance(one: str, other: str, matrix: tuple[tuple[float, ...], ...]) -> float:
    """CIE76 as somebody with that vision sees it."""
    seen = []
    for colour in (one, other):
        rgb = linear(colour)
        seen.append(lab(tuple(sum(a * b for a, b in zip(line, rgb, strict=True)) for line in matrix)))
    return sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5


@pytest.mark.parametrize("kind", BLIND)
@pytest.mark.parametrize("colours", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_series_are_told_apart_without_one_kind_of_cones(colours: dict[str, str], kind: str) -> None:
    """A distance of 2.3 is just noticeable; 8 is clear side by side, and each series has its own marker besides."""
    series = [colours[name] for name in theme.SERIES]
    pairs = {
        (idx, at): distance(one, other, BLIND[kind])
        for idx, one in enumerate(series)
        for at, other in enumerate(series[:idx])
    }
    assert {pair: round(one, 1) for pair, one in pairs.items() if one < 8} == {}


def test_planted_red_and_green_are_one_colour_without_their_cones() -> None:
    red, green = (
        "#" + "".join(f"{round(255 * one):02x}" for one in colorsys.hls_to_rgb(hue, 0.4, 0.6)) for hue in (0.06, 0.23)
    )
    assert distance(red, green, BLIND["deutan"]) < distance(red, green, ((1, 0, 0), (0, 1, 0), (0, 0, 1))) / 2


# Trees of failures


MESSAGE = """GreedyMismatch: output differs      [claim greedy.lossless, level 1]

  MUST      emit what plain decoding emits
  tree      7             root
            ├─ 3          accepted, then <b>4</b>
            │  └─ 12      argmax \u202e9
            └─ 9
  narrower  tree.mask holds"""


def test_tree_is_read_from_the_drawing_in_a_message() -> None:
    nodes = [(one.token, one.parent, one.note) for one in trees.tree_of(MESSAGE)]
    assert nodes == [
        ("7", -1, "root"),
        ("3", 0, "accepted, then <b>4</b>"),
        ("12", 1, "argmax \\u202e9"),
        ("9", 0, ""),
    ]


@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1, 2, 3], [-1, 0, 0, 1, 1, 2, 5, 0], [-1, 0, 1, 1, 0, 4, 4, 6, 2]])
def test_drawing_of_a_tree_is_read_back(parents: list[int]) -> None:
    tree = DraftTree.of(range(100, 100 + len(parents)), parents)
    drawing = tree.draw({0: "root"}).splitlines()
    message = "\n".join([f"  tree      {drawing[0]}", *(" " * 12 + line for line in drawing[1:]), "  narrower  x"])
    nodes = trees.tree_of(message)
    by_token = {one.token: nodes[one.parent].token if one.parent >= 0 else None for one in nodes}
    assert by_token == {str(100 + node): str(100 + parent) if node else None for node, parent in enumerate(parents)}


@pytest.mark.parametrize("message", ["", "no tree here", "  tree      no number", "  tree\n  7"])
def test_message_without_a_tree_has_none(message: str) -> None:
    assert trees.tree_of(message) == []


def test_tree_is_drawn_as_well_formed_svg_with_its_notes_as_text() -> None:
    root = ET.fromstring(trees.drawing(trees.tree_of(MESSAGE)))
    space = "{http://www.w3.org/2000/svg}"
    texts = [one.text for one in root.iter(f"{space}text")]
    assert texts == ["7", "root", "3", "accepted, then <b>4</b>", "12", "argmax \\u202e9", "9"]
    assert len(list(root.iter(f"{space}path"))) == 3


def consistency(path: Path, *claims: ClaimRecord) -> Path:
    RunRecord("mypkg.mod:Adapter<script>", "0.0.0", "quick", 0, subjects=["tiny-fp64"], claims=list(claims)).write(path)
    return path


def failing(claim: str, drafts: int | None, **fields: Any) -> ClaimRecord:
    return ClaimRecord(claim, "tiny-fp64", BUG, message=MESSAGE, shrunk_drafts=drafts, num_cases=3, **fields)


def test_smallest_failing_tree_of_each_claim_is_drawn(tmp_path: Path) -> None:
    """A failure that the ledger knows is none, and one claim on two subjects is drawn once."""
    again = replace(failing("tree.mask", 9), subject="other")
    claims = (again, failing("tree.mask", 2), failing("greedy.lossless", 3), failing("progress", 1, known="#12"))
    record = consistency(tmp_path / "report.json", *claims, ClaimRecord("tree.logits", "tiny-fp64", EQUAL))
    out = report.write([record], tmp_path / "out").parent
    headings = re.findall(r"<h3>([^<]*) on ([^:<]*):", (out / "index.html").read_text("utf-8"))
    assert (headings, sorted(path.name for path in out.glob("figures/*"))) == (
        [("tree.mask", "tiny-fp64"), ("greedy.lossless", "tiny-fp64")],
        ["tree-1.svg", "tree-2.svg"],
    )
    assert Page((out / "index.html").read_text("utf-8")).problems == []


# Which files make a page


def engines_record() -> dict[str, Any]:
    facts = {"bound": 0.6, "worst_regret": 0.3, "num_left": 14, "plain_left": 6, "plain_tokens": 800}
    common = {
        "engine": "<script>",
        "model": "m",
        "weights": "bf16",
        "num_outputs": 8,
        "num_tokens": 700,
        "num_wrong": 0,
    }
    return {
        "schema": 1,
        "command": "specbench engines x",
        "engines": [
            {**common, "mode": "plain", "verdict": "EQUAL", "sentence": "all equal", "facts": {}},
            {**common, "mode": "drafts", "verdict": "NOISE", "sentence": "ties", "facts": facts},
        ],
    }


def lossiness_record() -> dict[str, Any]:
    point = {"value": 0.5, "acceptance_length": 2.0, "tv": 0.1, "tv_largest": 0.2, "tv_greedy": 0.3}
    curves = [
        {"rule": "typical", "parameter": "epsilon", "points": [point, {**point, "value": 1.0, "tv": 0.2}]},
        {"rule": "chain", "parameter": "", "points": [{**point, "value": None, "tv": 0.0}]},
    ]
    return {"schema": 1, "command": "specbench law", "drafts": "chains", "curves": curves}


def kernel_rows() -> list[dict[str, Any]]:
    """3.2e8 bytes in 1e-4 s are 80 % of 4e12 bytes/s; at 8e14 FLOP/s 1.6e10 operations take a quarter of that."""
    seconds = {"median": 1e-4, "q25": 9e-5, "q75": 1.1e-4, "min": 8e-5, "n": 50}
    cell = {"P": 8192, "N": 16, "B": 8}
    common = {"row": "time", "kernel": "tree_attention", "cell": cell, "why": "", "bytes": 3.2e8, "flops": 1.6e10}
    own = {**common, "contender": "tree_attention", "role": "own", "status": "timed", "seconds": seconds}
    peer = {
        **common,
        "contender": "<script>",
        "role": "peer",
        "status": "timed",
        "seconds": {**seconds, "median": 2e-4},
    }
    return [
        {"row": "run", "device": "made-up card <b>"},
        {"row": "ceiling", "name": "copy", "value": 4e12},
        {"row": "ceiling", "name": "matrix", "value": 8e14},
        {**own, "mask_bytes": 8 * 16 * 8},
        peer,
    ]


@pytest.fixture
def recordings(rows: Path, tmp_path: Path) -> dict[str, Path]:
    found = {"bench": rows, "consistency": consistency(tmp_path / "report.json", failing("tree.mask", 2))}
    for name, made in (("engines", engines_record()), ("lossiness", lossiness_record())):
        found[name] = tmp_path / f"{name}.json"
        found[name].write_text(json.dumps(made), encoding="utf-8")
    found["kernels"] = tmp_path / "kernels.jsonl"
    found["kernels"].write_text("".join(json.dumps(one) + "\n" for one in kernel_rows()), encoding="utf-8")
    return found


ALONE = {
    "consistency": "What fails, and on which tree? mypkg.mod:Adapter<script>: 1 of 1 cells fail.",
    "engines": "Are other engines right? 2 modes: 1 EQUAL, 1 NOISE.",
    "kernels": "of 7 targets reached on made-up card <b>; 1 cells of tree attention.",
    "lossiness": "What does a lossy rule give up? 2 rules, chains.",
}


@pytest.mark.parametrize("name", ALONE)
def test_page_is_made_of_any_recording_alone(name: str, recordings: dict[str, Path], tmp_path: Path) -> None:
    found = Page(report.write([recordings[name]], tmp_path / "out").read_text("utf-8"))
    assert (found.problems, ALONE[name] in "".join(found.texts)) == ([], True)


def test_page_of_all_recordings_begins_with_the_benchmark(recordings: dict[str, Path], tmp_path: Path) -> None:
    order = [recordings[name] for name in ("engines", "kernels", "consistency", "bench", "lossiness")]
    html = report.write(order, tmp_path / "out").read_text("utf-8")
    sections = re.findall(r'<section id="(\w+)"', html)
    assert (Page(html).problems, sections[0], sections[10:]) == (
        [],
        "verdicts",
        ["engines", "kernels", "consistency", "lossiness"],
    )


def test_regret_and_rates_of_an_engine_are_shares(recordings: dict[str, Path]) -> None:
    (section,) = report.read([recordings["engines"]])[1]
    rows = section.tables[0].rows
    assert [(row["regret"], row["left"], row["plain_left"]) for row in rows] == [
        (None, None, None),
        (0.3, pytest.approx(0.02), pytest.approx(0.0075)),
    ]


def test_kernel_is_held_to_its_roofline(recordings: dict[str, Path]) -> None:
    (section,) = report.read([recordings["kernels"]])[1]
    (row,) = section.drawings[0].table.rows
    found = [row[name] for name in ("seconds", "intensity", "rate", "roofline", "roofline_share", "over_peer")]
    assert (found, row["peer"]) == (pytest.approx([1e-4, 50, 1.6e14, 8e-5, 0.8, 2]), "<script>")


def test_report_replaces_an_earlier_one_and_leaves_nothing_of_it(recordings: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.write([recordings["engines"]], out)
    report.write([recordings["lossiness"]], out)
    assert sorted(files_of(out)) == [
        "data/lossiness.csv",
        "figures/lossiness.png",
        "figures/lossiness.svg",
        "index.html",
        "summary.md",
    ]


def test_folder_that_bench_wrote_stands_for_its_rows(tmp_path: Path) -> None:
    records = [one for one in bench_file.records() if one["kind"] in ("header", "gate")]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    headline, sections = report.read([tmp_path])
    assert (headline.sentence, [one.id for one in sections]) == (
        "No speed-up can be given: no plain decoding was both right and timed.",
        ["verdicts", "machine"],
    )


REFUSED = {
    "no JSON at all": (b"hello\n", f"{{file}}: this is no recording: expected {report.KINDS}"),
    "rows that break off": (
        b'{"kind": "header", "schema": 1}\n{"kind"\n',
        "{file} is not a file of rows: line 2 is no JSON",
    ),
    "another JSON": (b'{"a": 1}', f"{{file}}: this is no recording: expected {report.KINDS}"),
    "a list": (b"[1]", f"{{file}}: this is no recording: expected {report.KINDS}"),
    "no text": (b"\xff\xfe", f"{{file}}: this is no UTF-8 text: expected {report.KINDS}"),
    "engines without fields": (
        b'{"engines": [{}]}',
        "{file}: result 0 of the engines' audit lacks or has a wrong 'facts'",
    ),
    "curves without points": (
        b'{"curves": [{"rule": "r", "parameter": "p"}]}',
        "{file}: the lossiness record lacks or has a wrong 'points'",
    ),
    "a header without settings": (
        b'{"kind": "header", "schema": 1, "definition": {}}\n',
        "{file}: these rows cannot be summed up: KeyError 'settings'",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_recording_is_refused_in_a_sentence(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, message = REFUSED[case]
    file = tmp_path / "file.json"
    file.write_bytes(content)
    code = cli.main(["report", str(file), "--out", str(tmp_path / "out")])
    assert (code, capsys.readouterr().err) == (2, f"specbench: {message.format(file=file)}\n")


@pytest.fixture(scope="module")
def runs(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three of the same settings; the second, named last, in another version, the third without ngram-8."""
    folder, found = tmp_path_factory.mktemp("runs"), []
    for day, torch in ((3, "0.0.0"), (9, "0.0.1"), (5, "0.0.1")):
        records = bench_file.records()
        records[0] |= {"started": f"2026-01-0{day}T03:04:05Z", "versions": {"specbench": "0.0.0", "torch": torch}}
        kept = [one for one in records if day < 9 or one.get("setting") != "ngram-8"]
        found.append(folder / f"{day}.jsonl")
        found[-1].write_text("".join(json.dumps(one) + "\n" for one in kept), encoding="utf-8")
    return found


def test_history_holds_what_several_runs_have_in_the_order_of_their_time(runs: list[Path]) -> None:
    studies = sorted((Study(read(one)) for one in runs), key=lambda one: one.run.header["started"])
    table = bench.history(studies)
    days = {name: [row["run"][8:10] for row in table.rows if row["setting"] == name] for name in ("ngram-4", "ngram-8")}
    assert days == {"ngram-4": ["03", "05", "09"], "ngram-8": ["03", "05"]}
    assert [row["other"] for row in table.rows if row["setting"] == "ngram-4"] == ["", "versions", ""]
    assert row_of(table, setting="ngram-4", run="2026-01-05T03:04:05Z")["speedup"] == pytest.approx(NGRAM_4)


def test_a_report_of_several_runs_is_about_the_newest_and_draws_their_history(runs: list[Path], tmp_path: Path) -> None:
    folder = report.write(runs, tmp_path / "out").parent
    markdown = (folder / "summary.md").read_text("utf-8")
    assert "## What has changed since?\n\n3 runs, the newest of which the rest of this page is about." in markdown
    assert "They differ in versions too: see the table." in markdown
    assert (folder / "figures" / "history.svg").is_file() and (folder / "data" / "history.csv").is_file()
    settings = (folder / "data" / "verdicts.csv").read_text("utf-8")
    assert "ngram-8,NOT TESTED" in settings  # of the 9th, which did not measure it


def test_a_run_that_is_named_twice_is_refused(rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl: this run was named before"):
        report.write([rows, rows], tmp_path / "out")


def test_missing_file_two_of_a_kind_and_a_folder_of_others_are_refused(
    recordings: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work", encoding="utf-8")
    file = recordings["engines"]
    for words in ([tmp_path / "none.jsonl"], [file, file], [file, "--out", tmp_path / "mine"]):
        assert cli.main(["report", "--out", str(tmp_path / "out"), *map(str, words)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"specbench: {tmp_path / 'none.jsonl'} cannot be read: No such file or directory",
        f"specbench: {file} is a second recording of one kind (engines): a report takes one of each",
        f"specbench: {tmp_path / 'mine'} holds other things than an earlier report: name a new or empty folder by "
        "--out",
    ]
    assert files_of(tmp_path / "mine") == {"thesis.txt": b"years of work"}
