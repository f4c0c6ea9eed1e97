"""Drafter-invariant coupling: drafter and target pick their tokens with the same noise (Daliri, Musco and Suresh, arXiv
2408.07978). Lossless, and more: the output is a function of seed and p, bit-equal with any drafter and with none.

The exponential race argmax p/e is the paper's argmax of log p plus Gumbel noise, since -log e is Gumbel. The same noise
must not serve a rule that rejects: drafts and coins would depend on each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.following import follow
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def gumbel_coupling(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """The target's pick of each place is emitted; it matches a draft where the drafter's pick was the same."""
    return follow(tree, lambda node: chance.race(target_probs[node], int(tree.depth[node]) + 1))
