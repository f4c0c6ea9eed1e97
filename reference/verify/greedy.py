"""The greedy walk: the target's argmax is followed down the tree (SpecInfer, Medusa, EAGLE at temperature 0).

Lossless at temperature 0, where the target's law has all its mass on the argmax. Ties go to the lowest token id.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.following import follow
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def greedy_walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """target_logits: float [N, V], row i follows node i."""
    return follow(tree, lambda node: argmax_lowest(target_logits[node]))


def greedy_acceptance(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """The same walk over laws; neither q nor chance has a say."""
    return follow(tree, lambda node: most_probable(target_probs[node]))


def argmax_lowest(row: Tensor) -> int:
    """The lowest token id among the maxima of a row [V]. torch.argmax does not promise which maximum it returns."""
    best = row.max()
    if best.isnan():
        raise ValueError("target logits hold NaN, so no token is the largest: look at the forward that made them")
    return int((row == best).nonzero()[0].item())


def most_probable(law: Law) -> int:
    """The lowest token id among the maxima of a law."""
    return list(law).index(max(law))
