"""Stop rules that look at the wrong token, in the wrong text, or at the wrong time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import SeededCoins
from specbench.reference.decoder import Decoder, DecodingSession
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.steps import Emission, Steps
from specbench.tree import DraftTree
from specbench.types import GREEDY, NEVER_STOP, Generation, Round, Sampling, Stop, VerifyResult

Plant = Callable[[Steps], Steps]
# (tokens of the round as far as the limit allows, how many of them the path has, how many are kept) -> looked at?
Places = Callable[[list[int], int, int], bool]


def _said(tree: DraftTree, result: VerifyResult) -> list[int]:
    return [*(tree.token_list[node] for node in result.path), result.bonus_token]


def _looking_at(places: Places, *, end_tokens: bool = True) -> Plant:
    """Stops are looked for at some places of a round only. end_tokens: False looks for those everywhere."""

    def plant(steps: Steps) -> Steps:
        def emit(
            tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
        ) -> Emission:
            tokens = _said(tree, result)[:num_remaining]
            for num_kept in range(1, len(tokens) + 1):
                reason = stop.reason_at([*output, *tokens[:num_kept]])
                always = reason == "eos" and not end_tokens
                if reason and (always or places(tokens, len(result.path), num_kept)):
                    return Emission(tuple(tokens[:num_kept]), reason)
            return Emission(tuple(tokens), "length" if len(tokens) == num_remaining else None)

        return replace(steps, emit=emit)

    return plant


def _with_stop(change: Callable[[Stop], Stop]) -> Plant:
    """Emission knows another stop rule than it was given."""

    def plant(steps: Steps) -> Steps:
        def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, **rest: Any) -> Emission:
            return steps.emit(tree, result, stop=change(stop), **rest)

        return replace(steps, emit=emit)

    return plant


def _round_only(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, output: Sequence[int] = (), **rest: Any) -> Emission:
        return steps.emit(tree, result, output=(), **rest)

    return replace(steps, emit=emit)


def _longest_first(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, **rest: Any) -> Emission:
        for one in sorted(stop.stop_sequences, key=len, reverse=True):
            emission = steps.emit(tree, result, stop=replace(stop, stop_sequences=(one,)), **rest)
            if emission.finish_reason == "stop":
                return emission
        return steps.emit(tree, result, stop=stop, **rest)

    return replace(steps, emit=emit)


def _cut_says_length(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, **rest: Any) -> Emission:
        one = steps.emit(tree, result, **rest)
        is_cut = len(one.tokens) < len(result.path) + 1
        return Emission(one.tokens, "length") if one.finish_reason and is_cut else one

    return replace(steps, emit=emit)


def _drafted_end_ends(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, **rest: Any) -> Emission:
        one = steps.emit(tree, result, stop=stop, **rest)
        if one.finish_reason is None and set(stop.eos_token_ids) & set(tree.token_list[1:]):
            return Emission(one.tokens, "eos")
        return one

    return replace(steps, emit=emit)


def _limit_first(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, num_remaining: int, **rest: Any) -> Emission:
        one = steps.emit(tree, result, num_remaining=num_remaining, **rest)
        return Emission(one.tokens, "length" if len(one.tokens) == num_remaining else one.finish_reason)

    return replace(steps, emit=emit)


def _limit_hides_stops(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, **rest: Any) -> Emission:
        reaches = len(result.path) + 1 >= num_remaining
        return steps.emit(tree, result, stop=NEVER_STOP if reaches else stop, num_remaining=num_remaining, **rest)

    return replace(steps, emit=emit)


def _reason_behind_limit(steps: Steps) -> Steps:
    def emit(tree: DraftTree, result: VerifyResult, *, num_remaining: int, **rest: Any) -> Emission:
        whole = steps.emit(tree, result, num_remaining=len(result.path) + 2, **rest)
        tokens = whole.tokens[:num_remaining]
        return Emission(tokens, whole.finish_reason or ("length" if len(tokens) == num_remaining else None))

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


def _least_length(least: Callable[[Stop, Sequence[int]], int]) -> Plant:
    """Rows are kept from end tokens up to another length: `least(stop, output)`."""

    def plant(steps: Steps) -> Steps:
        def process(
            tree: DraftTree, target_logits: Tensor, *, context: Sequence[int], num_prompt: int, stop: Stop, **rest: Any
        ) -> Tensor:
            if stop.min_new_tokens:
                stop = replace(stop, min_new_tokens=least(stop, context[num_prompt:]))
            return steps.process(tree, target_logits, context=context, num_prompt=num_prompt, stop=stop, **rest)

        return replace(steps, process=process)

    return plant


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


def _least_length_on_root(steps: Steps) -> Steps:
    def process(tree: DraftTree, target_logits: Tensor, *, stop: Stop, **rest: Any) -> Tensor:
        free = steps.process(tree, target_logits, stop=NEVER_STOP, **rest)
        return torch.cat([steps.process(tree, target_logits, stop=stop, **rest)[:1], free[1:]])

    return replace(steps, process=process)


def _least_length_counts_rounds(steps: Steps) -> Steps:
    num_rounds = 0

    def least(stop: Stop, output: Sequence[int]) -> int:
        nonlocal num_rounds
        num_rounds = num_rounds + 1 if output else 1
        # Every row of a round is masked or none: no path is that long.
        return len(output) + 1000 if num_rounds <= stop.min_new_tokens else 0

    return _least_length(least)(steps)


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


class _StopsInPrompt(Decoder):
    """Stops are looked for in prompt and output, as if all of it had been said."""

    def conclude(
        self,
        tree: DraftTree,
        result: VerifyResult,
        context: Sequence[int],
        *,
        num_prompt: int,
        num_remaining: int,
        stop: Stop,
    ) -> Emission:
        stop = replace(stop, min_new_tokens=stop.min_new_tokens + num_prompt)
        return super().conclude(tree, result, context, num_prompt=0, num_remaining=num_remaining, stop=stop)


class _RoundAfterTheEnd(Decoder):
    """Another block is drafted and verified behind the last token, and dropped."""

    def generate(self, prompt: Sequence[int], *, sampling: Sampling = GREEDY, **keywords: Any) -> Generation:
        generation = super().generate(prompt, sampling=sampling, **keywords)
        text = [*prompt, *generation.tokens]
        tree = self.draft_round(text, num_remaining=self._max_depth, sampling=sampling, coins=SeededCoins(0))
        self.forward_tree(tree)
        self.abort()
        return generation


class _StopTokenTwice(Decoder):
    """A turn that was stopped is gone on from with its last token said twice."""

    def session(self) -> DecodingSession:
        self.reset()
        return _Stuttering(self)


class _Stuttering(DecodingSession):
    def generate(self, prompt: Sequence[int], **keywords: Any) -> Generation:
        generation = super().generate(prompt, **keywords)
        if generation.finish_reason != "length":
            self.text.append(self.text[-1])
        return generation


FAULTS = (
    Fault(
        "eos_mid_path",
        "eos/stop/max-length",
        "the end token is looked for in the last token of a round only",
        "an end token inside an accepted run",
        "stop.eos",
        _looking_at(lambda tokens, num_path, num_kept: num_kept == len(tokens)),
        origin="huggingface/transformers#47912",
        subtle="an end token inside an accepted run",
        kin="stop_places",
    ),
    Fault(
        "stop_on_bonus_missed",
        "eos/stop/max-length",
        "stops are looked for in the accepted drafts; where there are some, one on the bonus token is missed",
        "a stop on the bonus token behind an accepted draft",
        "stop.every_index",
        _looking_at(lambda tokens, num_path, num_kept: num_path == 0 or num_kept <= num_path),
        subtle="a stop on the bonus token behind an accepted draft",
        kin="stop_places",
    ),
    Fault(
        "stop_on_last_draft_missed",
        "eos/stop/max-length",
        "a stop on the last accepted draft is missed",
        "a stop exactly there",
        "stop.every_index",
        _looking_at(lambda tokens, num_path, num_kept: num_kept != num_path),
        subtle="a stop on the last accepted draft",
        kin="stop_places",
    ),
    Fault(
        "stop_sequence_at_end",
        "eos/stop/max-length",
        "a stop sequence is looked for at the end of a round only",
        "a stop sequence that ends inside an accepted run",
        "stop.sequences",
        _looking_at(lambda tokens, num_path, num_kept: num_kept == len(tokens), end_tokens=False),
        origin="sgl-project/sglang#23802",
        subtle="a stop sequence that ends inside an accepted run",
        kin="stop_places",
    ),
    Fault(
        "stop_sequence_in_the_tail",
        "eos/stop/max-length",
        "a stop sequence is looked for in the last two tokens of a round: an earlier one is out of the window",
        "a stop sequence that ends early in a long accepted run",
        "stop.sequences",
        _looking_at(lambda tokens, num_path, num_kept: num_kept + 1 >= len(tokens), end_tokens=False),
        origin="sgl-project/sglang#23802",
        subtle="a stop sequence early in a long accepted run",
        kin="stop_places",
    ),
    Fault(
        "stop_sequence_in_round",
        "eos/stop/max-length",
        "a stop sequence is looked for in the tokens of one round: one that begins in the round before is missed",
        "a stop sequence that spans two rounds",
        "stop.sequences",
        _round_only,
        subtle="a stop sequence that spans two rounds",
    ),
    Fault(
        "stop_sequence_in_prompt",
        "eos/stop/max-length",
        "stop sequences are looked for in the prompt as well: one that begins there counts",
        "a stop sequence that spans prompt and output",
        "stop.sequences",
        target=lambda: ReferenceTarget(decoder=_StopsInPrompt),
        subtle="a stop sequence that begins in the prompt",
    ),
    Fault(
        "longest_stop_first",
        "eos/stop/max-length",
        "the longest stop sequence of a round ends the output, not the first",
        "two stop sequences in one accepted run, the longer one later",
        "stop.sequences",
        _longest_first,
        subtle="two stop sequences in one accepted run",
    ),
    Fault(
        "first_end_token_only",
        "eos/stop/max-length",
        "of several end tokens only the first counts",
        "an end token that is not the first of the list",
        "stop.eos",
        _with_stop(lambda stop: replace(stop, eos_token_ids=stop.eos_token_ids[:1])),
        origin="Blaizzy/mlx-vlm#309",
        subtle="several end tokens",
    ),
    Fault(
        "drafted_end_token_ends",
        "eos/stop/max-length",
        "an end token among the drafts ends the output after the round, though it was refused",
        "a refused draft that is an end token",
        "stop.eos",
        _drafted_end_ends,
        origin="openvinotoolkit/openvino.genai#3293",
        subtle="a refused draft that is an end token",
    ),
    Fault(
        "stop_says_length",
        "eos/stop/max-length",
        "an output that a stop cut inside an accepted run is trimmed, but says that the limit ended it",
        "a stop inside an accepted run",
        "stop.eos",
        _cut_says_length,
        subtle="a stop inside an accepted run; the tokens are right",
    ),
    Fault(
        "least_length_by_round",
        "eos/stop/max-length",
        "the least length is decided once a round for all rows, not by each row's own depth",
        "a least length that is reached inside a round",
        "stop.min_tokens",
        _least_length_of_the_round,
        subtle="a least length that is reached inside a round",
        kin="least_length",
    ),
    Fault(
        "least_length_on_root_only",
        "eos/stop/max-length",
        "the least length is not applied to drafted rows",
        "an end token that a drafted row says among the first tokens",
        "stop.min_tokens",
        _least_length_on_root,
        subtle="an accepted draft before the least length",
        kin="least_length",
    ),
    Fault(
        "least_length_one_row_more",
        "eos/stop/max-length",
        "one row more than the least length asks for is kept from end tokens",
        "an end token right behind the least length",
        "stop.every_index",
        _least_length(lambda stop, output: stop.min_new_tokens + 1),
        origin="vllm-project/vllm#41768",
        subtle="an end token right behind the least length",
        kin="least_length",
    ),
    Fault(
        "least_length_in_first_round",
        "eos/stop/max-length",
        "the least length is applied in the first round only",
        "an end token among the first tokens, in a later round",
        "stop.min_tokens",
        _least_length(lambda stop, output: 0 if output else stop.min_new_tokens),
        subtle="a second round before the least length",
        kin="least_length",
    ),
    Fault(
        "least_length_counts_rounds",
        "eos/stop/max-length",
        "the least length counts rounds instead of tokens, so that end tokens are kept out for too long",
        "an accepted draft before the least length, and an end token behind it",
        "stop.every_index",
        _least_length_counts_rounds,
        origin="sgl-project/sglang#33643",
        subtle="an accepted draft before the least length",
        kin="least_length",
    ),
    Fault(
        "least_length_off_by_one",
        "eos/stop/max-length",
        "a stop sequence counts that ends with the last of the first min_new_tokens tokens",
        "a stop sequence that ends exactly there",
        "stop.min_tokens",
        _with_stop(lambda stop: replace(stop, min_new_tokens=max(0, stop.min_new_tokens - 1))),
        subtle="a stop sequence that ends with the least length",
    ),
    Fault(
        "limit_before_end",
        "eos/stop/max-length",
        "the length limit is tested before the end token",
        "an end token at the very limit",
        "stop.every_index",
        _limit_first,
        origin="sgl-project/sglang#31599",
        subtle="an end token at the very limit",
        kin="limit_first",
    ),
    Fault(
        "limit_hides_stops",
        "eos/stop/max-length",
        "in a round that reaches the limit no stop is looked for",
        "an end token in an accepted run that reaches the limit",
        "stop.every_index",
        _limit_hides_stops,
        origin="sgl-project/sglang#31599",
        subtle="an end token in a run that reaches the limit",
        kin="limit_first",
    ),
    Fault(
        "reason_behind_limit",
        "eos/stop/max-length",
        "an end token behind the limit is cut off, but named as the reason",
        "an accepted run with an end token behind the limit",
        "stop.every_index",
        _reason_behind_limit,
        subtle="an end token right behind the limit; the tokens are right",
    ),
    Fault(
        "last_token_lost",
        "eos/stop/max-length",
        "an accepted run that reaches the limit loses its last token",
        "a limit inside or at the end of an accepted run",
        "stop.max_tokens",
        _one_short,
        origin="ikawrakow/ik_llama.cpp#2358",
        subtle="a limit inside an accepted run",
    ),
    Fault(
        "gives_up",
        "eos/stop/max-length",
        "generation ends when a whole draft is rejected",
        "a fully rejected draft",
        "progress",
        _gives_up,
    ),
    Fault(
        "round_after_the_end",
        "performance",
        "behind the last token another block is drafted and verified, and dropped",
        "any end",
        "cost.rows",
        target=lambda: ReferenceTarget(decoder=_RoundAfterTheEnd),
    ),
    Fault(
        "committed_past_stop",
        "eos/stop/max-length",
        "what a stop cut off the output stays in the cache",
        "a stop inside an accepted run, and a turn after it",
        "stop.resume",
        target=lambda: ReferenceTarget(decoder=_CommitsPastTheStop),
        origin="ggml-org/llama.cpp#28049",
        subtle="a turn after a stop inside an accepted run",
    ),
    Fault(
        "stop_token_twice",
        "eos/stop/max-length",
        "the turn after a stop goes on from a text in which the last token stands twice",
        "a turn after a stop",
        "stop.resume",
        target=lambda: ReferenceTarget(decoder=_StopTokenTwice),
        subtle="a turn after a stop",
    ),
)
