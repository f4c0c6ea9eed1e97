"""What looks like a fault and is none: no input can show it. `tests/test_equivalent_faults.py` proves each on every
small input. They are kept apart from the bank, and nothing is to catch them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specbench.protocols import Cache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.rewrite import rewrite, rows_behind
from specbench.reference.verify import argmax_lowest
from specbench.steps import Emission, Steps
from specbench.tree import DraftTree
from specbench.types import Stop, VerifyResult


def _last_to_first(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        same_text = [0]
        while True:
            token = argmax_lowest(target_logits[min(same_text)])
            matches = [
                child
                for node in same_text
                for child in reversed(tree.children(node))
                if tree.token_list[child] == token
            ]
            if not matches:
                return VerifyResult(tuple(tree.path_to(min(same_text))[1:]), token)
            same_text = matches

    return replace(steps, walk=walk)


def _row_of_the_last_copy(steps: Steps) -> Steps:
    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        texts = [tree.path_tokens(node) for node in range(tree.num_nodes)]
        last_copy = [max(other for other, text in enumerate(texts) if text == one) for one in texts]
        return steps.walk(tree, target_logits[last_copy])

    return replace(steps, walk=walk)


def _limit_after_stop(steps: Steps) -> Steps:
    def emit(
        tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
    ) -> Emission:
        no_limit = len(result.path) + 2
        one = steps.emit(tree, result, stop=stop, num_remaining=no_limit, output=output)
        if len(one.tokens) > num_remaining:
            return Emission(one.tokens[:num_remaining], "length")
        is_at_limit = len(one.tokens) == num_remaining
        return Emission(one.tokens, one.finish_reason or ("length" if is_at_limit else None))

    return replace(steps, emit=emit)


def _two_searches(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, **rest: Any) -> Emission:
        by_token = steps.emit(tree, result, stop=replace(stop, stop_sequences=()), **rest)
        by_sequence = steps.emit(tree, result, stop=replace(stop, eos_token_ids=()), **rest)
        is_sequence = by_sequence.finish_reason == "stop" and len(by_sequence.tokens) < len(by_token.tokens)
        both_at_the_end = by_token.finish_reason != "eos" and by_sequence.finish_reason == "stop"
        return by_sequence if is_sequence or both_at_the_end else by_token

    return replace(steps, emit=emit)


def _in_place(steps: Steps) -> Steps:
    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        layers = rows_behind(cache, prefix_len)
        for place, row in enumerate(rows):
            for k, v in layers:
                k[:, place], v[:, place] = k[:, row], v[:, row]
        rewrite(cache, prefix_len, [(k[:, : len(rows)], v[:, : len(rows)]) for k, v in layers])

    return replace(steps, commit=commit)


EQUIVALENT = (
    Fault(
        "children_last_to_first",
        "accept-wrong-branch",
        "siblings are searched from the last to the first",
        "the lowest of all matches speaks for a text, in whatever order they were found",
        "",
        _last_to_first,
    ),
    Fault(
        "row_of_the_last_copy",
        "bonus/correction-token-wrong",
        "a node is judged, and the bonus token taken, by the row of its last copy instead of its own",
        "copies spell the same text, and a model gives one text one row",
        "",
        _row_of_the_last_copy,
    ),
    Fault(
        "limit_after_stop",
        "eos/stop/max-length",
        "stops are looked for beyond the limit, and the limit cuts afterwards",
        "a stop that is found beyond the limit is cut off together with its reason",
        "",
        _limit_after_stop,
    ),
    Fault(
        "end_tokens_before_sequences",
        "eos/stop/max-length",
        "end tokens are looked for in the whole run, then stop sequences in the whole run",
        "the earlier of the two ends the output, and at one place the end token names the reason",
        "",
        _two_searches,
    ),
    Fault(
        "compacted_in_place",
        "kv-wrong-path-compacted",
        "accepted rows are copied forward in place, over rows that may not have been read yet",
        "parents precede children, so a row is never written before it has been read",
        "",
        _in_place,
    ),
)
