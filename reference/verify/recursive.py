"""Recursive rejection: siblings are tried in turn, each against what the refused ones left of p. Lossless.

Sources: SpecInfer's multi-step sampling (arXiv 2305.09781) for siblings drawn with replacement; Sequoia (2402.12374),
with whose `Tree/SpecTree.py` this was compared, for siblings drawn without.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.laws import ratio, residual, struck
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def recursive_rejection(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """A sibling x is kept with probability min(1, p(x)/q(x)), otherwise p becomes the normalised positive part of
    p - q for the next. Duplicates are tried as often as they were drawn."""
    return _reject(tree, target_probs, draft_probs, chance, strike=False)


def conditional_rejection(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """The same for siblings drawn without replacement: behind a refused x, q is conditioned on not being x as well."""
    return _reject(tree, target_probs, draft_probs, chance, strike=True)


def _reject(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance, *, strike: bool
) -> VerifyResult:
    assert draft_probs is not None
    path = [0]
    while True:
        p, q = target_probs[path[-1]], draft_probs[path[-1]]
        for child in tree.children(path[-1]):
            token = tree.token_list[child]
            if chance.accept(min(1, ratio(p[token], q[token]))):
                path.append(child)
                break
            p = residual(p, q)
            q = struck(q, token) if strike else q
        else:
            return VerifyResult(tuple(path[1:]), chance.draw(p))
