"""`kernels.verify_sample` against the rules `deterministic`, `recursive` and `without_replacement`, same coins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from torch import Tensor

from specbench.kernels.verify_sample import SampleResult, verify_sample
from specbench.suites.kernels import DEVICE
from specbench.suites.kernels.cases import SampleCase, sample_cases
from specbench.suites.kernels.comparisons import boundaries, samples_rightly, told_walk
from specbench.suites.kernels.drawing import drawn
from specbench.tree import PROPOSALS, Proposal


@drawn(400)
@given(case=sample_cases())
def test_path_token_and_coins_are_the_rules(case: SampleCase) -> None:
    assert samples_rightly(verify_sample, case)


@pytest.mark.parametrize("vocab_size", [32_000, 262_144])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_large_vocabularies(vocab_size: int, proposal: Proposal) -> None:
    for seed in range(2):
        assert samples_rightly(
            verify_sample, SampleCase(((-1, 0, 0, 1),), vocab_size, proposal, 9, (100,), "bf16", seed)
        )


def asked(
    logits: Tensor,
    draft_probs: Tensor | None,
    tokens: list[int],
    parents: list[int],
    uniforms: list[float],
    **options: bool,
) -> SampleResult:
    """One tree at temperature 1."""
    return verify_sample(
        logits.to(DEVICE),
        torch.tensor(tokens, device=DEVICE),
        torch.tensor(parents, device=DEVICE),
        torch.tensor([uniforms], dtype=torch.float64, device=DEVICE),
        torch.ones(1, device=DEVICE),
        cu_nodes=boundaries([len(tokens)]),
        max_nodes=len(tokens),
        max_depth=2,
        draft_probs=None if draft_probs is None else draft_probs.to(DEVICE),
        **options,
    )


@pytest.mark.parametrize("coin", [0.0, 0.999999])
@pytest.mark.parametrize("without_replacement", [False, True])
def test_refused_siblings_are_never_drawn(coin: float, without_replacement: bool) -> None:
    """By hand: p = (1, 1, 2)/4, q = (1/2, 1/4, 1/4). Token 0 is kept below 1/2. Refused, it leaves p = (0, 0, 1) since
    p - q = (-1/4, 0, 1/4), and with it the second child, token 1, has no chance."""
    p, q = torch.tensor([[1.0, 1.0, 2.0]]).log().expand(3, 3), torch.tensor([[0.5, 0.25, 0.25]]).expand(3, 3)
    result = asked(p, q, [0, 0, 1], [-1, 0, 0], [0.51, 0.0, coin], without_replacement=without_replacement)
    assert (told_walk(result, 0), int(result.num_coins[0])) == (((), 2), 3)


@pytest.mark.parametrize(("without_replacement", "threshold"), [(False, 4 / 7), (True, 2 / 7)])
def test_the_second_sibling_is_judged_by_what_the_first_left(without_replacement: bool, threshold: float) -> None:
    """By hand: p = (1, 5, 10)/16, q = (1/2, 1/4, 1/4). Token 0 refused, p - q = (-7, 1, 6)/16 leaves p = (0, 1, 6)/7.
    Token 1 is then kept below (1/7) / (1/4), or (1/7) / (1/2) where q is (0, 1, 1)/2 without token 0."""
    p = torch.tensor([[1.0, 5.0, 10.0]], dtype=torch.float64).log().expand(3, 3)
    q = torch.tensor([[0.5, 0.25, 0.25]]).expand(3, 3)
    paths = [
        told_walk(asked(p, q, [0, 0, 1], [-1, 0, 0], [0.9, coin, 0.0], without_replacement=without_replacement), 0)
        for coin in (threshold - 1e-9, threshold + 1e-9)
    ]
    assert [path for path, _ in paths] == [(2,), ()]


def root_alone(logits: Tensor, uniform: float) -> int:
    return int(asked(logits, None, [0], [-1], [uniform]).bonus_tokens[0])


def test_a_filtered_token_is_never_drawn_at_the_extremes_of_a_coin() -> None:
    """Filters write -inf. A uniform of 0 draws the first token of any weight, the largest one the last."""
    logits = torch.full((1, 5000), -torch.inf)
    logits[0, [7, 40, 4990]] = torch.tensor([0.0, 3.0, 1.0])
    assert (root_alone(logits, 0.0), root_alone(logits, 1 - 2.0**-24)) == (7, 4990)


def test_nan_is_told() -> None:
    logits = torch.zeros(1, 5000)
    logits[0, 4999] = torch.nan
    assert root_alone(logits, 0.5) == -1


def test_nan_of_a_q_that_the_token_is_drawn_by_is_told() -> None:
    q = torch.full((2, 5000), 1 / 5000)
    q[0, 4999] = torch.nan
    logits = torch.zeros(2, 5000)
    logits[0, 7] = -9.0
    told = [told_walk(asked(logits, q, [0, 7], [-1, 0], [coin, 0.50001]), 0) for coin in (0.9, 0.0)]
    assert told == [((), -1), ((1,), 2500)]  # kept, and drawn by another row


def test_what_does_not_fit_is_refused() -> None:
    logits = torch.zeros(3, 5)
    with pytest.raises(ValueError, match="uniforms has 2 columns, must have at least 3"):
        asked(logits, None, [0, 0, 0], [-1, 0, 0], [0.5, 0.5])
    with pytest.raises(
        ValueError, match="draft_probs is None, must be q where siblings were drawn without replacement"
    ):
        asked(logits, None, [0, 0, 0], [-1, 0, 0], [0.5] * 3, without_replacement=True)
    with pytest.raises(ValueError, match="draft_probs has stride 3 in its last dimension, must be 1"):
        asked(logits, torch.zeros(5, 3).mT, [0, 0, 0], [-1, 0, 0], [0.5] * 3)
