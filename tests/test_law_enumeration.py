"""specbench.law.enumeration: every way to decide is gone through once, with its exact weight; races in closed form."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.law.enumeration import Enumeration, both_win, outcomes

F = Fraction
QUARTERS = [F(1, 4), F(3, 4)]


def test_two_token_rejection_sampling_by_hand() -> None:
    """p = (3/4, 1/4), q = (1/4, 3/4). Draft 0 is kept for sure: 1/4. Draft 1 is kept with 1/3: 3/4 * 1/3 = 1/4. What is
    left, 1/2, redraws from (p - q)+ = (1/2, 0): token 0. In all token 0 has 1/4 + 1/2 = 3/4."""

    def sample(chance: Enumeration) -> tuple[int, str]:
        token = chance.draw([F(1, 4), F(3, 4)])
        if chance.accept([F(3), F(1, 3)][token]):
            return token, "kept"
        return chance.draw([F(1, 2), F(0)]), "redrawn"

    found = list(outcomes(sample))
    assert found == [(F(1, 4), (0, "kept")), (F(1, 4), (1, "kept")), (F(1, 2), (0, "redrawn"))]


def test_what_cannot_happen_is_not_visited() -> None:
    def decide(chance: Enumeration) -> tuple[bool, bool, int]:
        return chance.accept(F(0)), chance.accept(F(7, 5)), chance.draw([F(0), F(2), F(0)])

    found = list(outcomes(decide))
    assert found == [(1, (False, True, 1))]


def test_function_that_asks_nothing_has_one_outcome() -> None:
    found = list(outcomes(lambda chance: "said"))
    assert found == [(1, "said")]


def test_decisions_that_depend_on_decisions_keep_the_total_at_one() -> None:
    def decide(chance: Enumeration) -> int:
        num = 0
        while num < 4 and chance.accept(F(1, num + 2)):
            num += 1 + chance.draw([F(num), F(1), F(2)])
        return num

    total = sum(weight for weight, _ in outcomes(decide))
    assert total == 1


def test_race_of_two_laws_by_hand() -> None:
    """p = (1/2, 1/2), q = (1/3, 2/3). Both pick 0: 1/(1 + max(1, 2)). Both pick 1: 1/(max(1, 1/2) + 1). p picks 0 and q
    picks 1: r = e_1/e_0 between 1 and 2, where dr/(1 + r)^2 is 1/2 - 1/3. The other way round cannot be."""
    p, q = [F(1, 2), F(1, 2)], [F(1, 3), F(2, 3)]
    found = {pair: weight for weight, pair in outcomes(lambda chance: (chance.race(p, 3), chance.race(q, 3)))}
    assert found == {(0, 0): F(1, 3), (1, 1): F(1, 2), (0, 1): F(1, 6)}


laws = st.integers(2, 5).flatmap(
    lambda size: st.tuples(*[st.lists(st.integers(0, 6), min_size=size, max_size=size).filter(any) for _ in "pq"])
)


@given(laws)
def test_each_side_of_a_race_has_its_own_law(weights: tuple[list[int], list[int]]) -> None:
    p, q = ([F(one, sum(side)) for one in side] for side in weights)
    joint = [[both_win(p, q, token, other) for other in range(len(q))] for token in range(len(p))]
    assert ([sum(row) for row in joint], [sum(column) for column in zip(*joint, strict=True)]) == (p, q)


@pytest.mark.parametrize("seed", range(4))
def test_race_is_what_exponential_noise_gives(seed: int) -> None:
    """400,000 draws: a cell's standard deviation is at most 0.0008, five of them 0.004."""
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 5, size=(2, 4)) + np.eye(4, dtype=int)[:2]
    noise = rng.exponential(size=(400_000, 4))
    with np.errstate(divide="ignore"):
        winners = [(side / noise).argmax(1) for side in weights]
    counted = np.zeros((4, 4))
    np.add.at(counted, tuple(winners), 1 / len(noise))
    p, q = ([F(int(one), int(side.sum())) for one in side] for side in weights)
    exact = np.array([[float(both_win(p, q, token, other)) for other in range(4)] for token in range(4)])
    assert abs(counted - exact).max() < 0.004


@given(laws)
def test_race_in_floats_is_the_race_in_fractions(weights: tuple[list[int], list[int]]) -> None:
    p, q = ([F(one, sum(side)) for one in side] for side in weights)
    pairs = [(token, other) for token in range(len(p)) for other in range(len(q))]
    exact = [float(both_win(p, q, *pair)) for pair in pairs]
    assert [both_win([*map(float, p)], [*map(float, q)], *pair) for pair in pairs] == pytest.approx(exact, abs=1e-12)


def test_same_law_at_the_same_place_has_the_same_winner() -> None:
    laws_asked = [QUARTERS, [F(1, 2), F(1, 2)], [F(1), F(3)], [F(1, 2), F(1, 2)]]
    found = [picks for _, picks in outcomes(lambda chance: tuple(chance.race(law, 1) for law in laws_asked))]
    assert all((first, second) == (third, fourth) for first, second, third, fourth in found)


def test_other_places_have_other_noise() -> None:
    found = {pair: weight for weight, pair in outcomes(lambda chance: tuple(chance.race(QUARTERS, t) for t in (1, 2)))}
    assert found == {(i, j): QUARTERS[i] * QUARTERS[j] for i in range(2) for j in range(2)}


def _forgetful() -> Callable[[Enumeration], bool]:
    """Asks for a coin in its first run alone."""
    runs: list[int] = []

    def function(chance: Enumeration) -> bool:
        runs.append(1)
        return len(runs) > 1 or chance.accept(F(1, 2))

    return function


REFUSED: dict[str, tuple[Callable[[Enumeration], object], str]] = {
    "negative": (lambda chance: chance.draw([F(7, 6), F(-1, 6)]), "law[1] = -1/6 must be >= 0 (a probability)"),
    "empty": (lambda chance: chance.draw([F(0), F(0)]), "law has no mass: there is no token to draw"),
    "third law": (
        lambda chance: [chance.race([F(1), F(one)], 2) for one in (1, 2, 3)],
        "place 2 was asked about a third law, but races of two are what has a closed form",
    ),
    "no function": (
        _forgetful(),
        "asked for fewer decisions after the same answers: it is no function of them",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_has_no_law_is_refused_in_a_sentence(case: str) -> None:
    function, text = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        list(outcomes(function))
    assert str(caught.value) == text
