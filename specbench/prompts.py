"""The prompts that real models are judged on: written for this project, shipped inside the package.

They cover what changes a drafter's luck: prose, Chinese, code, arithmetic, dialogue, text that repeats itself. They
are no benchmark of answer quality: nothing here says what a good answer would be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

CATEGORIES = ("arithmetic", "chinese", "code", "dialogue", "english", "repeating")
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True)
class Prompt:
    """Either `messages`, (role, content) pairs that end with the user's, or bare `text` to be continued."""

    id: str
    category: str
    messages: tuple[tuple[str, str], ...] = ()
    text: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            raise ValueError("id is empty: a prompt is named in reports")
        if self.category not in CATEGORIES:
            raise ValueError(f"prompt {self.id}: category = {self.category!r} must be one of {', '.join(CATEGORIES)}")
        if bool(self.messages) == bool(self.text):
            raise ValueError(f"prompt {self.id}: exactly one of messages and text must be given")
        for idx, (role, content) in enumerate(self.messages):
            if role not in ROLES:
                raise ValueError(f"prompt {self.id}: messages[{idx}] role = {role!r} must be one of {', '.join(ROLES)}")
            if not content.strip():
                raise ValueError(f"prompt {self.id}: messages[{idx}] content is empty")
        if self.messages and self.messages[-1][0] != "user":
            raise ValueError(f"prompt {self.id}: the last message is {self.messages[-1][0]}'s, must be user's")


def load_prompts() -> tuple[Prompt, ...]:
    """The shipped prompts, in file order."""
    return parse_prompts((files("specbench") / "prompts.jsonl").read_text(encoding="utf-8"))


def parse_prompts(lines: str) -> tuple[Prompt, ...]:
    """One JSON object a line; blank lines are skipped. ValueError names the line."""
    prompts: list[Prompt] = []
    for num, line in enumerate(lines.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(json.loads(line))
        except ValueError as error:
            raise ValueError(f"line {num}: {error}") from error
        if any(prompt.id == other.id for other in prompts):
            raise ValueError(f"line {num}: prompt {prompt.id} is there twice")
        prompts.append(prompt)
    return tuple(prompts)


def encode(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a prompt, the chat template and the opening of the answer included when the tokenizer has one.

    tokenizer: a transformers tokenizer. Without a template the contents are joined by newlines and tokenised plainly.
    """
    return encode_messages(prompt.messages, tokenizer) if prompt.messages else encode_text(prompt.text, tokenizer)


def encode_messages(messages: Sequence[tuple[str, str]], tokenizer: Any) -> list[int]:
    """As `encode`. messages: (role, content) pairs that end with the user's."""
    if not getattr(tokenizer, "chat_template", None):
        return encode_text("\n".join(content for _, content in messages), tokenizer)
    chat = [{"role": role, "content": content} for role, content in messages]
    return _ids(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True))


def encode_text(text: str, tokenizer: Any) -> list[int]:
    return _ids(tokenizer(text))


def _ids(encoded: Any) -> list[int]:
    # transformers 5 answers a template with a BatchEncoding, older releases with the bare list.
    ids = encoded["input_ids"] if isinstance(encoded, Mapping) else encoded
    return [int(token) for token in ids]


def _parse(record: Any) -> Prompt:
    if not isinstance(record, dict):
        raise ValueError(f"a prompt must be an object, not {type(record).__name__}")
    unknown = sorted(set(record) - {"id", "category", "messages", "text"})
    if unknown:
        raise ValueError(f"unknown field {', '.join(unknown)}: a prompt has id, category, and messages or text")
    for field in ("id", "category"):
        if not isinstance(record.get(field), str):
            raise ValueError(f"{field} = {record.get(field)!r} must be a string")
    if not isinstance(record.get("text", ""), str):
        raise ValueError(f"prompt {record['id']}: text must be a string")
    try:
        messages = tuple((str(one["role"]), str(one["content"])) for one in record.get("messages", ()))
    except (KeyError, TypeError) as error:
        raise ValueError(f"prompt {record['id']}: messages must be a list of {{role, content}}") from error
    return Prompt(record["id"], record["category"], messages, record.get("text", ""))
