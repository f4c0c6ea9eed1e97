"""specbench.budget: the exact test, by hand; and what it says about a decoder that loses every tie."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from fractions import Fraction
from math import comb
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specbench.banks import TinyBank
from specbench.budget import FALSE_ALARM_RATE, budget_sentence, exceeded, p_value, rarity
from specbench.cases import GenerationCase
from specbench.checks.budget import note_flips
from specbench.record import ClaimRecord
from specbench.reference import autoregressive

BY_HAND = {
    (0, 0): Fraction(1),
    (1, 0): Fraction(1, 2),
    (0, 1): Fraction(1),
    (3, 0): Fraction(1, 8),
    (2, 1): Fraction(1, 2),  # three or two of three: (1 + 3) / 8
    (4, 1): Fraction(6, 32),  # five or four of five: (1 + 5) / 32
    (8, 2): Fraction(45 + 10 + 1, 1024),
}


@pytest.mark.parametrize("counts", BY_HAND, ids=[f"{a}-{b}" for a, b in BY_HAND])
def test_the_chance_is_that_of_tossing_a_coin(counts: tuple[int, int]) -> None:
    assert p_value(*counts) == float(BY_HAND[counts])


def test_twenty_lost_in_a_row_are_an_alarm_for_one_test_and_twenty_nine_for_four_hundred() -> None:
    """2^-20 = 9.5e-7 is below 1e-6, 2^-19 is not; 2^-29 = 1.9e-9 is below 1e-6 / 400, 2^-28 is not."""
    assert [exceeded(n, 0, num_tests=1) for n in (19, 20)] == [False, True]
    assert [exceeded(n, 0, num_tests=400) for n in (28, 29)] == [False, True]


@pytest.mark.parametrize("total", [30, 100, 1000])
def test_the_false_alarm_rate_is_kept_exactly(total: int) -> None:
    """The chance under a fair coin of every outcome that is an alarm, summed up."""
    alarms = sum(comb(total, worse) for worse in range(total + 1) if exceeded(worse, total - worse, num_tests=1))
    assert 0 < Fraction(alarms, 2**total) < FALSE_ALARM_RATE


def test_thousands_of_generations_are_no_overflow() -> None:
    assert (p_value(5000, 0), rarity(5000, 0), p_value(0, 5000)) == (0.0, "once in 1e+300 runs", 1.0)


def test_fewer_flips_than_plain_decoding_are_never_an_alarm() -> None:
    assert not exceeded(0, 1000, num_tests=1)


def test_both_rates_are_told() -> None:
    record = ClaimRecord("greedy.lossless", "tiny-bf16")
    record.note_flips("a", 3, 1, 10)
    record.note_flips("b", 0, 2, 10)
    assert budget_sentence(record) == (
        "where the texts part, 3 of 20 tokens (15.0 %) are not the oracle's argmax, in plain decoding's own text 3 "
        "(15.0 %); more of them in 1 generations, fewer in 1"
    )


def test_nothing_is_told_where_the_texts_never_part() -> None:
    assert budget_sentence(ClaimRecord("greedy.lossless", "tiny-bf16")) == ""


def test_two_cases_that_part_at_the_same_place_are_one_event() -> None:
    record = ClaimRecord("greedy.lossless", "tiny-bf16")
    for _ in range(30):
        record.note_flips((0, 7, 7, 7), 1, 0, 5)
    assert (record.num_worse, record.num_flips, record.num_flip_tokens) == (1, 1, 5)


class OracleOfOnes:
    """A subject whose oracle prefers token 1 everywhere, and whose models are bf16."""

    exact = False
    noise_dtype = torch.bfloat16
    bank = SimpleNamespace(model=lambda idx: SimpleNamespace(dtype=torch.bfloat16))

    def rows(self, case: GenerationCase, tokens: Sequence[int]) -> torch.Tensor:
        return torch.nn.functional.one_hot(torch.ones(len(tokens), dtype=torch.int64), 64).double()


def counted(tokens: Sequence[int], plain: Sequence[int], start: int | None, **changes: Any) -> tuple[int, int, int]:
    subject: Any = OracleOfOnes()
    vars(subject).update(changes)
    record = ClaimRecord("greedy.lossless", "own")
    note_flips(record, subject, GenerationCase(prompt=(7, 8)), tokens, plain, start=start)
    return record.num_flips, record.num_plain_flips, record.num_flip_tokens


def test_flips_are_counted_from_where_the_texts_part() -> None:
    """Token 0 is a flip in both and cancels out; behind it the target flips at 1 and 3, plain decoding at 2."""
    assert counted((0, 2, 1, 0), (0, 1, 2, 1), 1) == (2, 1, 3)


def test_texts_that_never_part_have_no_flips_to_compare() -> None:
    assert counted((0, 2), (0, 2), None) == (0, 0, 0)


def test_a_text_that_ends_early_is_compared_as_far_as_it_goes() -> None:
    assert counted((0, 2), (0, 1, 2, 2), 1) == (1, 0, 1)


def test_in_fp64_nothing_is_counted() -> None:
    assert counted((0, 2), (0, 1), 1, exact=True) == (0, 0, 0)


def test_a_place_is_the_model_and_the_text_so_far() -> None:
    subject: Any = OracleOfOnes()
    record = ClaimRecord("greedy.lossless", "own")
    for prompt, plain in (((7,), (1, 1)), ((7,), (1, 2)), ((7, 1), (1,))):
        note_flips(record, subject, GenerationCase(prompt=prompt), (1, 0), plain, start=len(plain) - 1)
    assert (record.num_worse, record.num_flip_tokens) == (1, 1)


class _DeclaredBf16(OracleOfOnes):
    """The folder holds fp32 weights, the target says that it computes in bf16."""

    def __init__(self) -> None:
        self.bank = TinyBank("fp32", torch.float32)
        self.clock = SimpleNamespace(count=lambda name: nullcontext())

    def remember(self, key: object, make: Any) -> Any:
        return make()


def test_a_target_that_declares_a_lower_precision_is_compared_with_plain_decoding_in_it() -> None:
    """Over whole texts, whether or not it parted from fp32's."""
    subject: Any = _DeclaredBf16()
    lower = TinyBank("bf16", torch.bfloat16).model(0)
    plain = autoregressive.generate(lower, (7, 8), max_new_tokens=6).tokens
    record = ClaimRecord("greedy.lossless", "own")
    note_flips(record, subject, GenerationCase(prompt=(7, 8)), (0,) * 6, (0,) * 6, start=None)
    assert (record.num_flips, record.num_plain_flips, record.num_flip_tokens) == (6, sum(t != 1 for t in plain), 6)
