"""Layouts: which columns a known data set has, and what of a row is asked.

Answers, references and tests in a row are never asked. A row that asks nothing is left out, counted and told; one that
is broken is refused.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from specbench.models import unknown_name
from specbench.workloads.workload import Prompt

# What SPEED-Bench ships in place of texts that its own script (prepare_data.py) fetches.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
MIN_WORDS = 40  # of a paragraph that is continued

Row = Mapping[str, Any]
Turns = tuple[str, ...]


class _LeftOut(Exception):
    """The row asks nothing. The text says why, after "rows"."""


@dataclass(frozen=True)
class Hub:
    """Where the hub has it: what `load` takes when it is asked for the layout's name."""

    id: str
    config: str | None
    split: str


@dataclass(frozen=True)
class Layout:
    """needs: columns that every row has; a file is told by them. turns: of a row. id, category: columns, None where a
    data set has none: rows are then numbered, and the category is the layout's name."""

    name: str
    needs: tuple[str, ...]
    turns: Callable[[Row], Turns]
    id: str | None = None
    category: str | None = None
    is_chat: bool = True
    hub: Hub | None = None


def prompts_of(layout: Layout, rows: Iterable[tuple[str, Row]], source: str) -> tuple[tuple[Prompt, ...], Turns]:
    """The prompts, and notes about rows that were left out.

    rows: (where it stands, row) pairs. ValueError names the place. Of rows with one id the later ones get their number.
    """
    prompts: dict[str, Prompt] = {}
    left_out: Counter[str] = Counter()
    for num, (where, row) in enumerate(rows, start=1):
        try:
            if not set(layout.needs) <= set(row):
                raise _lacks(layout, [str(one) for one in row])
            name = f"{layout.name}-{num}" if layout.id is None or row.get(layout.id) is None else str(row[layout.id])
            category = layout.name if layout.category is None else row[layout.category]
            if not isinstance(category, str):
                raise ValueError(f"{layout.category} = {category!r} must be a text")
            name = f"{name}#{num}" if name in prompts else name
            prompts[name] = Prompt(name, category, layout.turns(row), source, layout.is_chat)
        except _LeftOut as reason:
            left_out[str(reason)] += 1
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    notes = tuple(f"{count} of {num} rows {reason} and are left out" for reason, count in left_out.items())
    if not prompts:
        raise ValueError("; ".join(notes) or "there are no rows")
    return tuple(prompts.values()), notes


def layout_for(columns: Sequence[str], name: str | None = None) -> Layout:
    """The layout of that name that fits the columns; without a name the first that fits. ValueError when none does."""
    known = list(dict.fromkeys(one.name for one in LAYOUTS))
    if name is not None and name not in known:
        raise ValueError(unknown_name("layout", name, known))
    asked = [one for one in LAYOUTS if name in (None, one.name)]
    for one in asked:
        if set(one.needs) <= set(columns):
            return one
    if name is None:
        needs = "; ".join(f"{one.name} needs {', '.join(one.needs)}" for one in LAYOUTS)
        raise ValueError(f"the columns {', '.join(columns)} fit no layout: {needs}")
    raise _lacks(max(asked, key=lambda one: len(set(one.needs) & set(columns))), columns)


def _lacks(layout: Layout, columns: Sequence[str]) -> ValueError:
    missing = next(one for one in layout.needs if one not in columns)
    near = get_close_matches(missing, columns, n=1)
    return ValueError(
        f"there is no column {missing}{f' (is it {near[0]}?)' if near else ''}: the layout {layout.name} needs "
        f"{', '.join(layout.needs)}, and there are {', '.join(columns)}"
    )


def _list_in(column: str) -> Callable[[Row], Turns]:
    """A list of texts, or, since a CSV cell holds no list, the same as JSON."""

    def turns(row: Row) -> Turns:
        found = row[column]
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except json.JSONDecodeError as error:
                raise ValueError(f"{column} = {found[:60]!r} must be a list of texts, in a CSV file as JSON") from error
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise ValueError(f"{column} = {str(found)[:60]!r} must be a list of texts")
        return _asked(found)

    return turns


def _text_in(column: str) -> Callable[[Row], Turns]:
    return lambda row: _asked([_text(row, column)])


def _conversation(row: Row) -> Turns:
    """What the human says. Answers are dropped: the model gives its own."""
    found = row["conversations"]
    if isinstance(found, str):
        raise ValueError("conversations must be a list of {from, value}: a CSV file cannot hold it")
    try:
        said = [(_text(one, "from"), _text(one, "value")) for one in found if one["from"] != "system"]
    except (KeyError, TypeError) as error:
        raise ValueError("conversations must be a list of {from, value}") from error
    if said and said[0][0] not in _HUMAN:
        raise _LeftOut("begin with an answer")
    return _asked([value for who, value in said if who in _HUMAN])


def _paragraph(row: Row) -> Turns:
    """The first half of its words, to be continued."""
    words = _text(row, "text").split()
    if len(words) < MIN_WORDS:
        raise _LeftOut(f"have fewer than {MIN_WORDS} words")
    return (" ".join(words[: len(words) // 2]),)


def _text(row: Row, column: str) -> str:
    if not isinstance(row[column], str):
        raise ValueError(f"{column} = {str(row[column])[:60]} must be a text")
    return str(row[column])


def _asked(turns: Sequence[str]) -> Turns:
    if any(PLACEHOLDER in one for one in turns):
        raise _LeftOut("hold SPEED-Bench's placeholder, whose text its prepare_data.py fetches,")
    if not turns or not all(one.strip() for one in turns):
        raise _LeftOut("ask nothing")
    return tuple(turns)


_HUMAN = ("human", "user")
_QUESTIONS = ("question_id", "category", "turns")

# The first that fits is taken, so what has more columns stands first. MT-Bench's own file has the columns of
# Spec-Bench, which contains it; the hub's copy has others.
LAYOUTS = (
    Layout("specbench", ("id", "category", "turns"), _list_in("turns"), "id", "category"),
    Layout(
        "speed-bench", (*_QUESTIONS, "sub_category"), _list_in("turns"), "question_id", "category",
        hub=Hub("nvidia/SPEED-Bench", "qualitative", "test"),
    ),
    Layout("spec-bench", _QUESTIONS, _list_in("turns"), "question_id", "category"),
    Layout(
        "mt-bench", ("prompt_id", "category", "prompt"), _list_in("prompt"), "prompt_id", "category",
        hub=Hub("HuggingFaceH4/mt_bench_prompts", None, "train"),
    ),
    Layout("mt-bench", _QUESTIONS, _list_in("turns"), "question_id", "category"),
    Layout("sharegpt", ("conversations",), _conversation, "id"),
    Layout(
        "humaneval", ("task_id", "prompt"), _text_in("prompt"), "task_id",
        hub=Hub("openai/openai_humaneval", None, "test"),
    ),
    Layout("gsm8k", ("question", "answer"), _text_in("question"), hub=Hub("openai/gsm8k", "main", "test")),
    Layout(
        "wikitext", ("text",), _paragraph, is_chat=False,
        hub=Hub("Salesforce/wikitext", "wikitext-2-raw-v1", "test"),
    ),
)  # fmt: skip
