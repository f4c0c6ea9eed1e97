"""LOSSY: a draft is accepted while the target's probability of it exceeds a threshold; then the argmax is emitted.

The classic first experiment with speculative decoding. Among children above the threshold the most probable one is
taken (lowest token id on ties). A draft above one half is the argmax, so at thresholds >= 0.5 and temperature 0 nothing
is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specbench.reference.verify.chance import Chance, Law, RuleFn
from specbench.reference.verify.greedy import argmax_lowest, most_probable
from specbench.steps import WalkStep
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def threshold_walk(threshold: float) -> WalkStep:
    """The rule over logits, whose softmax is compared; the argmax is that of the logits."""
    _check(threshold)

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        path = [0]
        while (
            node := _best_above(tree, path[-1], target_logits[path[-1]].double().softmax(-1), threshold)
        ) is not None:
            path.append(node)
        return VerifyResult(path=tuple(path[1:]), bonus_token=argmax_lowest(target_logits[path[-1]]))

    return walk


def threshold_acceptance(threshold: float) -> RuleFn:
    """The rule over laws; neither q nor chance has a say."""
    _check(threshold)

    def rule(
        tree: DraftTree, target_probs: Sequence[Law], draft_probs: Sequence[Law] | None, chance: Chance
    ) -> VerifyResult:
        path = [0]
        while (node := _best_above(tree, path[-1], target_probs[path[-1]], threshold)) is not None:
            path.append(node)
        return VerifyResult(path=tuple(path[1:]), bonus_token=most_probable(target_probs[path[-1]]))

    return rule


def _best_above(tree: DraftTree, node: int, p: Law | Tensor, threshold: float) -> int | None:
    above: list[tuple[Any, int, int]] = [
        (-p[tree.token_list[child]], tree.token_list[child], child)
        for child in tree.children(node)
        if p[tree.token_list[child]] > threshold
    ]
    return min(above)[2] if above else None


def _check(threshold: float) -> None:
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold = {threshold} must be between 0.0 and 1.0 (a probability)")
