"""`kernels.verify_sample` against the rules `chain` and `deterministic`, with the same coins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from specbench.kernels.verify_sample import verify_sample
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import SampleCase, sample_cases
from specbench.suites.kernels.comparisons import boundaries, samples_rightly
from specbench.suites.kernels.drawing import drawn


@drawn(400)
@given(case=sample_cases())
def test_path_token_and_coins_are_the_rules(case: SampleCase) -> None:
    assert samples_rightly(verify_sample, case)


@pytest.mark.parametrize("vocab_size", [32_000, 262_144])
@pytest.mark.parametrize("is_drawn", [False, True])
def test_large_vocabularies(vocab_size: int, is_drawn: bool) -> None:
    trees = ((-1, 0, 1),) if is_drawn else ((-1, 0, 0, 1),)
    for seed in range(3):
        assert samples_rightly(verify_sample, SampleCase(trees, vocab_size, is_drawn, 9, (100,), "bf16", seed))


def root_alone(logits: torch.Tensor, uniform: float) -> int:
    ints = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    uniforms = torch.tensor([[uniform]], dtype=torch.float64, device=DEVICE)
    ones = torch.ones(1, device=DEVICE)
    given = {"cu_nodes": boundaries([1]), "max_nodes": 1, "max_depth": 1}
    return int(verify_sample(logits.to(DEVICE), ints, ints - 1, uniforms, ones, **given).bonus_tokens[0])


def test_a_filtered_token_is_never_drawn_at_the_extremes_of_a_coin() -> None:
    """Filters write -inf. A uniform of 0 draws the first token of any weight, the largest one the last."""
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [7, 40, 4990]] = torch.tensor([0.0, 3.0, 1.0])
    assert (root_alone(logits, 0.0), root_alone(logits, 1 - 2.0**-24)) == (7, 4990)


def test_nan_is_told() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4999] = torch.nan
    assert root_alone(logits, 0.5) == -1


def test_too_few_uniforms_are_refused() -> None:
    ints = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="uniforms has 2 columns, must have at least 3"):
        verify_sample(
            torch.zeros(3, 5, device=DEVICE), ints, ints, torch.zeros(1, 2, device=DEVICE),
            torch.ones(1, device=DEVICE), cu_nodes=boundaries([3]), max_nodes=3, max_depth=2,
        )  # fmt: skip
