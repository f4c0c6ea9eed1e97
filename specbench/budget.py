"""The NOISE budget: does a decoder leave the oracle's argmax more often than plain decoding of the same weights does?

The unit is a generation, at the place where the two texts part. Each of them flips tokens (emits one that is not the
oracle's argmax) from there on, along its own text. If rounding alone is at work, which of the two flips more is the
toss of a coin. Tokens of one text are no units: texts run in circles, and a flip comes again with each of them.
"""

from __future__ import annotations

from fractions import Fraction
from math import comb

from specbench.record import ClaimRecord

FALSE_ALARM_RATE = 1e-6  # of a whole run


def p_value(num_worse: int, num_better: int) -> float:
    """The chance of so many worse generations or more among all unequal ones, if each is worse with chance 1/2.

    Exact, one-sided, conditional on the number of unequal ones: P(X >= num_worse), X ~ Binomial(worse + better, 1/2).
    """
    total = num_worse + num_better
    return float(Fraction(sum(comb(total, count) for count in range(num_worse, total + 1)), 2**total))


def exceeded(num_worse: int, num_better: int, *, num_tests: int) -> bool:
    """Whether that is rarer than the false-alarm rate, shared out among all tests of the run."""
    return p_value(num_worse, num_better) < FALSE_ALARM_RATE / max(1, num_tests)


def rarity(num_worse: int, num_better: int) -> str:
    """The same for people: once in so many runs."""
    return f"once in {1 / max(p_value(num_worse, num_better), 1e-300):.1g} runs"


def budget_sentence(record: ClaimRecord) -> str:
    """Both rates, for people; nothing when the two texts never parted."""
    tokens, flips, plain_flips = record.num_flip_tokens, record.num_flips, record.num_plain_flips
    if not tokens:
        return ""
    return (
        f"where the texts part, {flips} of {tokens} tokens ({100 * flips / tokens:.1f} %) are not the oracle's argmax, "
        f"in plain decoding's own text {plain_flips} ({100 * plain_flips / tokens:.1f} %); more of them in "
        f"{record.num_worse} generations, fewer in {record.num_better}"
    )
