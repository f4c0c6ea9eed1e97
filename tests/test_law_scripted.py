"""The exact law of a function of coins: as a hand counts it, and as an enumeration in fractions of our rules has it."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from fractions import Fraction

import pytest
import torch

from specbench.law.enumeration import outcomes
from specbench.law.scripted import CannotTell, law_of
from specbench.protocols import Coins
from specbench.reference.verify import RULES, CoinChance
from specbench.tree import DraftTree

ULP = 2.0**-53


def coin(coins: Coins) -> float:
    return coins.uniform(1).item()


def distance(law: dict[Hashable, float], expected: dict[Hashable, float]) -> float:
    return max(abs(law.get(outcome, 0.0) - float(expected.get(outcome, 0))) for outcome in law.keys() | expected.keys())


def two_coins(coins: Coins) -> bool:
    """The second threshold differs little between the pieces of the first coin: no single probe tells them apart."""
    threshold = 0.7 if coin(coins) < 0.3 else 0.705
    return coin(coins) < threshold


def three_steps(coins: Coins) -> int:
    one = coin(coins)
    return sum(one >= end for end in (0.5, 0.5 + 1e-9, 0.5 + 3e-9))


def block_of_seven(coins: Coins) -> Hashable:
    """A verifier that asks for all its coins at once and stops at the first acceptance; the last one draws."""
    *accept, draw = coins.uniform(7).tolist()
    for place, one in enumerate(accept):
        if one < 0.1 * (place + 1):
            return place, int(draw * 2)
    return "none", int(draw * 3)


def block_of_seven_by_hand() -> dict[Hashable, float]:
    law: dict[Hashable, float] = {}
    left = 1.0
    for place in range(6):
        for drawn in range(2):
            law[place, drawn] = left * 0.1 * (place + 1) / 2
        left *= 1 - 0.1 * (place + 1)
    return law | {("none", drawn): left / 3 for drawn in range(3)}


BY_HAND: dict[str, tuple[Callable[[Coins], Hashable], dict[Hashable, float]]] = {
    "no coin": (lambda coins: "x", {"x": 1.0}),
    "unused coins": (lambda coins: len(coins.uniform(5)), {5: 1.0}),
    "one threshold": (lambda coins: coin(coins) < 0.3, {True: 0.3, False: 0.7}),
    "thin piece inside": (lambda coins: 0.5 < coin(coins) < 0.505, {True: 0.005, False: 0.995}),
    "thin piece at the end": (lambda coins: coin(coins) > 1 - 1e-9, {True: 1e-9, False: 1 - 1e-9}),
    "thin pieces in a row": (three_steps, {0: 0.5, 1: 1e-9, 2: 2e-9, 3: 0.5 - 3e-9}),
    "inverse cdf": (
        lambda coins: int(torch.searchsorted(torch.tensor([0.4, 0.4001, 1.0], dtype=torch.float64), coin(coins))),
        {0: 0.4, 1: 0.0001, 2: 0.5999},
    ),
    "two coins": (two_coins, {True: 0.3 * 0.7 + 0.7 * 0.705, False: 0.3 * 0.3 + 0.7 * 0.295}),
    "block": (block_of_seven, block_of_seven_by_hand()),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_law_is_what_a_hand_counts(name: str) -> None:
    function, expected = BY_HAND[name]
    assert distance(law_of(function), expected) <= 1e-12


def test_threshold_is_found_to_the_last_bit() -> None:
    """k / 2^53 < 3 * 2^-53 holds for three values of k."""
    assert law_of(lambda coins: coin(coins) < 3 * ULP)[True] == 3 * ULP


def test_hint_shows_a_piece_that_the_grid_steps_over() -> None:
    law = law_of(lambda coins: 0.3 <= coin(coins) < 0.3 + 2.0**-20, hints=[0.3 + 2.0**-21])
    assert law[True] == pytest.approx(2.0**-20, abs=1e-15)


CHAIN = (-1, 0, 1, 2, 3)
STAR = (-1, 0, 0, 0, 0, 0, 0)
BINARY = (-1, 0, 0, 1, 1, 2, 2)
RULES_DRIVEN = [
    ("chain", CHAIN),
    ("block", CHAIN),
    ("recursive", BINARY),
    ("without_replacement", STAR),
    ("deterministic", BINARY),
    ("sample_and_match", STAR),
    ("traversal", BINARY),
]


@pytest.mark.parametrize(("name", "parents"), RULES_DRIVEN, ids=[f"{name}-{len(p)}" for name, p in RULES_DRIVEN])
def test_rule_driven_by_coins_has_the_law_of_its_enumeration_in_fractions(name: str, parents: tuple[int, ...]) -> None:
    rule, generator = RULES[name], random.Random(len(name))
    proposal = rule.proposals[0]
    tokens = [0, *(1 + parents[:node].count(parents[node]) % 4 for node in range(1, len(parents)))]
    p, q = ([fractions_of(5, generator) for _ in parents] for _ in range(2))
    draft_probs = None if proposal == "deterministic" else torch.tensor([list(map(float, row)) for row in q]).double()
    tree = DraftTree(tokens, parents, draft_probs, proposal)
    expected: dict[Hashable, Fraction] = {}
    for weight, result in outcomes(lambda chance: rule.function(tree, p, None if draft_probs is None else q, chance)):
        expected[result] = expected.get(result, Fraction(0)) + weight

    floats = [[float(one) for one in row] for row in p], [[float(one) for one in row] for row in q]
    law = law_of(
        lambda coins: rule.function(tree, floats[0], None if draft_probs is None else floats[1], CoinChance(coins))
    )

    assert distance(law, expected) <= 1e-12


def fractions_of(vocab_size: int, generator: random.Random) -> list[Fraction]:
    weights = [generator.randint(1, 30) for _ in range(vocab_size)]
    return [Fraction(weight, sum(weights)) for weight in weights]


def endless(coins: Coins) -> None:
    while coin(coins) < 2:
        pass


calls: list[int] = []


def unsteady(coins: Coins) -> bool:
    calls.append(1)
    return coin(coins) < 0.5 and len(calls) < 100


REFUSALS: dict[str, tuple[Callable[[Coins], Hashable], dict[str, int], str]] = {
    "endless": (endless, {}, "it asks for more than 64 coins"),
    "continuous": (
        lambda coins: round(coin(coins), 6),
        {},
        "a coin of it has more than 400 pieces: its law is not piecewise constant in that coin",
    ),
    "unsteady": (unsteady, {}, "it answers differently to equal coins: it keeps state or has randomness of its own"),
    "dear": (two_coins, {"max_runs": 100}, "its law takes more than 100 runs to explore"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal_says_why_in_one_sentence(name: str) -> None:
    function, limits, text = REFUSALS[name]
    with pytest.raises(CannotTell) as caught:
        law_of(function, **limits)
    assert str(caught.value) == text


def test_what_one_shift_of_the_grid_misses_another_one_finds() -> None:
    """A sliver narrower than a cell, with like neighbours."""

    def sliver(coins: Coins) -> bool:
        return 0.532 <= float(coins.uniform(1)) < 0.5465

    missed = [law_of(sliver, grid=32, shift=shift) == {False: 1.0} for shift in (0.5, 0.25)]
    assert missed == [True, False]
    found = law_of(sliver, grid=32, shift=0.25)
    assert found[True] == pytest.approx(0.0145, abs=1e-12)


@pytest.mark.parametrize("bits", [8, 24, 53])
def test_fewer_bits_of_a_coin_put_a_breakpoint_off_by_one_step(bits: int) -> None:
    law = law_of(lambda coins: float(coins.uniform(1)) < 1 / 3, coin_bits=bits)
    assert abs(law[True] - 1 / 3) <= 2.0**-bits
