"""Sample and match: the target draws its own token at each node, and the text follows what was drafted. Lossless.

Sources: SpecInfer's naive sampling (arXiv 2305.09781), Lookahead, engines that verify by sampling. Every token that is
emitted is a fresh draw from p, so it holds for any tree that does not depend on the coins.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.following import follow
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def sample_and_match(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """One draw from p for each text that is reached, duplicates of a node sharing it."""
    return follow(tree, lambda node: chance.draw(target_probs[node]))
