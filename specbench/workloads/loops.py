"""How much of an output goes round in circles: what an n-gram drafter is flattered by."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PERIOD = 64
MIN_REPEATS = 3
MIN_LEN = 16  # tokens; shorter runs are ordinary writing: 000, ----, ha ha ha


def loop_share(tokens: Sequence[int]) -> float:
    """The share of tokens that lie in a loop, between 0 and 1; 0 for no tokens.

    A loop is a stretch of at least 16 tokens, anywhere in the output, that is one piece of at most 64 tokens at least
    three times in a row; a last piece that is cut off still counts. All of its tokens count, those of the first piece
    too. A stretch that repeats for a reason (a table of zeros) counts as well: a drafter has it as easy there.
    """
    in_loop = [False] * len(tokens)
    for period in range(1, min(MAX_PERIOD, len(tokens) // MIN_REPEATS) + 1):
        start = 0  # of the stretch in which every token is the one `period` before
        for end in range(period, len(tokens) + 1):
            if end < len(tokens) and tokens[end] == tokens[end - period]:
                continue
            if end - start >= max(MIN_REPEATS * period, MIN_LEN):
                in_loop[start:end] = [True] * (end - start)
            start = end - period + 1
    return sum(in_loop) / len(tokens) if tokens else 0.0
