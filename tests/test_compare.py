"""specbench.compare: bounds, errors and first differences, against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from specbench.compare import (
    exact_bound,
    first_difference,
    max_error,
    measured_bound,
    regret,
    row_errors,
    scale_of,
)


def test_fp64_allows_a_billionth_of_the_scale() -> None:
    assert exact_bound(20.0).value == pytest.approx(2e-8)


def test_fp64_never_asks_for_less_than_a_billionth_of_one() -> None:
    assert exact_bound(0.001).value == 1e-9


@pytest.mark.parametrize(
    ("dtype", "eps"), [(torch.float32, 2.0**-23), (torch.bfloat16, 2.0**-7), (torch.float16, 2.0**-10)], ids=str
)
def test_lower_precision_allows_twice_plain_decodings_error_and_four_eps(dtype: torch.dtype, eps: float) -> None:
    assert measured_bound(0.25, 3.0, dtype).value == 0.5 + 12 * eps


def test_a_bound_says_where_it_comes_from() -> None:
    assert [str(exact_bound(2.0)), str(measured_bound(0.25, 0.0, torch.float32))] == [
        "2e-09 (1e-9 of the scale, fp64)",
        "0.5 (2 x plain decoding's own error + 4 eps x scale, measured)",
    ]


def test_largest_error_is_absolute_and_counts_both_signs() -> None:
    assert max_error(torch.tensor([1.0, -3.0]), torch.tensor([1.5, -1.0])) == 2.0


def test_errors_are_taken_in_fp64_whatever_comes_in() -> None:
    """1024 + 1 is not a bf16 number: the difference must not be rounded away."""
    assert max_error(torch.tensor([1024.0], dtype=torch.bfloat16), torch.tensor([1025.0], dtype=torch.float64)) == 1.0


def test_minus_infinity_equals_itself_and_nothing_else() -> None:
    low = torch.tensor([-math.inf, 0.0])
    assert (max_error(low, low), max_error(low, torch.zeros(2))) == (0.0, math.inf)


def test_no_numbers_have_no_error() -> None:
    assert max_error(torch.zeros(0, 3), torch.zeros(0, 3)) == 0.0


def test_scale_is_the_largest_finite_magnitude() -> None:
    assert scale_of(torch.tensor([1.0, -4.0, -math.inf])) == 4.0


def test_scale_of_nothing_finite_is_zero() -> None:
    assert scale_of(torch.tensor([-math.inf])) == 0.0


def test_row_errors_follow_the_dimension_named() -> None:
    actual, expected = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.5], [3.0, 6.0]])
    assert (row_errors(actual, expected, row_dim=0), row_errors(actual, expected, row_dim=1)) == (
        [0.5, 2.0],
        [0.0, 2.0],
    )


def test_regret_is_how_much_better_the_best_token_is() -> None:
    row = torch.tensor([1.0, 3.5, 2.0])
    assert [regret(row, token) for token in range(3)] == [2.5, 0.0, 1.5]


@pytest.mark.parametrize(
    ("actual", "expected", "idx"),
    [
        ((), (), None),
        ((1, 2), (1, 2), None),
        ((1, 3), (1, 2), 1),
        ((1,), (1, 2), 1),
        ((1, 2, 3), (1, 2), 2),
        ((), (1,), 0),
    ],
    ids=["empty", "equal", "second", "truncated", "longer", "nothing"],
)
def test_first_difference_counts_a_missing_end_as_one(
    actual: tuple[int, ...], expected: tuple[int, ...], idx: int | None
) -> None:
    """Zipping two outputs made a truncated answer compare equal in another harness."""
    assert first_difference(actual, expected) == idx
