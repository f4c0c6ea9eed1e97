"""The sequential test for black boxes: its supremum against a search, its guarantee, its power, what a pass states."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from specbench.law.sequential import (
    CONCENTRATIONS,
    EVEN_SHARE,
    LawTest,
    draws_to_catch,
    hardest_direction,
    joint_cells,
    joint_law,
    log_supremum,
    multinomial_counts,
)

LAW = [0.5, 0.3, 0.2]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_law(vocab_size: int, seed: int) -> torch.Tensor:
    return torch.randn(vocab_size, generator=generator(seed), dtype=torch.float64).softmax(-1)


@pytest.mark.parametrize("counts", [(7, 2, 1), (0, 0, 9), (3, 0, 4), (1, 8, 1), (50, 31, 19), (1, 0, 0)])
@pytest.mark.parametrize("radius", [0.0, 0.01, 0.1, 0.25])
def test_supremum_is_that_of_a_grid_of_all_laws_in_the_ball(counts: tuple[int, ...], radius: float) -> None:
    """The best of 400 x 400 laws on three tokens is never above the supremum, and below it by a grid step at most."""
    steps = torch.arange(401, dtype=torch.float64)
    first, second = torch.meshgrid(steps, steps, indexing="ij")
    laws = torch.stack([first, second, 400 - first - second], -1).reshape(-1, 3) / 400
    centre = torch.tensor(LAW, dtype=torch.float64)
    is_inside = ((laws - centre).abs().sum(-1) <= 2 * radius + 1e-12) & (laws.min(-1).values >= -1e-12)
    likelihoods = torch.xlogy(torch.tensor(counts).double(), laws[is_inside].clamp(min=0)).sum(-1)
    supremum = log_supremum(torch.tensor(counts).double(), centre, radius)
    assert 0 <= supremum - likelihoods.max() + 1e-9 <= 0.02 * sum(counts)


def test_e_value_of_a_point_null_is_the_ratio_of_likelihoods_in_fractions() -> None:
    """Draws 0, 0, 1: the Dirichlet average is a product of predictive probabilities, written out one by one."""
    test = LawTest([LAW], null_tv=0.0)
    for token in (0, 0, 1):
        test.note(0, token)
    ratios = []
    for concentration in map(Fraction, CONCENTRATIONS):
        a, b = (
            concentration * (Fraction(p) * (1 - Fraction(EVEN_SHARE)) + Fraction(EVEN_SHARE) / 3) for p in (0.5, 0.3)
        )
        average = a / concentration * (a + 1) / (concentration + 1) * b / (concentration + 2)
        ratios.append(average / (Fraction(0.5) ** 2 * Fraction(0.3)))
    mixture = float(sum(ratios) / len(ratios))
    expected = (mixture + (mixture + 1) / 2 + mixture) / 3  # one context: w = 1, 1/2, 1
    assert test.e_value == pytest.approx(expected, rel=1e-9)


def test_mean_of_the_e_value_over_all_texts_is_at_most_one_anywhere_in_the_ball() -> None:
    """All texts of 6 draws of two tokens, in one context of two: the null's edge, its centre, its other edge."""
    means = []
    for truth in (0.3, 0.4, 0.5):
        mean = 0.0
        for num_ones in range(7):
            test = LawTest([[0.6, 0.4], [0.5, 0.5]], null_tv=0.1)
            test.note(0, 1, num=num_ones)
            test.note(0, 0, num=6 - num_ones)
            mean += math.comb(6, num_ones) * truth**num_ones * (1 - truth) ** (6 - num_ones) * test.e_value
        means.append(mean)
    assert max(means) <= 1


def test_right_laws_and_laws_at_the_edge_of_the_ball_raise_no_alarm() -> None:
    law = random_law(16, seed=3)
    taken = [
        one
        for truth in (law, hardest_direction(law, 0.003))
        for one in draws_to_catch(law, truth, num_runs=100, most=5000, look_every=50, seed=4, alpha=1e-6, null_tv=0.003)
    ]
    assert [one for one in taken if math.isfinite(one)] == []


@pytest.mark.parametrize(("distance", "most"), [(0.06, 5000), (0.15, 900)])
def test_median_of_the_draws_that_a_deviation_takes_in_its_hardest_direction(distance: float, most: int) -> None:
    law = random_law(16, seed=0)
    taken = draws_to_catch(
        law,
        hardest_direction(law, distance),
        num_runs=61,
        most=20_000,
        look_every=50,
        seed=5,
        alpha=1e-6,
        null_tv=0.003,
    )
    assert sorted(taken)[30] <= most


