"""SpecTr's k-SEQ: k siblings drawn with replacement, tried in turn against p / (rho q) (arXiv 2310.15141). Lossless.

rho in [1, k] trades the first sibling's chance for the last one's. Any rho with A <= rho beta is exact, smaller ones
leave a residual of negative mass; the least that is valid is found by bisection, from above, and used as found. Written
from the paper's formulas; no other code was compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from numbers import Rational
from typing import Any

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.laws import excess, normalised, ratio
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def k_sequential(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """A sibling x is kept with probability min(1, p(x) / (rho q(x))). When all k are refused, the token is drawn from
    what p leaves beyond their share: p(x) - min(q(x), p(x)/rho) A / beta, normalised."""
    assert draft_probs is not None
    path = [0]
    while children := tree.children(path[-1]):
        p, q = target_probs[path[-1]], draft_probs[path[-1]]
        rho = valid_rho(p, q, len(children))
        for child in children:
            token = tree.token_list[child]
            if chance.accept(min(1, ratio(p[token], rho * q[token]))):
                path.append(child)
                break
        else:
            return VerifyResult(tuple(path[1:]), chance.draw(_residual(p, q, rho, len(children))))
    return VerifyResult(tuple(path[1:]), chance.draw(target_probs[path[-1]]))


def valid_rho(p: Law, q: Law, k: int) -> Any:
    """The least rho in [1, k] for which A <= rho beta holds, or a little more: less than 1e-3 in rationals, whose size
    grows with every step, 1e-12 in floats.

    beta is the chance that one sibling is kept, A = 1 - (1 - beta)^k that any is. rho beta - A does not fall as rho
    rises, and k is always valid.
    """
    is_exact = isinstance(sum(p) + sum(q), Rational)
    tolerance: Any = Fraction(1, 1000) if is_exact else 1e-12
    low, high = (Fraction(1), Fraction(k)) if is_exact else (1.0, float(k))
    if _is_valid(p, q, low, k):
        return low
    while high - low >= tolerance:
        middle = (low + high) / 2
        low, high = (low, middle) if _is_valid(p, q, middle, k) else (middle, high)
    return high


def _is_valid(p: Law, q: Law, rho: Any, k: int) -> bool:
    beta = sum(_kept(p, q, rho))
    return 1 - (1 - beta) ** k <= rho * beta


def _kept(p: Law, q: Law, rho: Any) -> list[Any]:
    """The probability of each token to be drawn and kept, for one sibling."""
    return [min(draft, target / rho) for target, draft in zip(p, q, strict=True)]


def _residual(p: Law, q: Law, rho: Any, k: int) -> list[Any]:
    kept = _kept(p, q, rho)
    beta = sum(kept)
    if not beta > 0:
        return list(p)  # p and q share no token: nothing was ever kept
    share = (1 - (1 - beta) ** k) / beta
    left = excess(p, [share * one for one in kept])
    return normalised(left) if any(left) else list(p)
