"""Stop rules that look at the wrong token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.steps import Emission, Steps
from specbench.tree import DraftTree
from specbench.types import Round, Stop, VerifyResult


def _last_token_only(steps: Steps) -> Steps:
    def emit(
        tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
    ) -> Emission:
        whole = steps.emit(tree, result, stop=Stop(), num_remaining=num_remaining)
        if whole.tokens and whole.tokens[-1] in stop.eos_token_ids:
            return Emission(whole.tokens, "eos")
        return whole

    return replace(steps, emit=emit)


def _round_only(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, output: Sequence[int] = (), **rest: Any) -> Emission:
        return steps.emit(tree, result, output=(), **rest)

    return replace(steps, emit=emit)


def _sequence_at_the_end(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, output: Sequence[int] = (), **rest: Any) -> Emission:
        one = steps.emit(tree, result, stop=replace(stop, stop_sequences=()), output=output, **rest)
        return Emission(one.tokens, stop.reason_at([*output, *one.tokens]) or one.finish_reason)

    return replace(steps, emit=emit)


def _least_length_of_the_round(steps: Steps) -> Steps:
    def process(
        tree: DraftTree, target_logits: Tensor, *, context: Sequence[int], num_prompt: int, stop: Stop, **rest: Any
    ) -> Tensor:
        # Decided once a round for all rows: a row deep in the tree stands behind more tokens than the root.
        if len(context) - num_prompt < stop.min_new_tokens:
            target_logits = target_logits.clone()
            target_logits[:, list(stop.eos_token_ids)] = -torch.inf
        return target_logits

    return replace(steps, process=process)


def _limit_first(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, num_remaining: int, **rest: Any) -> Emission:
        one = steps.emit(tree, result, num_remaining=num_remaining, **rest)
        return Emission(one.tokens, "length" if len(one.tokens) == num_remaining else one.finish_reason)

    return replace(steps, emit=emit)


def _one_short(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, **rest: Any) -> Emission:
        one = steps.emit(tree, result, **rest)
        if one.finish_reason == "length" and len(one.tokens) > 1:
            return Emission(one.tokens[:-1], "length")
        return one

    return replace(steps, emit=emit)


def _gives_up(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, **rest: Any) -> Emission:
        one = steps.emit(tree, result, **rest)
        return one if result.path or tree.num_drafts == 0 else Emission(one.tokens, "length")

    return replace(steps, emit=emit)


def _least_length_off_by_one(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, **rest: Any) -> Emission:
        early = replace(stop, min_new_tokens=max(0, stop.min_new_tokens - 1))
        return steps.emit(tree, result, stop=early, **rest)

    return replace(steps, emit=emit)


class _CommitsPastTheStop(Decoder):
    """What a stop cut off the output stays in the cache, and the next turn goes on behind it."""

    _accepted: tuple[int, ...] | None = None  # in a round: what the walk accepted

    def decide(self, *args: Any, **keywords: Any) -> tuple[VerifyResult, Emission]:
        result, emission = super().decide(*args, **keywords)
        self._accepted = result.path
        return result, emission

    def round(self, context: list[int], **keywords: Any) -> tuple[Round, str | None]:
        one, finish_reason = super().round(context, **keywords)
        self._accepted = None
        return one, finish_reason

    def commit(self, path: Sequence[int]) -> None:
        super().commit(path if self._accepted is None else self._accepted)


FAULTS = (
    Fault(
        "eos_mid_path",
        "eos/stop/max-length",
        "the end token is looked for in the last token of a round only",
        "an end token inside an accepted run",
        "stop.eos",
        _last_token_only,
    ),
    Fault(
        "stop_sequence_in_round",
        "eos/stop/max-length",
        "a stop sequence is looked for in the tokens of one round: one that begins in the round before is missed",
        "a stop sequence that spans two rounds",
        "stop.sequences",
        _round_only,
    ),
    Fault(
        "stop_sequence_at_end",
        "eos/stop/max-length",
        "a stop sequence is looked for at the end of a round only",
        "a stop sequence that ends inside an accepted run",
        "stop.sequences",
        _sequence_at_the_end,
    ),
    Fault(
        "least_length_by_round",
        "eos/stop/max-length",
        "the least length is decided once a round for all rows, not by each row's own depth",
        "a least length that is reached inside a round",
        "stop.min_tokens",
        _least_length_of_the_round,
    ),
    Fault(
        "limit_before_end",
        "eos/stop/max-length",
        "the length limit is tested before the end token",
        "an end token at the very limit",
        "stop.every_index",
        _limit_first,
    ),
    Fault(
        "last_token_lost",
        "eos/stop/max-length",
        "an accepted run that reaches the limit loses its last token",
        "a limit inside or at the end of an accepted run",
        "stop.max_tokens",
        _one_short,
    ),
    Fault(
        "gives_up",
        "loop-state-stale",
        "generation ends when a whole draft is rejected",
        "a fully rejected draft",
        "progress",
        _gives_up,
    ),
    Fault(
        "committed_past_stop",
        "eos/stop/max-length",
        "what a stop cut off the output stays in the cache",
        "a stop inside an accepted run, and a turn after it",
        "stop.resume",
        target=lambda: ReferenceTarget(decoder=_CommitsPastTheStop),
    ),
    Fault(
        "least_length_off_by_one",
        "eos/stop/max-length",
        "a stop sequence counts that ends with the last of the first min_new_tokens tokens",
        "a stop sequence that ends exactly there",
        "stop.min_tokens",
        _least_length_off_by_one,
    ),
)
