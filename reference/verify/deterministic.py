"""Strike and renormalise: the rule for drafts that were chosen, not drawn. Lossless, and needs no q.

Known from EAGLE-1, 2 and 3 (q(x) = 1), SGLang's tree kernel and n-gram drafts in vLLM, whose code was not read here.
It stays lossless for drafts that were drawn, as long as they do not depend on the coins it uses; it then only accepts
less than a rule that knows q.
"""

from __future__ import annotations

from collections.abc import Sequence

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.laws import struck
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def strike_and_renormalise(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """A child x is kept with probability p(x), otherwise it is struck from p; a copy of it then has no chance."""
    path = [0]
    while True:
        p = target_probs[path[-1]]
        for child in tree.children(path[-1]):
            token = tree.token_list[child]
            if chance.accept(p[token]):
                path.append(child)
                break
            left = struck(p, token)
            p = left if any(left) else p  # nothing but x: it could not have been refused
        else:
            return VerifyResult(tuple(path[1:]), chance.draw(p))
