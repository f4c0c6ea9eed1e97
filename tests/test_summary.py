"""specbench.summary: the job summary as Markdown, and that nothing a target says can leave its place in it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specbench.record import BUG, EQUAL, NOISE, NOT_TESTED, ClaimRecord, RunRecord
from specbench.summary import append, fenced, inline, markdown

MESSAGE = "CommitMismatch: row 2 is off      [claim kv.commit, level 3]\n\n  MUST      keep it"


def example() -> RunRecord:
    run = RunRecord("mine:Adapter", "0.1.0", "quick", 7, subjects=["tiny", "bf16"])
    run.claims = [
        ClaimRecord("tree.mask", "tiny", EQUAL, num_cases=20, num_nodes=200, seconds=1.0),
        ClaimRecord("tree.mask", "bf16", NOISE, num_cases=5, num_nodes=50),
        ClaimRecord("kv.commit", "tiny", BUG, num_cases=3, message=MESSAGE),
        ClaimRecord("kv.commit", "bf16", BUG, num_cases=3, message=MESSAGE, known="#12"),
        ClaimRecord("progress", "tiny", NOT_TESTED, "give the target generate"),
        ClaimRecord("progress", "bf16", NOT_TESTED, "quarantined by the ledger, #13: it crashes", known="#13"),
    ]
    return run


WHOLE = """\
## specbench: mine&#58;Adapter

1 BUG, 2 KNOWN, 1 NOISE, 1 EQUAL, 1 NOT TESTED (6 cells)

- **remove the entry**

| claim | verdict | tiny | bf16 | cases | nodes | seconds |
|---|---|---|---|---|---|---|
| tree.mask | NOISE | EQUAL | NOISE | 25 | 250 | 1.0 |
| kv.commit | BUG | BUG | KNOWN | 6 | 0 | 0.0 |
| progress | KNOWN | - | KNOWN | 0 | 0 | 0.0 |

<details><summary>BUG kv.commit on tiny</summary>

```text
CommitMismatch: row 2 is off      [claim kv.commit, level 3]

  MUST      keep it
```

</details>

- KNOWN kv.commit on bf16&#58; &#35;12&#58; CommitMismatch&#58; row 2 is off      &#91;claim kv.commit, level 3&#93;
- KNOWN progress on bf16&#58; &#35;13&#58; quarantined by the ledger, &#35;13&#58; it crashes

- NOT TESTED progress (tiny)&#58; give the target generate

Seed 7, profile quick, specbench 0.1.0. To repeat it:

```text
specbench check mine:Adapter --hypothesis-seed=7
```
"""


def test_the_summary_is_whole() -> None:
    text = markdown(
        example(), problems=["remove the entry"], command="specbench check mine:Adapter --hypothesis-seed=7"
    )
    assert text == WHOLE


HOSTILE = [
    "a|b",
    "<img src=x>",
    "</details>",
    "`code`",
    "[x](http://evil)",
    "![x](y)",
    "$x$",
    "a\n# b",
    "@team",
    "&lt;",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_inline_text_holds_no_character_that_markdown_or_html_reads(text: str) -> None:
    shown = inline(text)
    assert re.search(r"[<>|`\[\]$@\n]|&(?!#)", shown) is None


def test_an_entity_is_the_character_it_stands_for() -> None:
    assert inline("a|<b>") == "a&#124;&#60;b&#62;"


FENCES = ["```", "````\n</details>", "x ``` y", "`" * 50, "~~~"]


@pytest.mark.parametrize("text", FENCES)
def test_no_message_closes_its_own_fence(text: str) -> None:
    """CommonMark: a fence is closed by a line of at least as many backticks."""
    first, *body, last = fenced(text)
    fence = first.removesuffix("text")
    closing = [line for line in body if re.fullmatch(rf" {{0,3}}`{{{len(fence)},}}\s*", line)]
    assert (set(fence), closing, last) == ({"`"}, [], fence)


def test_a_target_with_markup_in_every_name_draws_one_table(tmp_path: Path) -> None:
    run = RunRecord("a|b`<c>\n\n# d", "0", "quick", 0, subjects=["x|y"])
    run.claims = [ClaimRecord("progress", "x|y", BUG, message="```\n</details>\n| a | b |")]
    text = markdown(run, problems=[], command="x")
    outside = re.sub(r"(?ms)^(`{3,})text$.*?^\1$", "", text)
    rows = [line for line in outside.splitlines() if line.startswith("|")]
    assert [line.count("|") for line in rows] == [7, 7, 7]
    assert (outside.count("</details>"), outside.count("\n#")) == (1, 0)


def test_a_run_of_nothing_but_bugs_stays_below_githubs_megabyte() -> None:
    names = [f"subject{number}" for number in range(40)]
    run = RunRecord("it", "0", "quick", 0, subjects=names)
    run.claims = [
        ClaimRecord(f"claim{row}", name, BUG, message="<" * 100_000, known="#1" if row % 2 else "")
        for row in range(60)
        for name in names
    ]
    run.claims += [ClaimRecord("last", f"o{number}", NOT_TESTED, "<" * 1000 + str(number)) for number in range(500)]
    text = markdown(run, problems=[], command="x")
    assert len(text.encode()) < 1_000_000
    assert "1180 more BUG cells: see the table and the run record." in text


def test_it_is_appended_behind_what_other_steps_wrote(tmp_path: Path) -> None:
    (tmp_path / "s.md").write_text("before\n")
    append(tmp_path / "s.md", "after")
    assert (tmp_path / "s.md").read_text() == "before\nafter\n"
