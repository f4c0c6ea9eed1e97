"""Prompts as token ids, turn by turn, through the tokenizer's chat template where it has one; and their lengths."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from specbench.prompts import encode_messages, encode_text
from specbench.workloads.workload import Prompt, Workload

RANDOM_WARNING = (
    "random tokens are no text that anybody sends: SPEED-Bench's authors found that they overestimate throughput by "
    "about 23 %; measure speed on real prompts"
)


def encode(prompt: Prompt, tokenizer: Any, answers: Sequence[str] = ()) -> list[int]:
    """Token ids of the next turn with all that came before: turn 0 without answers, turn 1 with the answer to turn 0.

    tokenizer: a transformers tokenizer. answers: the model's own, as text. With a template they stand in its frame, and
    the opening of the next answer ends the ids; without one (`has_template`) turns and answers are joined by newlines.
    """
    if len(answers) >= len(prompt.turns):
        raise ValueError(f"prompt {prompt.id}: {len(answers)} answers, but it has {len(prompt.turns)} turns")
    if not prompt.is_chat:
        return encode_text(prompt.turns[0], tokenizer)
    messages = [("user", prompt.turns[0])]
    for answer, turn in zip(answers, prompt.turns[1:], strict=False):
        messages += [("assistant", answer), ("user", turn)]
    return encode_messages(messages, tokenizer)


def has_template(prompt: Prompt, tokenizer: Any) -> bool:
    """Whether `encode` puts the tokenizer's chat template around the prompt. Reports say which."""
    return prompt.is_chat and bool(getattr(tokenizer, "chat_template", None))


def lengths(workload: Workload, tokenizer: Any) -> dict[str, int]:
    """Tokens of each prompt's first turn as it is sent, by id. Later turns hold answers, which only a model knows."""
    return {one.id: len(encode(one, tokenizer)) for one in workload.prompts}


def fitted(tokens: Sequence[int], length: int, filler: Sequence[int]) -> tuple[int, ...]:
    """Token ids of exactly that length: what is too much is cut out of the middle, what is missing is put there from
    `filler`, over and over. Both ends stay, and with them the frame of a chat template and the question.

    ValueError where there is nothing to fill with.
    """
    if length < 2:
        raise ValueError(f"length = {length} must be >= 2: a beginning and an end")
    half, missing = min(length, len(tokens)) // 2, length - len(tokens)
    if missing > 0 and not filler:
        raise ValueError(f"filler is empty, and {missing} tokens are missing")
    more = [filler[idx % len(filler)] for idx in range(missing)]
    return (*tokens[:half], *more, *tokens[len(tokens) - (length - half - len(more)) :])


def random_tokens(tokenizer: Any, *, num_prompts: int, num_tokens: int, seed: int = 0) -> Workload:
    """A load of uniformly random tokens, for those who need one. It prints a warning, which is in `notes` too.

    The texts are decoded from num_tokens ids that are no special ones. Encoded again they have about as many: pieces of
    characters do not survive. What `lengths` says is what is sent.
    """
    import torch

    if num_prompts < 1 or num_tokens < 1:
        raise ValueError(f"num_prompts = {num_prompts} and num_tokens = {num_tokens} must be >= 1")
    print(f"warning: {RANDOM_WARNING}", file=sys.stderr)
    special = set(tokenizer.all_special_ids)
    ordinary = torch.tensor([token for token in range(len(tokenizer)) if token not in special])
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for num in range(1, num_prompts + 1):
        drawn = ordinary[torch.randint(len(ordinary), (num_tokens,), generator=generator)]  # [num_tokens]
        text = tokenizer.decode(drawn.tolist())
        prompts.append(Prompt(f"random-{num}", "random", (text,), f"random tokens, seed {seed}", is_chat=False))
    return Workload("random tokens", tuple(prompts), (RANDOM_WARNING,))
