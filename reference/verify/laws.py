"""What the rules do to laws: a ratio, a residual, a law with one token struck. Nothing here divides by zero.

Where a residual is empty the draft that led there could not have been refused, so what stands in for it has no
probability; it is the law itself, which at least never gives a token that the target cannot say.
"""

from __future__ import annotations

from typing import Any

from specbench.reference.verify.chance import Law


def ratio(p: Any, q: Any) -> Any:
    """p / q; zero where q is, since a token that q cannot give was not drawn from it: such a draft is never kept."""
    return p / q if q > 0 else 0 * p


def residual(p: Law, q: Law, scale: Any = 1) -> list[Any]:
    """The normalised positive part of scale * p - q, and p itself where nothing is left."""
    left = excess(p, q, scale)
    return normalised(left) if any(left) else list(p)


def excess(p: Law, q: Law, scale: Any = 1) -> list[Any]:
    """The positive part of scale * p - q."""
    return [max(scale * target - draft, 0 * target) for target, draft in zip(p, q, strict=True)]


def struck(law: Law, token: int) -> list[Any]:
    """The law of the tokens but this one: normalised, or all zeros where there is no other."""
    left = list(law)
    left[token] = 0 * left[token]
    return normalised(left)


def normalised(law: Law) -> list[Any]:
    """The law itself when nothing is left of it."""
    total = sum(law)
    return [one / total for one in law] if total > 0 else list(law)
