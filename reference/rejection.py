"""Recursive rejection: the acceptance rule that keeps the target's law when drafts were drawn from another one.

Source: SpecInfer (arXiv 2305.09781) and Medusa's and EAGLE's tree forms of Leviathan et al. (arXiv 2211.17192). Written
over any numbers that add, multiply and compare, so that fractions give its exact law. The decoder does not use it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specbench.tree import DraftTree
from specbench.types import VerifyResult

Law = Sequence[Any]  # one number >= 0 a token, summing to one


class Chance(Protocol):
    """Where decisions come from: coins, or an enumeration of all of them."""

    def accept(self, probability: Any) -> bool: ...

    def draw(self, law: Law) -> int: ...


def recursive_rejection(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """target_probs: N laws p, row i after node i. draft_probs: N laws q, row i the one that the children of node i were
    drawn from; None where the proposal is deterministic. `tree.proposal` says how they were drawn.

    Children are tried in order. An iid child x is kept with probability min(1, p(x)/q(x)), otherwise p becomes the
    normalised positive part of p - q. Drawn without replacement, q is first conditioned on the siblings before x.
    A deterministic child is kept with probability p(x), otherwise x is struck from p; a copy of it then has no chance.
    """
    node = 0
    path: list[int] = []
    while True:
        p = list(target_probs[node])
        q = None if draft_probs is None else list(draft_probs[node])
        kept = None
        for child in tree.children(node):
            token = tree.token_list[child]
            if q is None:
                if chance.accept(p[token]):
                    kept = child
                    break
                p[token] = 0 * p[token]
            else:
                if chance.accept(min(1, p[token] / q[token])):
                    kept = child
                    break
                p = [max(target - draft, 0) for target, draft in zip(p, q, strict=True)]
                if tree.proposal == "without_replacement":
                    q[token] = 0 * q[token]
                    q = _normalised(q)
            p = _normalised(p)
        if kept is None:
            return VerifyResult(tuple(path), chance.draw(p))
        path.append(kept)
        node = kept


def sample_and_match(tree: DraftTree, target_probs: Sequence[Law], chance: Chance) -> VerifyResult:
    """One draw from p a node, followed to the child that carries it: every token emitted is freshly drawn from p."""
    node = 0
    path: list[int] = []
    while True:
        token = chance.draw(target_probs[node])
        matching = [child for child in tree.children(node) if tree.token_list[child] == token]
        if not matching:
            return VerifyResult(tuple(path), token)
        path.append(matching[0])
        node = matching[0]


def _normalised(law: Law) -> list[Any]:
    """The law itself when nothing is left of it: that branch has no probability."""
    total = sum(law)
    return [one / total for one in law] if total else list(law)
