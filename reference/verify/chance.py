"""Where the decisions of a rule come from: coins, an enumeration of all of them, or noise that two models share.

Rules are written against `Chance` and over any numbers that add, multiply, divide and compare, so that the function the
decoder calls with floats and coins gives its exact law in fractions when every decision is gone through.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from specbench.protocols import Coins, SeededCoins
from specbench.tree import DraftTree
from specbench.types import VerifyResult

Law = Sequence[Any]  # V numbers >= 0, summing to one


class Chance(Protocol):
    """One decision a call, each independent of the others but races at one place."""

    def accept(self, probability: Any) -> bool:
        """True with that probability, which is clipped to [0, 1]."""
        ...

    def draw(self, law: Law) -> int:
        """A token. The law need not be normalised; a token of probability 0 is never drawn."""
        ...

    def race(self, law: Law, place: int) -> int:
        """The argmax of law / e, e the exponential noise of a place: the same vector for all who race there.

        place: tokens behind the root, 1 for its children. The implementation knows where in the text the root stands.
        """
        ...


# (tree, target_probs, draft_probs, chance). target_probs: N laws p, row i after node i. draft_probs: N laws q, row i
# the one that the children of node i were drawn from; None where the rule asks for none.
RuleFn = Callable[[DraftTree, Sequence[Law], Sequence[Law] | None, Chance], VerifyResult]


class SharedNoise(SeededCoins):
    """Coins of a request that also offer, for every place of its text, noise: a function of seed and place alone.

    Whoever holds the same seed meets the same noise, however many coins were tossed in between.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self._seed = seed

    def exponential(self, place: int, vocab_size: int) -> Tensor:
        """float64 [V], each > 0. place: the absolute position of the token, the prompt's first being 0."""
        # Hashed, so that neighbouring places and seeds have nothing in common, as seeds of one generator might.
        digest = hashlib.blake2b(f"{self._seed} {place}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
        uniforms = torch.rand(vocab_size, generator=generator, dtype=torch.float64)
        return -torch.log1p(-uniforms).clamp_max(-torch.finfo(torch.float64).tiny)


class CoinChance:
    """Decisions by coins, one uniform each: accepted where it lies below the probability, drawn by the inverse of the
    law's cumulative sums. Races need coins with noise, and `root_place`, the absolute position of the root."""

    def __init__(self, coins: Coins, *, root_place: int = 0) -> None:
        self._coins = coins
        self._root_place = root_place

    def accept(self, probability: Any) -> bool:
        return float(self._coins.uniform(1)) < probability

    def draw(self, law: Law) -> int:
        return inverse_cdf(law, float(self._coins.uniform(1)))

    def race(self, law: Law, place: int) -> int:
        return first_past(law, noise_of(self._coins, self._root_place + place, len(law)))


def noise_of(coins: Coins, place: int, vocab_size: int) -> list[float]:
    """The noise of an absolute place; ValueError where the coins have none to share."""
    if not hasattr(coins, "exponential"):
        raise ValueError(
            f"coins = {type(coins).__name__} must have exponential(place, vocab_size), noise that drafter and target "
            f"share: take SharedNoise(seed)"
        )
    return coins.exponential(place, vocab_size).tolist()


def inverse_cdf(law: Law, uniform: float) -> int:
    """The token in whose stretch of the law's cumulative sums `uniform`, scaled to their total, falls."""
    goal = uniform * sum(law)
    reached, last = 0 * goal, None
    for token, weight in enumerate(law):
        if weight > 0:
            reached, last = reached + weight, token
            if reached > goal:
                return token
    if last is None:
        raise ValueError(f"law of {len(law)} tokens has no token of positive probability to draw: look at who made it")
    return last  # rounding put the end of the last stretch at the goal itself


def first_past(law: Law, noise: Sequence[float]) -> int:
    """The lowest token id among the maxima of law / noise."""
    speeds = [weight / one for weight, one in zip(law, noise, strict=True)]
    fastest = max(speeds)
    if not fastest > 0:
        raise ValueError(f"law of {len(law)} tokens has no token of positive probability to draw: look at who made it")
    return speeds.index(fastest)
