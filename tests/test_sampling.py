"""The law that is drawn from: against transformers' own warpers, by hand at the ties, and by its refusals."""

from __future__ import annotations

import math
import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specbench.protocols import SeededCoins
from specbench.reference.sampling import probs, sample
from specbench.types import Sampling

HALVES = torch.tensor([0.25, 0.5, 0.125, 0.125], dtype=torch.float64).log()  # a softmax that is exact in binary


def warped(row: Tensor, sampling: Sampling) -> list[Tensor]:
    """transformers' law after each of its warpers, in the order in which its generate applies them."""
    scores, laws = row[None], []
    for made in (
        TemperatureLogitsWarper(sampling.temperature),
        TopKLogitsWarper(sampling.top_k) if sampling.top_k else None,
        TopPLogitsWarper(sampling.top_p) if sampling.top_p and sampling.top_p < 1.0 else None,
        MinPLogitsWarper(sampling.min_p) if sampling.min_p else None,
    ):
        scores = scores if made is None else made(None, scores)
        laws.append(scores.softmax(-1)[0])
    return laws


def is_clear(laws: list[Tensor], sampling: Sampling) -> bool:
    """No sum or share stands so near its limit that rounding may decide."""
    after_top_k, after_top_p = laws[1].sort(descending=True).values, laws[2]
    at_limit = (after_top_k.cumsum(0) - (sampling.top_p or 2.0)).abs() < 1e-9
    near_share = (after_top_p - (sampling.min_p or 2.0) * after_top_p.max()).abs() < 1e-9
    return not (bool(at_limit.any()) or bool(near_share[after_top_p < after_top_p.max()].any()))


numbers = st.one_of(st.floats(-8, 8, width=16), st.sampled_from([-math.inf, 0.0, 1.0]))
logits = st.lists(numbers, min_size=1, max_size=9).filter(lambda row: max(row) > -math.inf)
settings_of = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    top_k=st.none() | st.integers(1, 10),
    top_p=st.none() | st.floats(0.05, 1.0),
    min_p=st.none() | st.floats(0.01, 1.0),
)


@settings(max_examples=300, deadline=None)
@given(row=logits, sampling=settings_of)
def test_the_law_is_what_transformers_warpers_leave(row: list[float], sampling: Sampling) -> None:
    """Compared sorted: which of two equal tokens falls out of the nucleus is not promised by transformers."""
    wide = torch.tensor(row, dtype=torch.float64)
    laws = warped(wide, sampling)
    assume(is_clear(laws, sampling))
    law = probs(wide, sampling)
    assert torch.allclose(law.sort().values, laws[-1].sort().values, rtol=0, atol=1e-13)


@settings(max_examples=200, deadline=None)
@given(row=st.lists(st.integers(-40, 40), min_size=1, max_size=9, unique=True), sampling=settings_of)
def test_without_ties_each_token_has_the_probability_that_transformers_gives_it(
    row: list[int], sampling: Sampling
) -> None:
    wide = torch.tensor(row, dtype=torch.float64) / 8
    laws = warped(wide, sampling)
    assume(is_clear(laws, sampling))
    assert torch.allclose(probs(wide, sampling), laws[-1], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ({}, [0.25, 0.5, 0.125, 0.125]),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 3}, [0.25, 0.5, 0.125, 0.125]),
        ({"top_k": 9}, [0.25, 0.5, 0.125, 0.125]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_p": 0.6}, [1 / 3, 2 / 3, 0, 0]),
        ({"top_p": 0.8}, [2 / 7, 4 / 7, 1 / 7, 0]),
        ({"top_p": 1.0}, [0.25, 0.5, 0.125, 0.125]),
        ({"min_p": 0.3}, [1 / 3, 2 / 3, 0, 0]),
        ({"min_p": 1.0}, [0, 1, 0, 0]),
        ({"top_k": 2, "top_p": 0.6}, [0, 1, 0, 0]),
        ({"top_p": 0.8, "min_p": 0.4}, [1 / 3, 2 / 3, 0, 0]),
    ],
    ids=str,
)
def test_cuts_by_hand(cuts: dict, expected: list[float]) -> None:
    """Tokens 2 and 3 tie: top_k keeps both, the nucleus takes 2 first. After top_k = 2 the larger has 2/3 >= 0.6."""
    law = probs(HALVES, Sampling(temperature=1.0, **cuts))
    assert law.tolist() == pytest.approx(expected, abs=1e-15)


def test_among_equals_the_nucleus_takes_the_lowest_ids_until_the_sum_is_reached() -> None:
    """1,024 tokens of 1/1024 each, exact in binary: the first 512 sum to one half, and no more is needed."""
    law = probs(torch.zeros(1024, dtype=torch.float64), Sampling(temperature=1.0, top_p=0.5))
    assert law.nonzero().flatten().tolist() == list(range(512))


