"""Acceptance rules: which drafts does the target keep, and what does it say next.

A draft is judged by its parent's row, never its own: row i has read node i and predicts what follows it. The lossless
greedy walk stands first; the lossy threshold rule is apart and shares no code path with it.
"""

from __future__ import annotations

from torch import Tensor

from specbench.steps import WalkStep
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def greedy_walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
    """Follow the target's argmax down the tree (SpecInfer, Medusa, EAGLE at temperature 0). Lossless.

    target_logits: float [N, V], row i follows node i. Ties go to the lowest token id. Duplicate siblings stand for the
    same text, so the walk goes on below all of them at once and a copy without children costs no acceptance.
    """
    same_text = [0]  # nodes whose path spells what has been accepted so far
    while True:
        token = argmax_lowest(target_logits[same_text[0]])
        matches = [child for node in same_text for child in tree.children(node) if tree.token_list[child] == token]
        if not matches:
            return VerifyResult(path=tuple(tree.path_to(same_text[0])[1:]), bonus_token=token)
        same_text = matches


def threshold_walk(threshold: float) -> WalkStep:
    """LOSSY: accept a draft while the target's probability of it exceeds `threshold`; then emit the argmax.

    The classic first experiment with speculative decoding. Among children above the threshold the most probable one is
    taken (lowest token id on ties). A draft above one half is the argmax, so at thresholds >= 0.5 nothing is lost.
    """
    if not 0.0 <= threshold <= 1.0:
        raise ValueError(f"threshold = {threshold} must be between 0.0 and 1.0 (a probability)")

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        node = 0
        path: list[int] = []
        while True:
            target_probs = target_logits[node].double().softmax(dim=-1)
            above = [
                (-target_probs[tree.token_list[child]].item(), tree.token_list[child], child)
                for child in tree.children(node)
                if target_probs[tree.token_list[child]].item() > threshold
            ]
            if not above:
                return VerifyResult(path=tuple(path), bonus_token=argmax_lowest(target_logits[node]))
            node = min(above)[2]
            path.append(node)

    return walk


def argmax_lowest(row: Tensor) -> int:
    """The lowest token id among the maxima of a row [V]. torch.argmax does not promise which maximum it returns."""
    best = row.max()
    if best.isnan():
        raise ValueError("target logits hold NaN, so no token is the largest: look at the forward that made them")
    return int((row == best).nonzero()[0].item())
