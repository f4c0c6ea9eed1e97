"""A chance that is not random: a function that asks it for decisions is run once for every way to answer them.

Weights are products in the numbers that the function itself uses, so that fractions give its exact law. Of a coin it
knows two answers, of a draw the tokens of positive mass, of a race the winner under noise that others look at too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

Law = Sequence[Any]  # one number >= 0 a token
Outcome = TypeVar("Outcome")


def outcomes(function: Callable[[Enumeration], Outcome]) -> Iterator[tuple[Any, Outcome]]:
    """(weight, what the function returned) for every combination of decisions that can happen, depth first.

    The function is called once each. It must be a function of the answers alone: asked for the same decision again
    after the same answers, it gets the answer of the fork, whatever probability it then names.
    """
    chance = Enumeration()
    while True:
        outcome = function(chance)
        yield chance.weight, outcome
        if not chance.advance():
            return


class Enumeration:
    """One run through the tree of decisions; `advance` turns it to the next leaf."""

    def __init__(self) -> None:
        self._forks: list[_Fork] = []
        self._num_asked = 0
        self._races: dict[int, list[tuple[Law, int]]] = {}  # place: the laws that raced there, and who won

    def accept(self, probability: Any) -> bool:
        if probability >= 1:
            return True
        if probability <= 0:
            return False
        return self._decide(lambda: [(probability, True), (1 - probability, False)])

    def draw(self, law: Law) -> int:
        return self._decide(lambda: _branches(law))

    def race(self, law: Law, place: int) -> int:
        """The token of the largest law/e, e the exponential noise at `place`: the same for all who ask about it.

        The first law there branches as a draw does; the second over its winners given the first one's. Winners of a
        third one have no closed form here.
        """
        raced = self._races.setdefault(place, [])
        share = _normalised(law)
        for other, winner in raced:
            if other == share:
                return winner
        if len(raced) > 1:
            raise ValueError(f"place {place} was asked about a third law, but races of two are what has a closed form")
        chances = share
        if raced:
            other, first = raced[0]
            chances = [both_win(other, share, first, token) for token in range(len(share))]
        winner = self._decide(lambda: _branches(chances))
        raced.append((share, winner))
        return winner

    @property
    def weight(self) -> Any:
        """The probability of the answers given in this run."""
        if self._num_asked < len(self._forks):
            raise ValueError("asked for fewer decisions after the same answers: it is no function of them")
        return self._forks[-1].weight if self._forks else 1

    def advance(self) -> bool:
        """The last decision that has another answer gets it; False when all runs are made."""
        self._num_asked = 0
        self._races = {}
        while self._forks and not self._forks[-1].advance():
            self._forks.pop()
        return bool(self._forks)

    def _decide(self, branches: Callable[[], list[tuple[Any, Any]]]) -> Any:
        if self._num_asked == len(self._forks):
            before = self._forks[-1].weight if self._forks else 1
            self._forks.append(_Fork(before, branches()))
        fork = self._forks[self._num_asked]
        self._num_asked += 1
        return fork.answer


class _Fork:
    """A decision: what it may be, with which probability, and what it is now. weight: of all answers up to here."""

    def __init__(self, before: Any, branches: list[tuple[Any, Any]]) -> None:
        self._before, self._branches, self._idx = before, branches, -1
        self.advance()

    def advance(self) -> bool:
        self._idx += 1
        if self._idx == len(self._branches):
            return False
        probability, self.answer = self._branches[self._idx]
        self.weight = self._before * probability
        return True


def both_win(law: Law, other: Law, token: int, other_token: int) -> Any:
    """P(token has the largest law/e and other_token the largest other/e), e one vector of unit exponentials.

    For one token: every other e_k exceeds e_token times the larger of two ratios. For two tokens i and j: r = e_j/e_i
    lies between law_j/law_i and other_j/other_i, and every other e_k exceeds e_i max(law_k/law_i, r other_k/other_j);
    e_i integrated out leaves dr / c(r)^2, c(r) = 1 + r + the sum of these maxima, linear between its corners.
    """
    i, j = token, other_token
    if law[i] <= 0 or other[j] <= 0:
        return 0 * law[i]
    if i == j:
        return 1 / sum(max(p / law[i], q / other[i]) for p, q in zip(law, other, strict=True))
    lowest = law[j] / law[i]
    highest = other[j] / other[i] if other[i] > 0 else None  # None: no bound
    rest = [(law[k] / law[i], other[k] / other[j]) for k in range(len(law)) if k not in (i, j)]
    corners = sorted({flat / slope for flat, slope in rest if slope > 0} | {lowest})
    corners = [one for one in corners if one >= lowest and (highest is None or one < highest)]
    if not corners:
        return 0 * law[i]
    total = 0 * law[i]
    for low, high in zip(corners, [*corners[1:], highest], strict=True):
        steep = [slope > 0 and flat / slope <= low for flat, slope in rest]
        slope_here = 1 + sum(slope for is_steep, (_, slope) in zip(steep, rest, strict=True) if is_steep)
        flat_here = 1 + sum(flat for is_steep, (flat, _) in zip(steep, rest, strict=True) if not is_steep)
        at_low = flat_here + slope_here * low
        if high is None:
            total += 1 / (slope_here * at_low)
        else:
            total += (high - low) / (at_low * (flat_here + slope_here * high))
    return total


def _branches(law: Law) -> list[tuple[Any, int]]:
    for token, mass in enumerate(law):
        if mass < 0:
            raise ValueError(f"law[{token}] = {mass} must be >= 0 (a probability)")
    total = sum(law)
    if not total > 0:
        raise ValueError("law has no mass: there is no token to draw")
    return [(mass / total, token) for token, mass in enumerate(law) if mass > 0]


def _normalised(law: Law) -> list[Any]:
    total = sum(law)
    return [mass / total for mass in law]
