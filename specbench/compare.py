"""Comparing a target's numbers with the oracle's: error bounds, first difference, margins. No claim is decided here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# fp64: a real fault is 1e-2 and rounding 1e-15, so this one relative figure separates them by seven orders each way.
EXACT_RELATIVE = 1e-9


@dataclass(frozen=True)
class Bound:
    """The largest error that is still no fault, and in words where it comes from."""

    value: float
    source: str
    pooled: bool = False  # judges the root mean square over all rows, not each row's largest error

    def __str__(self) -> str:
        return f"{self.value:.2g} ({self.source})"


def exact_bound(scale: float) -> Bound:
    """For fp64. scale: the largest oracle magnitude of the quantity compared."""
    return Bound(EXACT_RELATIVE * max(scale, 1.0), "1e-9 of the scale, fp64")


def measured_bound(plain_error: float, scale: float, dtype: torch.dtype, *, pooled: bool = False) -> Bound:
    """Twice the error of plain decoding in this dtype against fp64, pooled over the case, plus 4 eps x scale."""
    numbers = torch.finfo(dtype)
    allowed = max(2.0 * plain_error + 4.0 * numbers.eps * scale, numbers.tiny)  # never 0: it is divided by
    return Bound(allowed, "2 x plain decoding's own error + 4 eps x scale, measured", pooled)


def max_error(actual: Tensor, expected: Tensor) -> float:
    """Largest absolute difference, in fp64. -inf against -inf is no difference, NaN is an infinite one."""
    if actual.numel() == 0:
        return 0.0
    wide, right = actual.double(), expected.double()
    difference = torch.where(wide == right, 0.0, wide - right)
    return float(difference.abs().nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over all entries, in fp64; NaN counts as infinite."""
    if actual.numel() == 0:
        return 0.0
    wide, right = actual.double(), expected.double()
    difference = torch.where(wide == right, 0.0, wide - right)
    return float(difference.pow(2).nan_to_num(nan=torch.inf, posinf=torch.inf).mean().sqrt())


@dataclass(frozen=True)
class Rows:
    """A comparison by rows. share: the error judged, as a share of its bound. wrong: row -> its largest error."""

    share: float
    wrong: dict[int, float]


def compare_rows(actual: Tensor, expected: Tensor, bound: Bound, *, row_dim: int) -> Rows:
    """Judges by the bound's own measure. When a pooled error is too large, the worst row stands for it."""
    errors = row_errors(actual, expected, row_dim=row_dim)
    if not errors:
        return Rows(0.0, {})
    worst = max(range(len(errors)), key=errors.__getitem__)
    if bound.pooled:
        error = rms_error(actual, expected)
        return Rows(error / bound.value, {worst: errors[worst]} if error > bound.value else {})
    wrong = {row: error for row, error in enumerate(errors) if error > bound.value}
    return Rows(errors[worst] / bound.value, wrong)


def scale_of(values: Tensor) -> float:
    """Largest finite magnitude."""
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def row_errors(actual: Tensor, expected: Tensor, *, row_dim: int) -> list[float]:
    """The largest error of each row along `row_dim`."""
    moved, right = actual.movedim(row_dim, 0), expected.movedim(row_dim, 0)
    return [max_error(one, other) for one, other in zip(moved, right, strict=True)]


def regret(row: Tensor, token: int) -> float:
    """How much worse than the best token `token` is under an oracle row [V]: 0 for the argmax."""
    return float(row.max() - row[token])


def first_difference(actual: tuple[int, ...], expected: tuple[int, ...]) -> int | None:
    """The first index at which two token sequences differ, the end of the shorter one included; None if equal."""
    for idx, (one, other) in enumerate(zip(actual, expected, strict=False)):
        if one != other:
            return idx
    return None if len(actual) == len(expected) else min(len(actual), len(expected))
