"""specbench.prompts: what is shipped is whole and varied, bad files are told by line, encoding uses the template."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from specbench.models import find_model
from specbench.prompts import CATEGORIES, Prompt, encode, load_prompts, parse_prompts


class WordTokenizer:
    """A token a word, by length; the template adds 1 before each turn and 2 where the answer starts."""

    def __init__(self, chat_template: str | None, answer: type = list) -> None:
        self.chat_template = chat_template
        self.answer = answer

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [len(word) + 10 for word in text.split()]}

    def apply_chat_template(
        self, messages: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        ids = [token for one in messages for token in [1, *self(one["content"])["input_ids"]]]
        ids += [2] * add_generation_prompt
        return ids if self.answer is list else {"input_ids": ids, "attention_mask": [1] * len(ids)}


DIALOGUE = Prompt("d", "dialogue", (("user", "one two"), ("assistant", "three"), ("user", "four")))


def test_there_are_at_least_24_prompts_and_three_of_each_category() -> None:
    counts = Counter(prompt.category for prompt in load_prompts())
    assert sum(counts.values()) >= 24
    assert min(counts[category] for category in CATEGORIES) >= 3


def test_every_dialogue_has_two_turns_of_the_user() -> None:
    dialogues = [prompt for prompt in load_prompts() if prompt.category == "dialogue"]
    assert {sum(role == "user" for role, _ in prompt.messages) for prompt in dialogues} == {2}


def test_both_chat_messages_and_bare_text_are_shipped() -> None:
    assert {bool(prompt.messages) for prompt in load_prompts()} == {True, False}


def test_repeating_prompts_give_an_ngram_drafter_something_to_find() -> None:
    """Some three characters stand there at least three times; three, since what repeats in Chinese is short."""
    for prompt in load_prompts():
        if prompt.category == "repeating":
            text = prompt.text or prompt.messages[-1][1]
            windows = Counter(text[start : start + 3] for start in range(len(text) - 2))
            assert max(windows.values()) >= 3, prompt.id


@pytest.mark.parametrize("answer", [list, dict], ids=["list", "BatchEncoding"])
def test_messages_go_through_the_chat_template(answer: type) -> None:
    assert encode(DIALOGUE, WordTokenizer("template", answer)) == [1, 13, 13, 1, 15, 1, 14, 2]


def test_messages_are_joined_when_the_tokenizer_has_no_template() -> None:
    assert encode(DIALOGUE, WordTokenizer(None)) == [13, 13, 15, 14]


def test_bare_text_is_tokenised_without_the_template() -> None:
    assert encode(Prompt("t", "english", text="one three"), WordTokenizer("template")) == [13, 15]


def test_shipped_prompts_are_short_for_the_real_tokenizer() -> None:
    found = find_model("smollm2")
    if found is None:
        pytest.skip("smollm2 is not fetched: run `specbench model fetch smollm2`")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(found.path)
    lengths = {prompt.id: len(encode(prompt, tokenizer)) for prompt in load_prompts()}
    assert {prompt: num for prompt, num in lengths.items() if not 10 <= num <= 128} == {}


GOOD = {"id": "a", "category": "english", "text": "Once"}
BAD_LINES = {
    "no JSON": ("{", "line 2: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    "no object": ("[1]", "line 2: a prompt must be an object, not list"),
    "twice": (json.dumps(GOOD), "line 2: prompt a is there twice"),
    "unknown field": (
        '{"id": "b", "category": "english", "txt": "x"}',
        "line 2: unknown field txt: a prompt has id, category, and messages or text",
    ),
    "no id": ('{"category": "english", "text": "x"}', "line 2: id = None must be a string"),
    "empty id": ('{"id": "", "category": "english", "text": "x"}', "line 2: id is empty: a prompt is named in reports"),
    "category": (
        '{"id": "b", "category": "poetry", "text": "x"}',
        "line 2: prompt b: category = 'poetry' must be one of arithmetic, chinese, code, dialogue, english, repeating",
    ),
    "neither": (
        '{"id": "b", "category": "english"}',
        "line 2: prompt b: exactly one of messages and text must be given",
    ),
    "role": (
        '{"id": "b", "category": "english", "messages": [{"role": "bot", "content": "x"}]}',
        "line 2: prompt b: messages[0] role = 'bot' must be one of system, user, assistant",
    ),
    "empty content": (
        '{"id": "b", "category": "english", "messages": [{"role": "user", "content": " "}]}',
        "line 2: prompt b: messages[0] content is empty",
    ),
    "last word": (
        '{"id": "b", "category": "english", "messages": [{"role": "assistant", "content": "x"}]}',
        "line 2: prompt b: the last message is assistant's, must be user's",
    ),
    "no messages": (
        '{"id": "b", "category": "english", "messages": ["x"]}',
        "line 2: prompt b: messages must be a list of {role, content}",
    ),
    "text": ('{"id": "b", "category": "english", "text": 3}', "line 2: prompt b: text must be a string"),
}


@pytest.mark.parametrize("case", BAD_LINES)
def test_bad_prompt_is_told_by_line(case: str) -> None:
    line, message = BAD_LINES[case]
    with pytest.raises(ValueError) as caught:
        parse_prompts(json.dumps(GOOD) + "\n" + line)
    assert str(caught.value) == message


def test_blank_lines_and_line_separators_inside_text_are_no_new_prompts() -> None:
    text = json.dumps({**GOOD, "text": "one\u2028two"}, ensure_ascii=False)
    assert parse_prompts(f"\n{text}\n\n") == (Prompt("a", "english", text="one\u2028two"),)
