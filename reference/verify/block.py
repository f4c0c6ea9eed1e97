"""Block verification: a chain is judged as a whole, from its end (Sun et al., arXiv 2403.10444). Lossless.

Never accepts fewer tokens in expectation than judging one by one. Compared with vLLM's kernel: the same running ratio
and the same residual mass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.laws import excess, ratio, residual
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def block_verification(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """pi_0 = 1, pi_i = min(1, pi_(i-1) p(x_i)/q(x_i)). The longest block i whose coin lies below h_i is kept, where
    h_i = s_i / (s_i + 1 - pi_i) with s_i the mass of (pi_i p - q)+ after x_i, and h = pi for the whole chain. Then the
    token is drawn from that positive part, or from p behind the whole chain."""
    assert draft_probs is not None
    pi = [1 + 0 * target_probs[0][0]]
    for node in range(1, tree.num_nodes):
        token = tree.token_list[node]
        pi.append(min(1, pi[-1] * ratio(target_probs[node - 1][token], draft_probs[node - 1][token])))
    last = tree.num_nodes - 1
    if chance.accept(pi[last]):
        return VerifyResult(tuple(range(1, last + 1)), chance.draw(target_probs[last]))
    for node in range(last - 1, 0, -1):
        left = sum(excess(target_probs[node], draft_probs[node], pi[node]))
        # p = q behind a block of pi 1: what follows is kept as surely as the block, so this decision is never reached.
        keeps = left / (left + 1 - pi[node]) if left + 1 - pi[node] > 0 else 1
        if chance.accept(keeps):
            return VerifyResult(tuple(range(1, node + 1)), chance.draw(_rest(target_probs, draft_probs, pi, node)))
    return VerifyResult((), chance.draw(_rest(target_probs, draft_probs, pi, 0)))


def _rest(target_probs: Sequence[Law], draft_probs: Sequence[Law], pi: list[Any], node: int) -> list[Any]:
    return residual(target_probs[node], draft_probs[node], pi[node])
