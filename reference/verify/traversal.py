"""Traversal verification: a tree is judged leaf by leaf, from its first leaf towards the root. Lossless.

After Weng et al. (arXiv 2505.12398), whose idea it is: rebuilt from it and confirmed by enumeration, not compared with
their Algorithm 2, which we could not read. On a chain it is block verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specbench.reference.verify.chance import Chance, Law
from specbench.reference.verify.laws import excess, ratio, residual, struck
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def traversal_verification(
    tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
) -> VerifyResult:
    """The value of a node is min(1, value of its parent times p(x)/q(x)), the root's 1. The first leaf that is left is
    kept with its value, together with its whole path, and the token is drawn from the leaf's p as it stands. A leaf
    that is refused is cut off; its parent's p becomes the normalised (value p - q)+ of mass s, its value
    s / (s + 1 - value), and a q without replacement no longer holds the refused token."""
    assert draft_probs is not None
    value: dict[int, Any] = {0: 1 + 0 * target_probs[0][0]}
    p: dict[int, Law] = {0: target_probs[0]}
    q: dict[int, Law] = {0: draft_probs[0]}
    todo = {node: tree.children(node)[::-1] for node in range(tree.num_nodes)}  # each node's first child last
    path = [0]
    while True:
        node = path[-1]
        if todo[node]:
            child = todo[node].pop()
            token = tree.token_list[child]
            value[child] = min(1, value[node] * ratio(p[node][token], q[node][token]))
            p[child], q[child] = target_probs[child], draft_probs[child]
            path.append(child)
        elif node == 0 or chance.accept(value[node]):
            return VerifyResult(tuple(path[1:]), chance.draw(p[node]))
        else:
            path.pop()
            parent = path[-1]
            left = sum(excess(p[parent], q[parent], value[parent]))
            p[parent] = residual(p[parent], q[parent], value[parent])
            # p = q and value 1: no child is ever refused here, so any value will do.
            refusal = left + 1 - value[parent]
            value[parent] = left / refusal if refusal > 0 else value[parent]
            if tree.proposal == "without_replacement":
                q[parent] = struck(q[parent], tree.token_list[node])
