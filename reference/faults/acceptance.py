"""Verifiers that keep the wrong drafts or say the wrong token after them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.verify import argmax_lowest
from specbench.steps import Emission, Steps
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def _own_row(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        node = 0
        path: list[int] = []
        while True:
            fitting = [
                child for child in tree.children(node) if argmax_lowest(target_logits[child]) == tree.token_list[child]
            ]
            if not fitting:
                return VerifyResult(tuple(path), argmax_lowest(target_logits[node]))
            node = fitting[0]
            path.append(node)

    return replace(steps, walk=walk)


def _first_unverified(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = steps.walk(tree, target_logits)
        if result.path or not tree.children(0):
            return result
        first = tree.children(0)[0]
        return VerifyResult((first,), argmax_lowest(target_logits[first]))

    return replace(steps, walk=walk)


def _bonus_by_depth(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        result = steps.walk(tree, target_logits)
        if not result.path:
            return result
        # The row number is taken for the depth: right on a chain and nowhere else.
        return VerifyResult(result.path, argmax_lowest(target_logits[len(result.path)]))

    return replace(steps, walk=walk)


def _correction_twice(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, num_remaining: int, **rest: Any) -> Emission:
        one = steps.emit(tree, result, num_remaining=num_remaining, **rest)
        if result.path or one.finish_reason or len(one.tokens) == num_remaining or tree.num_drafts == 0:
            return one
        return Emission((*one.tokens, one.tokens[-1]), None)

    return replace(steps, emit=emit)


def _rounded_rows(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        return steps.walk(tree, target_logits.to(torch.bfloat16))

    return replace(steps, walk=walk)


def _first_columns(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        return steps.walk(tree, target_logits[:, :16])

    return replace(steps, walk=walk)


FAULTS = (
    Fault(
        "own_row",
        "row-self",
        "a draft is judged by its own row, which has read it already, instead of its parent's",
        "any draft",
        "greedy.walk",
        _own_row,
    ),
    Fault(
        "first_unverified",
        "accept-draft-first-unverified",
        "the first draft is kept when nothing was accepted",
        "a fully rejected draft",
        "greedy.walk",
        _first_unverified,
    ),
    Fault(
        "bonus_row",
        "bonus/correction-token-wrong",
        "the bonus token comes from the row numbered by depth, not from the last accepted node's",
        "an accepted path off the leftmost one",
        "greedy.walk",
        _bonus_by_depth,
    ),
    Fault(
        "correction_twice",
        "bonus/correction-token-wrong",
        "the correction after a rejection is emitted again as the first token of the next round",
        "a fully rejected draft, and a round after it",
        "greedy.lossless",
        _correction_twice,
    ),
    Fault(
        "rows_rounded",
        "dtype/precision",
        "the verifier rounds the logits to bf16 before it compares them",
        "two logits closer than bf16 can tell",
        "greedy.walk",
        _rounded_rows,
    ),
    Fault(
        "first_columns",
        "tokenizer/vocab",
        "the verifier looks at the first 16 columns of the vocabulary",
        "a larger vocabulary",
        "greedy.walk",
        _first_columns,
    ),
)
