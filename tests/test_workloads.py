"""specbench.workloads: what is shipped, what is read from which layout and file, what is refused, and the measures."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specbench import cli
from specbench.models import find_model
from specbench.workloads import chat
from specbench.workloads.chat import encode, fitted, has_template, lengths, random_tokens
from specbench.workloads.layouts import LAYOUTS, MIN_WORDS, PLACEHOLDER
from specbench.workloads.listing import listing
from specbench.workloads.load import load
from specbench.workloads.loops import loop_share
from specbench.workloads.workload import Prompt, Workload, by_length, sample

ROOT = Path(__file__).resolve().parents[1]
SPEC_BENCH = ROOT.parent / "shared" / "data" / "spec_bench" / "question.jsonl"


# What is shipped


def test_eight_categories_of_at_least_ten_prompts_are_shipped() -> None:
    categories = load().categories
    names = ["code", "summarising", "translation", "arithmetic", "dialogue", "retrieval", "languages", "writing"]
    assert list(categories) == names
    assert min(categories.values()) >= 10


def test_the_shipped_prompts_are_the_recorded_ones() -> None:
    """Results name this hash. Whoever changes a prompt changes it, here and on every page that shows results."""
    assert load().sha256 == "9434cd6f585c237585ed41a5165c4c0e1e4373286b4982c79d5fdaade6f43265"


def test_dialogues_alone_have_two_turns() -> None:
    turns = {(one.category == "dialogue", len(one.turns)) for one in load().prompts}
    assert turns == {(True, 2), (False, 1)}


@pytest.mark.parametrize(("category", "least", "most"), [("summarising", 150, 400), ("retrieval", 600, 1500)])
def test_given_texts_have_their_lengths(category: str, least: int, most: int) -> None:
    words = {one.id: len(one.turns[0].split()) for one in load().prompts if one.category == category}
    assert {name: num for name, num in words.items() if not least <= num <= most} == {}


def test_languages_are_many_and_chinese_is_among_them() -> None:
    scripts = {"[\u4e00-\u9fff]": "Han", "[\u3040-\u30ff]": "kana", "[\u0400-\u04ff]": "Cyrillic"}
    scripts |= {"[\u0600-\u06ff]": "Arabic", "[\u0900-\u097f]": "Devanagari", "[äéñã]": "Latin"}
    texts = [one.turns[0] for one in load().prompts if one.category == "languages"]
    assert {name for pattern, name in scripts.items() if any(re.search(pattern, text) for text in texts)} == set(
        scripts.values()
    )


def test_no_two_shipped_prompts_share_a_sentence() -> None:
    """Twelve words in a row: what a prompt has copied from another would be counted twice."""
    seen: dict[tuple[str, ...], str] = {}
    for one in load().prompts:
        words = " ".join(one.turns).split()
        for window in zip(*(words[start:] for start in range(12)), strict=False):
            assert seen.setdefault(window, one.id) == one.id


# Layouts

LONG = " ".join(f"word{num}" for num in range(MIN_WORDS + 2))
TALK = [
    {"from": "system", "value": "Be short."},
    {"from": "human", "value": "What is a sluice?"},
    {"from": "gpt", "value": "A gate for water."},
    {"from": "user", "value": "And a weir?"},
]
QUESTION = {"question_id": 7, "category": "mills", "turns": ["What is a sluice?", "And a weir?"]}
# layout: (a row of it, the prompt as it should be but for its source)
ROWS: dict[str, tuple[dict[str, Any], tuple[str, str, tuple[str, ...], bool]]] = {
    "specbench": (
        {"id": "own-1", "category": "mills", "turns": ["What is a sluice?"]},
        ("own-1", "mills", ("What is a sluice?",), True),
    ),
    "spec-bench": (QUESTION, ("7", "mills", ("What is a sluice?", "And a weir?"), True)),
    "speed-bench": (
        {**QUESTION, "question_id": "ab12", "sub_category": "water", "source": "x", "multiturn": True},
        ("ab12", "mills", ("What is a sluice?", "And a weir?"), True),
    ),
    "mt-bench": (
        {"prompt_id": 8, "category": "mills", "prompt": ["What is a sluice?"], "reference": []},
        ("8", "mills", ("What is a sluice?",), True),
    ),
    "sharegpt": (
        {"id": "t_0", "conversations": TALK},
        ("t_0", "sharegpt", ("What is a sluice?", "And a weir?"), True),
    ),
    "humaneval": (
        {"task_id": "Mills/0", "prompt": "def sluice():\n", "canonical_solution": "    return 1\n", "entry_point": "x"},
        ("Mills/0", "humaneval", ("def sluice():\n",), True),
    ),
    "gsm8k": (
        {"question": "A mill has 2 wheels. How many have 3 mills?", "answer": "6"},
        ("gsm8k-1", "gsm8k", ("A mill has 2 wheels. How many have 3 mills?",), True),
    ),
    "wikitext": (
        {"text": f" {LONG} \n"},
        ("wikitext-1", "wikitext", (" ".join(f"word{num}" for num in range(21)),), False),
    ),
}


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def write_gz(path: Path, rows: list[dict[str, Any]]) -> None:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_json(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(json.dumps(rows, indent=1), "utf-8")


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        for row in rows:
            writer.writerow({key: cell if isinstance(cell, str) else json.dumps(cell) for key, cell in row.items()})


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_arrow(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))


def write_splits(path: Path, rows: list[dict[str, Any]]) -> None:
    import datasets

    one = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"test": one}).save_to_disk(str(path))


def write_folder(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    write_jsonl(path / "test.jsonl", rows)


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_gz,
    "a.json": write_json,
    "a.csv": write_csv,
    "a.parquet": write_parquet,
    "arrow": write_arrow,
    "splits": write_splits,
    "folder": write_folder,
}
# A conversation does not fit into a cell of CSV (BROKEN has the message).
COMBINATIONS = [(layout, file) for layout in ROWS for file in WRITERS if (layout, file) != ("sharegpt", "a.csv")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `datasets` writes stays out of the user's cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.parametrize(("layout", "file"), COMBINATIONS, ids=lambda one: str(one))
def test_every_layout_is_told_from_its_columns_in_every_kind_of_file(layout: str, file: str, tmp_path: Path) -> None:
    row, (name, category, turns, is_chat) = ROWS[layout]
    path = tmp_path / file
    WRITERS[file](path, [row])
    assert load(path) == Workload(layout, (Prompt(name, category, turns, str(path), is_chat),))


def test_rows_are_there_for_every_layout() -> None:
    assert set(ROWS) == {one.name for one in LAYOUTS}


def test_plain_text_is_read_by_lines(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.tokens").write_text(f" = Mills = \n\n {LONG} \n{LONG} two\n", "utf-8")
    found = load(tmp_path / "wiki.test.tokens")
    assert [one.turns[0].split()[-1] for one in found.prompts] == ["word20", "word20"]
    assert found.notes == ("1 of 3 rows have fewer than 40 words and are left out",)


def test_mt_bench_may_be_said_of_a_file_with_spec_bench_s_columns(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "question.jsonl", [QUESTION])
    asked = load(tmp_path / "question.jsonl", layout="mt-bench")
    assert (asked.name, asked.prompts) == ("mt-bench", load(tmp_path / "question.jsonl").prompts)


def test_a_split_is_chosen_by_name(tmp_path: Path) -> None:
    import datasets

    rows = {split: datasets.Dataset.from_list([{"question": split, "answer": ""}]) for split in ("train", "test")}
    datasets.DatasetDict(rows).save_to_disk(str(tmp_path / "both"))
    assert load(tmp_path / "both", split="train").prompts[0].turns == ("train",)
    for options, asked in (({}, ""), ({"split": "dev"}, ", dev")):
        with pytest.raises(ValueError) as caught:
            load(tmp_path / "both", **options)
        assert str(caught.value) == f"{tmp_path}/both{asked}: there are the splits train, test: name one of them"


@pytest.mark.parametrize(
    ("file", "options", "message"),
    [
        ("a.jsonl", {"split": "test"}, " has neither configs nor splits: leave config and split out"),
        ("a.jsonl", {"config": "wet"}, " has neither configs nor splits: leave config and split out"),
        ("arrow", {"split": "test"}, ", test: it is one split without a name: leave split out"),
        ("arrow", {"config": "wet"}, ", wet: the folder cannot be read: what save_to_disk wrote has no configs"),
    ],
)
def test_a_config_or_split_is_never_passed_over(
    file: str, options: dict[str, str], message: str, tmp_path: Path
) -> None:
    WRITERS[file](tmp_path / file, [QUESTION])
    with pytest.raises(ValueError) as caught:
        load(tmp_path / file, **options)
    assert str(caught.value) == f"{tmp_path / file}{message}"


def test_the_same_prompts_have_one_hash_whatever_file_they_come_from(tmp_path: Path) -> None:
    row, _ = ROWS["gsm8k"]
    hashes = set()
    for file in ("a.jsonl", "a.csv", "a.parquet"):
        WRITERS[file](tmp_path / file, [row])
        hashes.add(load(tmp_path / file).sha256)
    assert len(hashes) == 1


@pytest.mark.parametrize("other", [{"id": "b"}, {"category": "c"}, {"turns": ("y",)}, {"is_chat": False}], ids=str)
def test_the_hash_tells_what_is_asked_apart(other: dict[str, Any]) -> None:
    prompt = {"id": "a", "category": "b", "turns": ("x",), "source": "s"}
    one, two = (Workload("w", (Prompt(**fields),)) for fields in (prompt, {**prompt, **other}))
    assert one.sha256 != two.sha256


def test_a_row_whose_id_is_taken_gets_its_number(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [QUESTION, QUESTION])
    assert [one.id for one in load(tmp_path / "a.jsonl").prompts] == ["7", "7#2"]


LEFT_OUT = {
    "a placeholder": (
        {**QUESTION, "turns": [PLACEHOLDER]},
        "1 of 2 rows hold SPEED-Bench's placeholder, whose text its prepare_data.py fetches, and are left out",
    ),
    "an empty question": ({**QUESTION, "turns": ["  "]}, "1 of 2 rows ask nothing and are left out"),
    "no question": ({**QUESTION, "turns": []}, "1 of 2 rows ask nothing and are left out"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_a_row_that_asks_nothing_is_left_out_and_told(case: str, tmp_path: Path) -> None:
    row, note = LEFT_OUT[case]
    write_jsonl(tmp_path / "a.jsonl", [row, {**QUESTION, "question_id": 9}])
    found = load(tmp_path / "a.jsonl")
    assert ([one.id for one in found.prompts], found.notes) == (["9"], (note,))


def test_a_conversation_that_begins_with_an_answer_is_left_out(tmp_path: Path) -> None:
    """ShareGPT's split file holds second halves of conversations: what they are about is not in them."""
    write_json(tmp_path / "a.json", [{"id": "t_1", "conversations": TALK[2:]}, {"id": "t_0", "conversations": TALK}])
    found = load(tmp_path / "a.json")
    assert [one.id for one in found.prompts] == ["t_0"]
    assert found.notes == ("1 of 2 rows begin with an answer and are left out",)


