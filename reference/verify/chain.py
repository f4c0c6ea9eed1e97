"""Speculative sampling along a chain (Leviathan et al., arXiv 2211.17192; Chen et al., 2302.01318). Lossless.

Its test was compared with vLLM's, which never keeps a draft of q = 0 either; the residual is the papers'.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.laws import ratio, residual
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def speculative_sampling(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """A draft x from q is kept with probability min(1, p(x)/q(x)); the first that is not is replaced by a draw from the
    normalised positive part of p - q. Behind a full path the token is drawn from p."""
    assert draft_probs is not None
    node = 0
    for child in range(1, tree.num_nodes):
        p, q, token = target_probs[node], draft_probs[node], tree.token_list[child]
        if not chance.accept(min(1, ratio(p[token], q[token]))):
            return VerifyResult(tuple(range(1, child)), chance.draw(residual(p, q)))
        node = child
    return VerifyResult(tuple(range(1, tree.num_nodes)), chance.draw(target_probs[node]))
