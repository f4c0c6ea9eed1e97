"""LOSSY: entropy-deferred rejection (FLy, arXiv 2511.22972; vLLM's `rejection_sample_method="fly"`).

A draft that speculative sampling refuses is kept all the same where the target is unsure there and the drafts behind it
are kept without help. Compared with vLLM's pre-pass kernel for temperature > 0: the same gate, window and order. Its
form at temperature 0 compares argmaxes while the entropy is that of the raw logits, which laws do not carry: left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law, RuleFn
from specbench.reference.verify.laws import ratio, residual
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def deferred_rejection(*, window: int = 2, threshold: float = 0.3, top_k: int = 3) -> RuleFn:
    """Chains only. Every draft is first judged by min(1, p(x)/q(x)), each with a coin of its own. A refused one is kept
    where p(x) and q(x) are positive, -sum p log p over the `top_k` largest of p reaches `threshold` (in nats, not
    normalised), and the next `window` drafts exist and were all kept by their own coins. The first draft that is kept
    neither way is replaced by a draw from the normalised (p - q)+. vLLM's window is min(6, gamma - 1) unless set."""

    def rule(
        tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
    ) -> VerifyResult:
        assert draft_probs is not None
        tokens = tree.token_list[1:]
        pairs = [(target_probs[i][token], draft_probs[i][token]) for i, token in enumerate(tokens)]
        kept = [chance.accept(min(1, ratio(p, q))) for p, q in pairs]
        for i, (p, q) in enumerate(pairs):
            following = kept[i + 1 : i + 1 + window]
            is_deferred = p > 0 and q > 0 and len(following) == window and all(following)
            if not kept[i] and not (is_deferred and _entropy(target_probs[i], top_k) >= threshold):
                return VerifyResult(tuple(range(1, i + 1)), chance.draw(residual(target_probs[i], draft_probs[i])))
        return VerifyResult(tuple(range(1, tree.num_nodes)), chance.draw(target_probs[len(tokens)]))

    return rule


def _entropy(p: Law, top_k: int) -> float:
    largest = sorted((float(one) for one in p), reverse=True)[:top_k]
    return -sum(one * math.log(one) for one in largest if one > 0)
