"""Rows whose penalties, bans and grammar states look at the wrong history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.reference.processors import process_row
from specbench.steps import ProcessStep, Steps
from specbench.tree import DraftTree
from specbench.types import Sampling, Stop

# (tree, context, node) -> the history that the node's row is processed with.
Histories = Callable[[DraftTree, Sequence[int], int], Sequence[int]]


def _with_histories(make: Callable[[], Histories]) -> Callable[[Steps], Steps]:
    def plant(steps: Steps) -> Steps:
        histories = make()

        def process(
            tree: DraftTree,
            target_logits: Tensor,
            *,
            context: Sequence[int],
            num_prompt: int,
            sampling: Sampling,
            stop: Stop,
        ) -> Tensor:
            rows = [
                process_row(
                    target_logits[node],
                    histories(tree, context, node),
                    num_prompt=num_prompt,
                    sampling=sampling,
                    stop=stop,
                )
                for node in range(tree.num_nodes)
            ]
            return torch.stack(rows)

        return replace(steps, process=process)

    return plant


def _right(tree: DraftTree, context: Sequence[int], node: int) -> list[int]:
    return [*context, *tree.path_tokens(node)[1:]]


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
    def process(
        tree: DraftTree,
        target_logits: Tensor,
        *,
        context: Sequence[int],
        num_prompt: int,
        sampling: Sampling,
        stop: Stop,
    ) -> Tensor:
        out = target_logits.clone()
        out[0] = process_row(out[0], context, num_prompt=num_prompt, sampling=sampling, stop=stop)
        return out

    return replace(steps, process=process)


def _twice(steps: Steps) -> Steps:
    def process(tree: DraftTree, target_logits: Tensor, **keywords: object) -> Tensor:
        again: ProcessStep = steps.process
        return again(tree, again(tree, target_logits, **keywords), **keywords)  # type: ignore[arg-type]

    return replace(steps, process=process)


def _divides_all(steps: Steps) -> Steps:
    def process(
        tree: DraftTree,
        target_logits: Tensor,
        *,
        context: Sequence[int],
        num_prompt: int,
        sampling: Sampling,
        stop: Stop,
    ) -> Tensor:
        rows = target_logits.clone()
        for node in range(tree.num_nodes):
            seen = sorted(set(_right(tree, context, node)))
            rows[node, seen] /= sampling.repetition_penalty
        others = replace(sampling, repetition_penalty=1.0)
        return steps.process(tree, rows, context=context, num_prompt=num_prompt, sampling=others, stop=stop)

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
