"""LOSSY: Medusa's typical acceptance: a draft is kept where its probability is not small beside the law's entropy.

Compared with FasterDecoding/Medusa, `evaluate_posterior` and `generate_candidates`: the threshold (with its 1e-5 in the
logarithm), the longest kept path, the likeliest among equals, the argmax as the next round's first token. Only that
argmax is what Medusa does without its later sampling options. Numbers are floats here, since exp and log are taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law, RuleFn
from specbench.reference.verify.greedy import most_probable
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def typical_acceptance(*, epsilon: float = 0.09, delta: float = 0.3) -> RuleFn:
    """A draft x is kept where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats."""

    def rule(
        tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
    ) -> VerifyResult:
        likelihood = {0: 0.0}  # log probability of each node that is kept together with its ancestors
        for node in range(1, tree.num_nodes):
            parent, token = tree.parent_list[node], tree.token_list[node]
            if parent in likelihood:
                p = [float(one) for one in target_probs[parent]]
                if p[token] > min(epsilon, delta * math.exp(-_entropy(p))):
                    likelihood[node] = likelihood[parent] + math.log(p[token])
        last = max(likelihood, key=lambda node: (int(tree.depth[node]), likelihood[node], -node))
        return VerifyResult(tuple(tree.path_to(last)[1:]), most_probable(target_probs[last]))

    return rule


def _entropy(p: Sequence[float]) -> float:
    return -sum(one * math.log(one + 1e-5) for one in p)
