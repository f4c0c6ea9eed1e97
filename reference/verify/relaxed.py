"""LOSSY: TensorRT-LLM's relaxed acceptance for thinking phases: a draft near the top of the target's law is kept.

Compared with the Python side of its MTP worker (softmax, top-k, delta); the CUDA kernel behind it was not read. Theirs
is for chains; a tree is walked here by the likeliest child that qualifies.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law, RuleFn
from specbench.reference.verify.greedy import most_probable
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def relaxed_acceptance(*, top_n: int = 10, delta: float = 0.6) -> RuleFn:
    """A draft is kept where it is among the target's `top_n` tokens (lowest ids on ties) and p(x) >= max p - delta; the
    first that is not is replaced by the argmax. A token of probability 0 is never kept."""

    def rule(
        tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
    ) -> VerifyResult:
        path = [0]
        while True:
            p = target_probs[path[-1]]
            top = sorted(range(len(p)), key=lambda token: (-p[token], token))[:top_n]
            near = {token: rank for rank, token in enumerate(top) if p[token] > 0 and p[token] >= max(p) - delta}
            kept = [child for child in tree.children(path[-1]) if tree.token_list[child] in near]
            if not kept:
                return VerifyResult(tuple(path[1:]), most_probable(p))
            path.append(min(kept, key=lambda child: near[tree.token_list[child]]))

    return rule