def test_one_wrong_context_among_fifty_is_found() -> None:
    laws = [random_law(8, seed).tolist() for seed in range(50)]
    test = LawTest(laws)
    truth = torch.tensor(laws)
    truth[7] = hardest_direction(truth[7], 0.3)
    for context, counts in enumerate(multinomial_counts(truth, torch.full((50,), 1000), 1, generator())[0].tolist()):
        for token, num in enumerate(counts):
            test.note(context, token, num=int(num))
    assert test.is_rejected


def test_rejection_stays_when_later_draws_agree_with_the_law() -> None:
    test = LawTest([LAW])
    test.note(0, 2, num=100)
    assert test.is_rejected
    test.note(0, 0, num=500_000)
    test.note(0, 1, num=300_000)
    test.note(0, 2, num=200_000)
    assert test.e_value < 1
    assert test.is_rejected


def test_token_of_no_probability_is_worth_infinite_evidence_against_a_point_null() -> None:
    test = LawTest([[0.5, 0.5, 0.0]], null_tv=0.0)
    test.note(0, 2)
    assert test.e_value == math.inf


def test_contexts_may_have_vocabularies_of_different_sizes() -> None:
    """What a context of one token says is nothing: its evidence is one, whatever is drawn."""
    with_it, without = LawTest([LAW, [1.0]]), LawTest([LAW, [0.2] * 5])
    for test in (with_it, without):
        test.note(0, 2, num=50)
    with_it.note(1, 0, num=1000)
    assert with_it.log_e_value == pytest.approx(without.log_e_value, abs=1e-6)


def test_detectable_distance_is_one_that_fresh_draws_show_as_often_as_it_says() -> None:
    law = random_law(8, seed=1)
    test = LawTest([law.tolist()])
    for token, num in enumerate((law * 3000).round().long().tolist()):
        test.note(0, token, num=num)
    planted = hardest_direction(law, test.detectable_tv(power=0.9))
    num_seen = 0
    for counts in multinomial_counts(planted[None], torch.tensor([test.num_draws]), 200, generator(9))[:, 0].tolist():
        fresh = LawTest([law.tolist()])
        for token, num in enumerate(counts):
            fresh.note(0, token, num=int(num))
        num_seen += fresh.is_rejected
    assert 160 <= num_seen <= 198


def test_nothing_is_detectable_from_three_draws() -> None:
    test = LawTest([LAW])
    test.note(0, 0, num=3)
    assert test.detectable_tv() == math.inf


@pytest.mark.parametrize("distance", [0.01, 0.1, 0.3])
def test_hardest_direction_lies_at_the_distance_that_was_asked_for(distance: float) -> None:
    law = random_law(12, seed=2)
    planted = hardest_direction(law, distance)
    assert ((planted - law).abs().sum() / 2).item() == pytest.approx(
        distance
    ) and planted.sum().item() == pytest.approx(1)


def test_joint_cells_number_pairs_as_the_joint_law_lists_them() -> None:
    law = joint_law([[0.75, 0.25], [0.5, 0.25, 0.25]])
    assert law[joint_cells([1, 2], [2, 3])] == 0.0625 and law[joint_cells([0, 0], [2, 3])] == 0.375


def test_equal_rows_of_a_batch_are_caught_by_their_joint_law() -> None:
    """Each row alone has the right law; that the second repeats the first is seen in pairs only."""
    test = LawTest([joint_law([LAW, LAW])])
    for token, num in enumerate((50, 30, 20)):
        test.note(0, joint_cells([token, token], [3, 3]), num=num)
    assert test.is_rejected


REFUSALS = {
    "no law": (lambda: LawTest([]), "laws is empty: a test needs at least one context"),
    "no probabilities": (lambda: LawTest([[0.5, 0.4]]), "laws[0] sums to 0.9, must be probabilities that sum to 1"),
    "foreign token": (lambda: LawTest([LAW]).note(0, 3), "token = 3 must be in [0, 3), context 0"),
    "foreign cell": (lambda: joint_cells([0, 3], [2, 3]), "token = 3 must be in [0, 3), the range of its place"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_names_value_and_expectation(name: str) -> None:
    call, text = REFUSALS[name]
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == text
