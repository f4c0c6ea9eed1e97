"""Rows whose penalties, bans and grammar states look at the wrong history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.processors import process_row
from specbench.steps import Steps
from specbench.tree import DraftTree
from specbench.types import Sampling

# (tree, context, node) -> the history that the node's row is processed with.
Histories = Callable[[DraftTree, Sequence[int], int], Sequence[int]]


def _with_histories(make: Callable[[], Histories]) -> Callable[[Steps], Steps]:
    def plant(steps: Steps) -> Steps:
        histories = make()

        def process(tree: DraftTree, target_logits: Tensor, *, context: Sequence[int], **rest: Any) -> Tensor:
            rows = [process_row(row, histories(tree, context, node), **rest) for node, row in enumerate(target_logits)]
            return torch.stack(rows)

        return replace(steps, process=process)

    return plant


def _committed_only(tree: DraftTree, context: Sequence[int], node: int) -> Sequence[int]:
    return context


def _flattened(tree: DraftTree, context: Sequence[int], node: int) -> Sequence[int]:
    """Every node before this one in memory, whichever branch it is in."""
    return [*context, *tree.token_list[1 : node + 1]]


def _without_root(tree: DraftTree, context: Sequence[int], node: int) -> Sequence[int]:
    return [*context[:-1], *tree.path_tokens(node)[1:]]


def _rejected_counted() -> Histories:
    drafted: list[int] = []
    last: list[int] = []

    def history(tree: DraftTree, context: Sequence[int], node: int) -> Sequence[int]:
        if len(context) <= len(last):  # another text
            drafted.clear()
        if node == 0:
            last[:] = context
        out = [*context, *drafted, *tree.path_tokens(node)[1:]]
        if node == tree.num_nodes - 1:
            drafted.extend(tree.token_list[1:])
        return out

    return history


def _path_twice(tree: DraftTree, context: Sequence[int], node: int) -> Sequence[int]:
    return [*context, *2 * tree.path_tokens(node)[1:]]


def _only_root_processed(steps: Steps) -> Steps:
    def process(tree: DraftTree, target_logits: Tensor, *, context: Sequence[int], **rest: Any) -> Tensor:
        return torch.stack([process_row(target_logits[0], context, **rest), *target_logits[1:]])

    return replace(steps, process=process)


def _twice(steps: Steps) -> Steps:
    def process(tree: DraftTree, target_logits: Tensor, **rest: Any) -> Tensor:
        return steps.process(tree, steps.process(tree, target_logits, **rest), **rest)

    return replace(steps, process=process)


def _divides_all(steps: Steps) -> Steps:
    def process(
        tree: DraftTree, target_logits: Tensor, *, context: Sequence[int], sampling: Sampling, **rest: Any
    ) -> Tensor:
        rows = target_logits.clone()
        for node in range(tree.num_nodes):
            rows[node, sorted({*context, *tree.path_tokens(node)})] /= sampling.repetition_penalty
        others = replace(sampling, repetition_penalty=1.0)
        return steps.process(tree, rows, context=context, sampling=others, **rest)

    return replace(steps, process=process)


FAULTS = (
    Fault(
        "penalty_committed_only",
        "logits-processor-state",
        "penalties of a drafted row count the committed text, not the row's own path",
        "a draft below another one that repeats a token",
        "processors.penalties",
        _with_histories(lambda: _committed_only),
    ),
    Fault(
        "penalty_rejected_counted",
        "logits-processor-state",
        "rejected drafts of earlier rounds are still counted",
        "the round after a rejection",
        "processors.penalties",
        _with_histories(_rejected_counted),
    ),
    Fault(
        "penalty_path_twice",
        "logits-processor-state",
        "the drafted path is counted twice: a set penalty hides it, one that counts does not",
        "a frequency penalty and an accepted draft",
        "processors.penalties",
        _with_histories(lambda: _path_twice),
    ),
    Fault(
        "ban_on_root_only",
        "logits-processor-state",
        "only the root's row is processed, drafted rows are judged raw",
        "any accepted draft",
        "processors.bad_words",
        _only_root_processed,
    ),
    Fault(
        "grammar_in_memory_order",
        "grammar-state",
        "the grammar state moves from node to node in memory: right on a chain, no rollback between siblings",
        "a second sibling",
        "processors.grammar",
        _with_histories(lambda: _flattened),
    ),
    Fault(
        "history_without_root",
        "logits-processor-state",
        "processors are given the text without its last committed token",
        "any row",
        "processors.history",
        _with_histories(lambda: _without_root),
    ),
    Fault(
        "rows_processed_twice",
        "logits-processor-state",
        "every row goes through the processors twice",
        "any row",
        "processors.history",
        _twice,
    ),
    Fault(
        "repetition_divides_all",
        "logits-processor-state",
        "the repetition penalty divides negative logits too, which makes their tokens likelier",
        "a row whose logits are all negative",
        "processors.penalties",
        _divides_all,
    ),
)
