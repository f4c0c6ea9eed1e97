"""What is done to one row of logits before a token is picked: penalties, bad words, grammar, processors, least length.

The order and the meaning of each stand in `types.Sampling`. A row is processed once, with the history that its token
would follow; which history that is in a tree is the decoder's business (`steps.process`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.types import Sampling, Stop


def process_row(row: Tensor, history: Sequence[int], *, num_prompt: int, sampling: Sampling, stop: Stop) -> Tensor:
    """row: float [V], the target's logits after `history`, of which the first `num_prompt` tokens are the prompt.

    Returns a new row; forbidden tokens are -inf.
    """
    row, output = row.clone(), list(history[num_prompt:])
    seen = sorted(set(history))
    row[seen] = torch.where(
        row[seen] > 0, row[seen] / sampling.repetition_penalty, row[seen] * sampling.repetition_penalty
    )
    for token, count in Counter(output).items():
        row[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    row[forbidden_tokens(output, row.shape[0], sampling=sampling, stop=stop)] = -math.inf
    for processor in sampling.processors:
        row = processor(tuple(history), row)
    return row


def forbidden_tokens(output: Sequence[int], vocab_size: int, *, sampling: Sampling, stop: Stop) -> list[int]:
    """Tokens that must not follow `output`, in rising order."""
    forbidden = {one[-1] for one in sampling.bad_words if len(one) <= len(output) + 1 and _ends_with(output, one[:-1])}
    if sampling.grammar is not None:
        state = sampling.grammar.state_after(output)
        # Behind a draft that the grammar forbids there is no state: the row is never reached, so it stays as it is.
        if state is not None:
            forbidden |= set(range(vocab_size)) - {token for token, _ in sampling.grammar.transitions[state]}
    if len(output) < stop.min_new_tokens:
        forbidden |= set(stop.eos_token_ids)
    return sorted(token for token in forbidden if token < vocab_size)


def _ends_with(output: Sequence[int], end: Sequence[int]) -> bool:
    return not end or list(output[-len(end) :]) == list(end)