def test_temperature_comes_before_the_cuts() -> None:
    """At temperature 1/2 the law is squared: (4, 16, 1, 1)/22, so that the largest alone has 0.7."""
    assert probs(HALVES, Sampling(temperature=0.5, top_p=0.7)).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_min_p_is_a_share_of_the_largest_and_not_a_probability() -> None:
    law = probs(torch.zeros(100, dtype=torch.float64), Sampling(temperature=1.0, min_p=0.5))
    assert law.tolist() == pytest.approx([0.01] * 100)


@pytest.mark.parametrize("row", [[1.0, 3.0, 3.0], [1.0, math.inf, math.inf], [-math.inf, 0.0, -1.0]], ids=str)
def test_at_temperature_zero_the_lowest_argmax_has_all_mass_whatever_is_cut(row: list[float]) -> None:
    assert probs(torch.tensor(row), Sampling(top_k=1, top_p=0.1, min_p=1.0)).tolist() == [0.0, 1.0, 0.0]


def test_a_tiny_temperature_stays_finite() -> None:
    assert probs(torch.tensor([900.0, 901.0, -math.inf]), Sampling(temperature=1e-307)).tolist() == [0.0, 1.0, 0.0]


def test_rows_are_judged_one_by_one() -> None:
    rows = torch.tensor([[0.0, 1.0, 2.0], [2.0, 2.0, -math.inf]])
    sampling = Sampling(temperature=0.7, top_k=2)
    assert torch.equal(probs(rows, sampling), torch.stack([probs(row, sampling) for row in rows]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_the_law_of_narrow_logits_is_fp64(dtype: torch.dtype) -> None:
    law = probs(torch.tensor([0.5, 1.5, -2.0], dtype=dtype), Sampling(temperature=1.0))
    assert law.tolist() == pytest.approx(
        [math.exp(x) / (math.exp(0.5) + math.exp(1.5) + math.exp(-2)) for x in (0.5, 1.5, -2)], abs=1e-15
    )


@pytest.mark.parametrize(
    ("row", "temperature", "message"),
    [
        ([0.0, math.nan], 0.0, "logits hold NaN, must be numbers or -inf: look at the forward that made them"),
        ([0.0, math.nan], 1.0, "logits hold NaN, must be numbers or -inf: look at the forward that made them"),
        (
            [-math.inf, -math.inf],
            1.0,
            "logits are -inf for every token of a row, must allow one: look at bad_words and grammar",
        ),
        (
            [[0.0, 0.0], [-math.inf, -math.inf]],
            0.0,
            "logits are -inf for every token of a row, must allow one: look at bad_words and grammar",
        ),
        ([0.0, math.inf], 1.0, "logits hold +inf, must be finite or -inf where the temperature is above 0"),
        ([[[0.0]]], 1.0, "logits has shape [1, 1, 1], must be [V] or [N, V]"),
    ],
    ids=str,
)
def test_rows_without_a_law_are_refused(row: list, temperature: float, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        probs(torch.tensor(row), Sampling(temperature=temperature))


@pytest.mark.parametrize("min_p", [0.0, 1.5, math.nan])
def test_a_min_p_that_is_no_share_is_refused(min_p: float) -> None:
    message = f"min_p = {min_p} must be in (0, 1], or None for no cut"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Sampling(min_p=min_p)


class Uniform:
    """Coins that always fall alike."""

    def __init__(self, value: float) -> None:
        self._value = value

    def uniform(self, num: int) -> Tensor:
        return torch.full((num,), self._value, dtype=torch.float64)


@pytest.mark.parametrize(
    ("uniform", "token"),
    [(0.0, 1), (0.24, 1), (0.25, 2), (0.74, 2), (0.75, 4), (1 - 2**-53, 4)],
    ids=str,
)
def test_a_uniform_falls_into_the_stretch_of_its_token(uniform: float, token: int) -> None:
    """Stretches are closed on the left; tokens 0, 3 and 5 have none."""
    law = torch.tensor([0.0, 0.25, 0.5, 0.0, 0.25, 0.0], dtype=torch.float64)
    assert sample(law, Uniform(uniform)) == token


def test_where_rounding_leaves_nothing_the_last_possible_token_is_drawn() -> None:
    """Ten tenths sum to less than 1 in fp64, and the largest uniform of the sum rounds to the sum."""
    law = torch.tensor([0.1] * 10 + [0.0], dtype=torch.float64)
    assert sample(law, Uniform(1.0)) == 9


def test_counts_of_many_draws_follow_the_law() -> None:
    """n = 20,000 of a seeded generator; four standard deviations of a binomial."""
    law, coins = torch.tensor([0.1, 0.0, 0.6, 0.3], dtype=torch.float64), SeededCoins(3)
    drawn = torch.bincount(torch.tensor([sample(law, coins) for _ in range(20_000)]), minlength=4)
    assert ((drawn - 20_000 * law).abs() <= 4 * (20_000 * law * (1 - law)).sqrt()).all()
