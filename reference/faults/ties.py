"""Verifiers that break ties in another way than the lowest id, which is what plain decoding takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.verify import argmax_lowest
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import VerifyResult

# (tree, node, row of the node) -> the token that the row is taken to say.
Pick = Callable[[DraftTree, int, Tensor], int]


def _picking(pick: Pick) -> Callable[[Steps], Steps]:
    def plant(steps: Steps) -> Steps:
        def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
            said = torch.zeros_like(target_logits)
            for node, row in enumerate(target_logits):
                said[node, pick(tree, node, row)] = 1
            return steps.walk(tree, said)

        return replace(steps, walk=walk)

    return plant


def _last(row: Tensor) -> int:
    return int((row == row.max()).nonzero()[-1])


def _later_half(row: Tensor) -> int:
    """Each half of the vocabulary names its lowest maximum; equal ones go to the later half."""
    half = len(row) // 2
    return half + argmax_lowest(row[half:]) if row[half:].max() >= row[:half].max() else argmax_lowest(row[:half])


def _by_bits(row: Tensor) -> int:
    """0.0 lies above -0.0, as their bits do."""
    largest = row == row.max()
    positive = largest & ~row.signbit()
    return int((positive if positive.any() else largest).nonzero()[0])


def _draft_within(margin: float) -> Pick:
    """A drafted child that close to the largest logit stands for it."""

    def pick(tree: DraftTree, node: int, row: Tensor) -> int:
        drafted = [tree.token_list[child] for child in tree.children(node)]
        return next((token for token in drafted if row[token] >= row.max() - margin), argmax_lowest(row))

    return pick


FAULTS = (
    Fault(
        "last_maximum",
        "tie-breaking",
        "of equal logits the verifier takes the highest id, plain decoding the lowest",
        "a tie",
        "greedy.walk",
        _picking(lambda tree, node, row: _last(row)),
        origin="ohdearquant/lattice#280",
        kin="last_maximum",
    ),
    Fault(
        "last_maximum_of_leaves",
        "tie-breaking",
        "the bonus token after a full accept is picked by other code, which takes the highest id of equal logits",
        "a tie in a leaf's row that is reached",
        "greedy.walk",
        _picking(lambda tree, node, row: argmax_lowest(row) if tree.children(node) else _last(row)),
        subtle="a tie behind a full accept",
        kin="last_maximum",
    ),
    Fault(
        "tie_to_later_half",
        "tie-breaking",
        "each half of the vocabulary names its best token, and equal ones go to the later half",
        "a tie across the halves",
        "greedy.walk",
        _picking(lambda tree, node, row: _later_half(row)),
        origin="tenstorrent/tt-metal#50687",
        subtle="a tie across shards of the vocabulary",
    ),
    Fault(
        "tie_in_topk_order",
        "tie-breaking",
        "the verifier takes the first of torch.topk, which promises no order among equal logits",
        "a tie",
        "greedy.walk",
        _picking(lambda tree, node, row: int(row.topk(1).indices)),
        subtle="the tie must lie where topk meets the higher id first",
    ),
    Fault(
        "zeros_by_sign",
        "tie-breaking",
        "logits are compared by their bits, so that 0.0 beats -0.0",
        "a tie of -0.0 and a later 0.0",
        "greedy.walk",
        _picking(lambda tree, node, row: _by_bits(row)),
        subtle="a tie of the two zeros",
    ),
    Fault(
        "tie_to_the_draft",
        "tie-breaking",
        "a draft is accepted when its logit equals the largest, though a lower id has it too",
        "a tie with a drafted token",
        "greedy.walk",
        _picking(_draft_within(0.0)),
        subtle="a tie with a drafted token",
        kin="tie_to_the_draft",
    ),
    Fault(
        "near_tie_to_the_draft",
        "tie-breaking",
        "a draft is accepted when its logit is within a hundredth of the largest",
        "a near tie with a drafted token",
        "greedy.walk",
        _picking(_draft_within(0.01)),
        subtle="a near tie with a drafted token",
        kin="tie_to_the_draft",
    ),
)