# What is refused: (name of the file, its content, options, the message without the path in front)
GOOD = json.dumps(QUESTION) + "\n"
BROKEN: dict[str, tuple[str, str | bytes, dict[str, str], str]] = {
    "empty": ("a.jsonl", "", {}, "there are no rows"),
    "empty list": ("a.json", "[]", {}, "there are no rows"),
    "head of a CSV alone": ("a.csv", "question,answer\n", {}, "there are no rows"),
    "nothing asked": (
        "a.txt", "short\n", {}, "1 of 1 rows have fewer than 40 words and are left out",
    ),
    "no JSON": (
        "a.jsonl", GOOD + "{", {},
        "line 2 is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    "no object": ("a.jsonl", "[1]\n", {}, "line 1 must be an object, not list"),
    "no list": ("a.json", "{}", {}, "the file must hold a list of objects, not dict"),
    "not UTF-8": ("a.jsonl", b'{"text": "\xff"}', {}, "the file is not UTF-8 text (invalid start byte)"),
    "short line of CSV": (
        "a.csv", "question,answer\nonly\n", {}, "line 2 has not as many cells as the first line",
    ),
    "a list in CSV that is not JSON": (
        "a.csv", "question_id,category,turns\n1,x,\"['a']\"\n", {},
        """line 2: turns = "['a']" must be a list of texts, in a CSV file as JSON""",
    ),
    "a conversation in CSV": (
        "a.csv", "conversations\n[]\n", {},
        "line 2: conversations must be a list of {from, value}: a CSV file cannot hold it",
    ),
    "unknown layout": (
        "a.jsonl", GOOD, {"layout": "specbnch"},
        "unknown layout 'specbnch': did you mean specbench or spec-bench or speed-bench? Known: specbench, "
        "speed-bench, spec-bench, mt-bench, sharegpt, humaneval, gsm8k, wikitext",
    ),
    "unknown columns": (
        "a.jsonl", '{"query": "x", "target": "y"}\n', {},
        "the columns query, target fit no layout: specbench needs id, category, turns; "
        "speed-bench needs question_id, category, turns, sub_category; spec-bench needs question_id, category, turns; "
        "mt-bench needs prompt_id, category, prompt; mt-bench needs question_id, category, turns; "
        "sharegpt needs conversations; humaneval needs task_id, prompt; gsm8k needs question, answer; "
        "wikitext needs text",
    ),
    "unknown column": (
        "a.jsonl", '{"questions": "x", "answer": "y"}\n', {"layout": "gsm8k"},
        "there is no column question (is it questions?): the layout gsm8k needs question, answer, and there are "
        "questions, answer",
    ),
    "unknown column of the layout that is closest": (
        "a.jsonl", '{"question_id": 1, "category": "x", "turn": ["y"]}\n', {"layout": "mt-bench"},
        "there is no column turns (is it turn?): the layout mt-bench needs question_id, category, turns, and there are "
        "question_id, category, turn",
    ),
    "a later row without a column": (
        "a.jsonl", GOOD + '{"question_id": 8, "category": "x"}\n', {},
        "line 2: there is no column turns: the layout spec-bench needs question_id, category, turns, and there are "
        "question_id, category",
    ),
    "a text where a list belongs": (
        "a.json", json.dumps([{**QUESTION, "turns": 3}]), {}, "row 1: turns = '3' must be a list of texts",
    ),
    "a number where a text belongs": (
        "a.jsonl", '{"question": 3, "answer": ""}\n', {}, "line 1: question = 3 must be a text",
    ),
    "a category that is no text": (
        "a.jsonl", json.dumps({**QUESTION, "category": None}), {}, "line 1: category = None must be a text",
    ),
    "an empty category": (
        "a.jsonl", json.dumps({**QUESTION, "category": ""}), {},
        "line 1: prompt '7': category is empty: reports name it",
    ),
    "a message that is none": (
        "a.jsonl", '{"conversations": ["x"]}\n', {}, "line 1: conversations must be a list of {from, value}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_gets_one_sentence(case: str, tmp_path: Path) -> None:
    file, content, options, message = BROKEN[case]
    path = tmp_path / file
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError) as caught:
        load(path, **options)
    assert str(caught.value) == f"{path}: {message}"


NAMES = {
    "gms8k": "unknown workload 'gms8k': did you mean gsm8k? Known: specbench, hostile, speed-bench, mt-bench, "
    "humaneval, gsm8k, wikitext, a file or folder, a hub id (owner/name)",
    "spec-bench": "spec-bench has no place on the hub that is known here: name its file, and layout spec-bench",
    "./nowhere/a.jsonl": "there is no file or folder ./nowhere/a.jsonl",
    "nowhere/a.jsonl": "there is no file or folder nowhere/a.jsonl",
}


def test_a_file_that_was_not_written_to_its_end_is_said(tmp_path: Path) -> None:
    write_gz(tmp_path / "whole.jsonl.gz", [QUESTION] * 2000)
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes((tmp_path / "whole.jsonl.gz").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cut.jsonl.gz: Compressed file ended before"):
        load(cut)


def test_json_that_is_nested_without_end_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("[" * 200_000)
    with pytest.raises(ValueError, match=r"a.jsonl: line 1 is not JSON: "):
        load(tmp_path / "a.jsonl")


def test_a_damaged_parquet_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"^/\S+/a.parquet: the file cannot be read as Parquet: .+"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_name_gets_one_sentence(name: str) -> None:
    with pytest.raises(ValueError) as caught:
        load(name)
    assert str(caught.value) == NAMES[name]


def test_an_ending_that_is_not_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(b"")
    with pytest.raises(ValueError) as caught:
        load(tmp_path / "a.pkl")
    endings = ".jsonl, .json, .csv, .parquet, .txt, .raw, .tokens, most of them also as .gz"
    assert str(caught.value) == f"{tmp_path}/a.pkl ends like no file that can be read: {endings}"


def test_a_folder_without_data_is_said(tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"none: the folder cannot be read: .+"):
        load(tmp_path / "none")


def test_code_beside_data_is_never_run(tmp_path: Path) -> None:
    """A folder named like its script is what `datasets` once took for a program."""
    folder = tmp_path / "mills"
    write_folder(folder, [QUESTION])
    (folder / "mills.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    with pytest.raises(ValueError, match="scripts are no longer supported"):
        load(folder)
    assert not (tmp_path / "was_run").exists()


# The hub


class Hub:
    """Stands for huggingface_hub and `datasets`: what was asked of them, and what they answer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, first: Exception | None = None, then: Any = None) -> None:
        import datasets
        import huggingface_hub

        self.asked: list[Any] = []

        def dataset_info(_: Any, hub_id: str, *, timeout: float) -> None:
            self.asked.append((hub_id, timeout))
            if first is not None:
                raise first

        def load_dataset(hub_id: str, config: str | None, **options: Any) -> Any:
            self.asked.append((hub_id, config, options))
            if isinstance(then, Exception):
                raise then
            return then

        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
        monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def dataset(*rows: dict[str, Any]) -> Any:
    import datasets

    return datasets.Dataset.from_list(list(rows))


def test_a_known_name_is_asked_of_the_hub_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, then=dataset(ROWS["gsm8k"][0]))
    (prompt,) = load("gsm8k").prompts
    assert hub.asked == [("openai/gsm8k", 10), ("openai/gsm8k", "main", {"split": "test"})]
    assert (prompt.id, prompt.source) == ("gsm8k-1", "openai/gsm8k, main, test")


def test_a_hub_id_is_told_by_its_columns_and_may_have_one_split(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch, then={"train": dataset(QUESTION)})
    assert load("someone/mills", config="wet").name == "spec-bench"
    assert hub.asked[1] == ("someone/mills", "wet", {"split": None})


def offline() -> Exception:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return OfflineModeIsEnabled("offline mode is enabled")


def refused() -> Exception:
    from huggingface_hub.errors import RepositoryNotFoundError

    answer: Any = SimpleNamespace(headers={}, request=None)
    return RepositoryNotFoundError("Repository Not Found.", response=answer)


HUB_ERRORS: dict[str, tuple[Callable[[], Exception] | None, Exception | None, int, str]] = {
    "no network": (
        lambda: OSError("Name or service not known"), None, 1,
        "the hub cannot be reached (Name or service not known): name a file or folder instead, or set "
        "HF_HUB_OFFLINE=1 if it was loaded before",
    ),
    "offline, and not in the cache": (
        offline, ConnectionError("Couldn't reach 'a/b' on the Hub"), 2,
        "Couldn't reach 'a/b' on the Hub: HF_HUB_OFFLINE is set, and it is not in the cache; name a file or folder "
        "instead",
    ),
    "nobody of that name": (refused, None, 1, "the hub refuses it: Repository Not Found"),
    "several configs": (
        None, ValueError("Config name is missing.\nPlease pick one among the available configs: ['wet', 'dry']"), 2,
        "Config name is missing. Please pick one among the available configs: ['wet', 'dry']",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HUB_ERRORS)
def test_what_the_hub_cannot_give_is_said_in_one_sentence(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, then, num_questions, message = HUB_ERRORS[case]
    hub = Hub(monkeypatch, first=None if first is None else first(), then=then)
    with pytest.raises(ValueError) as caught:
        load("a/b")
    assert str(caught.value) == f"a/b: {message}"
    assert len(hub.asked) == num_questions


def test_what_is_in_the_cache_is_read_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, first=offline(), then=dataset(QUESTION))
    assert load("a/b").name == "spec-bench"


@pytest.fixture
def deaf_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_hub_that_never_answers_is_asked_once(deaf_port: int) -> None:
    """With the real libraries: `datasets` alone asks six times, with half a minute of pauses, and says so on stderr."""
    code = "from specbench.workloads import load; load.HUB_SECONDS = 0.5; load.load('a/b')"
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    environment |= {"HF_ENDPOINT": f"http://127.0.0.1:{deaf_port}", "PYTHONPATH": str(ROOT), "NO_PROXY": "*"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "ValueError: a/b: the hub cannot be reached (timed out)" in done.stderr
    assert "Retrying" not in done.stderr


def test_spec_bench_s_480_questions_are_read() -> None:
    if not SPEC_BENCH.is_file():
        pytest.skip(f"there is no {SPEC_BENCH}: put Spec-Bench's question.jsonl there")
    found = load(SPEC_BENCH)
    assert (found.name, len(found.prompts), found.notes) == ("spec-bench", 480, ())
    assert sorted(found.categories.values()) == [10] * 8 + [80] * 5


# Tokens


class Tokenizer:
    """A token a word, by length. The template adds 1 before a user's turn, 3 before an answer, 2 where one starts."""

    def __init__(self, chat_template: str | None = "template") -> None:
        self.chat_template = chat_template

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) + 10 for word in text.split()]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> dict[str, list[int]]:
        marks = {"user": 1, "assistant": 3}
        ids = [token for one in messages for token in [marks[one["role"]], *self(one["content"])["input_ids"]]]
        return {"input_ids": ids + [2] * add_generation_prompt}


TWO_TURNS = Prompt("d", "dialogue", ("one two", "three"), "here")
CONTINUED = Prompt("t", "text", ("one three",), "here", is_chat=False)
ENCODED: dict[str, tuple[Prompt, str | None, list[str], list[int], bool]] = {
    "first turn": (TWO_TURNS, "template", [], [1, 13, 13, 2], True),
    "second turn": (TWO_TURNS, "template", ["a bb"], [1, 13, 13, 3, 11, 12, 1, 15, 2], True),
    "second turn without a template": (TWO_TURNS, None, ["a bb"], [13, 13, 11, 12, 15], False),
    "a text to be continued": (CONTINUED, "template", [], [13, 15], False),
}


@pytest.mark.parametrize("case", ENCODED)
def test_prompt_is_encoded_turn_by_turn(case: str) -> None:
    prompt, template, answers, ids, is_in_template = ENCODED[case]
    tokenizer = Tokenizer(template)
    assert (encode(prompt, tokenizer, answers), has_template(prompt, tokenizer)) == (ids, is_in_template)


def test_a_turn_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt d: 2 answers, but it has 2 turns"):
        encode(TWO_TURNS, Tokenizer(), ["a", "b"])


def test_lengths_are_those_of_the_first_turn() -> None:
    assert lengths(Workload("w", (TWO_TURNS, CONTINUED)), Tokenizer()) == {"d": 4, "t": 2}


def real_tokenizer() -> Any:
    found = find_model("smollm2")
    if found is None:
        pytest.skip("smollm2 is not fetched: run `specbench model fetch smollm2`")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(found.path)


def test_second_turn_of_the_real_template_begins_with_the_first_and_its_answer() -> None:
    """What a session has in its cache stays there: the second turn repeats the first, token by token."""
    tokenizer = real_tokenizer()
    prompt = next(one for one in load().prompts if one.category == "dialogue")
    first, second = encode(prompt, tokenizer), encode(prompt, tokenizer, ["A short answer."])
    assert second[: len(first)] == first
    assert tokenizer.decode(second[len(first) :]).startswith("A short answer.<|im_end|>")


def test_random_tokens_come_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    found = random_tokens(Digits(), num_prompts=2, num_tokens=50, seed=3)
    assert capsys.readouterr().err == f"warning: {chat.RANDOM_WARNING}\n"
    assert found.notes == (chat.RANDOM_WARNING,)
    assert "23 %" in chat.RANDOM_WARNING


class Digits:
    """Six tokens, of which 0, 4 and 5 are special."""

    all_special_ids = (0, 4, 5)

    def __len__(self) -> int:
        return 6

    def decode(self, ids: list[int]) -> str:
        return "".join(map(str, ids))


def test_random_tokens_are_all_ordinary_ones_and_no_others() -> None:
    (prompt,) = random_tokens(Digits(), num_prompts=1, num_tokens=200).prompts
    assert (set(prompt.turns[0]), len(prompt.turns[0]), prompt.is_chat) == (set("123"), 200, False)


def test_random_tokens_depend_on_the_seed_alone_and_have_about_their_length() -> None:
    tokenizer = real_tokenizer()
    one, same, other = (random_tokens(tokenizer, num_prompts=2, num_tokens=50, seed=seed) for seed in (3, 3, 4))
    assert one.sha256 == same.sha256 != other.sha256
    assert one.prompts[0].turns != one.prompts[1].turns
    assert all(45 <= num <= 75 for num in lengths(one, tokenizer).values())


# Parts of a workload


def workload(**categories: int) -> Workload:
    named = [(name, num) for name, count in categories.items() for num in range(count)]
    return Workload("w", tuple(Prompt(f"{name}-{num}", name, ("x",), "here") for name, num in named))


def test_sample_takes_so_many_of_each_category_in_order() -> None:
    found = sample(workload(a=5, b=3), 2, seed=1)
    assert found.categories == {"a": 2, "b": 2}
    ids = [one.id for one in found.prompts]
    assert ids == sorted(ids)


def test_sample_is_fixed_by_its_seed_on_every_machine() -> None:
    """`printf 0:a-2 | sha256sum` gives 1369...; of 0:a-0, 0:a-4, 0:a-3, 0:a-1 it gives 2c1b, 379f, 6371, 8511."""
    assert [one.id for one in sample(workload(a=5), 2, seed=0).prompts] == ["a-0", "a-2"]


def test_samples_are_nested_and_seeds_differ() -> None:
    whole = workload(a=30)
    small, large, other = (
        {one.id for one in sample(whole, num, seed=seed).prompts} for num, seed in ((5, 0), (10, 0), (10, 1))
    )
    assert small < large
    assert large != other


def test_sample_does_not_depend_on_what_else_is_there() -> None:
    alone, beside = sample(workload(a=9), 3), sample(workload(b=4, a=9), 3)
    assert [one.id for one in alone.prompts] == [one.id for one in beside.prompts if one.category == "a"]


@pytest.mark.parametrize(
    ("per_category", "message"),
    [(4, "category b of w has 3 prompts, 4 were asked for"), (0, "per_category = 0 must be >= 1")],
)
def test_a_sample_that_cannot_be_had_is_refused(per_category: int, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        sample(workload(a=5, b=3), per_category)
    assert str(caught.value) == message


def test_buckets_hold_lengths_up_to_and_with_their_bound() -> None:
    of = {"a-0": 1, "a-1": 4, "a-2": 5, "a-3": 90}
    found = by_length(workload(a=4), of, (4, 8, 16))
    assert {name: [one.id for one in bucket.prompts] for name, bucket in found.items()} == {
        "1-4": ["a-0", "a-1"],
        "5-8": ["a-2"],
        "17-": ["a-3"],
    }


@pytest.mark.parametrize("bounds", [(), (0, 5), (5, 5)])
def test_bounds_that_do_not_rise_are_refused(bounds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be increasing numbers of at least 1"):
        by_length(workload(a=1), {"a-0": 1}, bounds)


PROMPT = {"id": "a", "category": "b", "turns": ("x",), "source": "s"}
BAD_PROMPTS = {
    "no id": ({"id": ""}, "prompt '': id is empty: reports name it"),
    "no source": ({"source": ""}, "prompt 'a': source is empty: reports name it"),
    "no turn": ({"turns": ()}, "prompt 'a': turns is empty: nothing is asked"),
    "empty turn": ({"turns": ("x", " ")}, "prompt 'a': turns[1] is empty"),
    "two texts": (
        {"turns": ("x", "y"), "is_chat": False},
        "prompt 'a': a text to be continued has 1 turn, not 2",
    ),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_bad_prompt_is_refused(case: str) -> None:
    fields, message = BAD_PROMPTS[case]
    with pytest.raises(ValueError) as caught:
        Prompt(**{**PROMPT, **fields})  # type: ignore[arg-type]
    assert str(caught.value) == message


ONE = Prompt("a", "b", ("x",), "s")
BAD_WORKLOADS: dict[str, tuple[tuple[Prompt, ...], str]] = {
    "no prompts": ((), "workload w: prompts is empty: nothing is asked"),
    "an id twice": ((ONE, ONE), "workload w: prompt a is there twice"),
}


@pytest.mark.parametrize("case", BAD_WORKLOADS)
def test_bad_workload_is_refused(case: str) -> None:
    prompts, message = BAD_WORKLOADS[case]
    with pytest.raises(ValueError) as caught:
        Workload("w", prompts)
    assert str(caught.value) == message


# Loops: (tokens, how many of them lie in a loop), counted by hand

ABC = [1, 2, 3]
LOOPS: dict[str, tuple[list[int], int]] = {
    "nothing": ([], 0),
    "no repetition": (list(range(40)), 0),
    "one token for ever": ([7] * 20, 20),
    "three zeros are a number": ([5, 0, 0, 0, 6], 0),
    "fifteen tokens are too short": ([9] + [7] * 15 + [8], 0),
    "sixteen are enough": ([9] + [7] * 16 + [8], 16),
    "six times three with a beginning": ([8, 9] + ABC * 6, 18),
    "a last piece that is cut off": ([8, 9] + ABC * 6 + [1, 2], 20),
    "in the middle": ([8, 9] + ABC * 6 + [4, 5, 6], 18),
    "twice only": (list(range(20)) * 2, 0),
    "twice and a half": (list(range(20)) * 2 + list(range(10)), 0),
    "three times twenty": (list(range(20)) * 3, 60),
    "a period of 64": (list(range(64)) * 3, 192),
    "a period of 65": (list(range(65)) * 3, 0),
    "two loops": ([7] * 16 + [1, 2, 4, 8] + [9] * 17, 33),
    "one mistake breaks a loop": (ABC * 5 + [4] + ABC * 5, 0),
    "loops that overlap count once": ([1] * 16 + [2] + [1] * 16 + [2] + [1] * 16 + [2], 51),
}


@pytest.mark.parametrize("case", LOOPS)
def test_loop_share_as_counted_by_hand(case: str) -> None:
    tokens, num_in_loop = LOOPS[case]
    assert loop_share(tokens) == (num_in_loop / len(tokens) if tokens else 0.0)


# The command


def run(line: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = cli.main(shlex.split(line))
    out, err = capsys.readouterr()
    return code, out, err


def test_command_lists_categories_and_how_many(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [QUESTION, {**QUESTION, "question_id": 8, "turns": [""]}])
    code, out, err = run(f"workload {tmp_path}/a.jsonl", capsys)
    assert (code, err) == (0, "")
    assert out == (
        f"spec-bench: 1 prompts, sha256 {load(tmp_path / 'a.jsonl').sha256}\n"
        "note: 1 of 2 rows ask nothing and are left out\n"
        "\n"
        "category  prompts  turns\n"
        "mills           1      2\n"
    )


TOKENIZED = """
category  prompts  turns  least  median  90 %  most
mills           2    1-2      4       4     9     9
rivers          1      1      5       5     5     5
"""


def test_listing_gives_lengths_of_first_turns_by_nearest_rank() -> None:
    prompts = (
        Prompt("a", "mills", ("one two", "three"), "s"),
        Prompt("b", "mills", ("1 2 3 4 5 6 7",), "s"),
        Prompt("c", "rivers", ("1 2 3 4 5",), "s", is_chat=False),
    )
    text = listing(Workload("w", prompts), Tokenizer())
    assert text.endswith(TOKENIZED.rstrip("\n"))
    assert "note: 2 are sent in the chat template, 1 as plain text\n" in text


def test_listing_defuses_what_a_file_calls_its_categories() -> None:
    text = listing(Workload("w", (Prompt("a", "::error::\x1b[2J", ("x",), "s"),)))
    assert "::error" not in text and "\x1b" not in text


def test_command_defuses_what_a_file_calls_its_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"\x1b[2J": 1}])
    code, _, err = run(f"workload {tmp_path}/a.jsonl", capsys)
    assert (code, "\x1b" in err, "\\x1b[2J fit no layout" in err) == (2, False, True)


def test_command_takes_a_sample_and_a_tokenizer(capsys: pytest.CaptureFixture[str]) -> None:
    real_tokenizer()
    code, out, _ = run("workload --sample 2 --seed 5 --tokenizer smollm2", capsys)
    wanted = sample(load(), 2, seed=5)
    assert (code, out.splitlines()[0]) == (0, f"{wanted.name}: 16 prompts, sha256 {wanted.sha256}")
    assert re.search(r"^retrieval +2 +1 +\d{3,4} ", out, re.MULTILINE)


def test_command_says_what_is_no_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "specbench: --tokenizer smolm2 is not a folder, nor one of: smollm2\n"
    assert run("workload --tokenizer smolm2", capsys) == (2, "", message)
    code, _, err = run(f"workload --tokenizer {tmp_path}", capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert err.startswith(f"specbench: --tokenizer {tmp_path} holds no tokenizer that transformers loads: ")


def test_command_refuses_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("workload gms8k", capsys) == (2, "", f"specbench: {NAMES['gms8k']}\n")


# What keeps the page's measurement from taking half an hour here: the two prompts that it has written itself.
WHOLE, SMOKE = "workload, num_tokens = load(), 96", "workload, num_tokens = load('mine.jsonl'), 4"


def test_code_on_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/workloads.md: commands through the command line's main, and the Python, in one empty folder."""
    real_tokenizer()
    page = (ROOT / "docs" / "workloads.md").read_text("utf-8")
    assert page.count(WHOLE) == 1
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.replace(WHOLE, SMOKE), flags=re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"bash", "python", "text"}
    monkeypatch.chdir(tmp_path)
    for language, text in blocks:
        if language == "python":
            exec(compile(text, "docs/workloads.md", "exec"), {"__name__": "__main__"})
        elif language == "bash":
            for line in text.splitlines():
                program, *words = shlex.split(line)
                assert (program, cli.main(words)) == ("specbench", 0)


def test_the_page_lists_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    real_tokenizer()
    page = (ROOT / "docs" / "workloads.md").read_text("utf-8")
    listed = re.search(r"^<!-- output of: specbench (.*?) -->\n```text\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert run(listed[1], capsys) == (0, listed[2], "")


def test_the_page_s_table_has_the_columns_of_every_layout() -> None:
    page = (ROOT / "docs" / "workloads.md").read_text("utf-8")
    rows = {cells[1].strip(): cells[2] for line in page.splitlines() if len(cells := line.split("|")) == 6}
    for one in LAYOUTS:
        missing = [column for column in one.needs if f"`{column}`" not in rows[one.name]]
        assert not missing or (one.name == "mt-bench" and "or spec-bench's" in rows[one.name]), one


def test_the_page_counts_our_prompts() -> None:
    page = (ROOT / "docs" / "workloads.md").read_text("utf-8")
    ours = page[page.index("## Ours") : page.index("## In Python")]
    counted = {name: int(num) for name, num in re.findall(r"^\| (\w+) \| (\d+) \| ", ours, flags=re.MULTILINE)}
    assert counted == load().categories
    assert f"{len(load().prompts)} prompts, shipped" in ours


def test_hostile_prompts_come_with_the_package() -> None:
    workload = load("hostile")
    assert (workload.name, workload.categories) == ("hostile", {"noise": 6, "foreign": 6})
    assert not {one.turns for one in workload.prompts} & {one.turns for one in load().prompts}
    with pytest.raises(ValueError, match="hostile has neither configs nor splits"):
        load("hostile", split="test")


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (2, (1, 5)),
        (3, (1, 4, 5)),
        (5, (1, 2, 3, 4, 5)),
        (6, (1, 2, 7, 3, 4, 5)),
        (10, (1, 2, 7, 8, 9, 7, 8, 3, 4, 5)),
    ],
)
def test_a_text_is_fitted_in_its_middle(length: int, expected: tuple[int, ...]) -> None:
    assert fitted([1, 2, 3, 4, 5], length, [7, 8, 9]) == expected


def test_a_text_is_not_fitted_to_less_than_two_ends_or_with_nothing() -> None:
    with pytest.raises(ValueError, match="length = 1 must be >= 2"):
        fitted([1, 2, 3], 1, [7])
    with pytest.raises(ValueError, match="filler is empty, and 2 tokens are missing"):
        fitted([1, 2, 3], 5, [])
