"""Rows of a batch that come, go, or stand beside one another: what belongs to one of them and reaches another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specbench.reference.batch import BatchRow, BatchSteps
from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.layouts import flatten_causal
from specbench.reference.target import ReferenceTarget
from specbench.steps import CommitStep, Steps, WalkStep
from specbench.tree import DraftTree
from specbench.types import Generation, Request, VerifyResult


def _target(plant: Callable[[BatchSteps], BatchSteps]) -> Callable[[], ReferenceTarget]:
    return lambda: ReferenceTarget(plant_batch=plant)


def _stale_slots(steps: BatchSteps) -> BatchSteps:
    """Rows close up, their caches stay where they were."""

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        caches = [row.cache for row in rows]
        going_on = steps.condense(rows)
        for row, cache in zip(going_on, caches, strict=False):
            row.cache = cache
        return going_on

    return replace(steps, condense=condense)


def _stale_sampling(steps: BatchSteps) -> BatchSteps:
    """Rows close up, the table of their penalties does not."""

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        samplings = [row.request.sampling for row in rows]
        going_on = steps.condense(rows)
        for row, sampling in zip(going_on, samplings, strict=False):
            row.request = replace(row.request, sampling=sampling)
        return going_on

    return replace(steps, condense=condense)


def _neighbours_cache(steps: BatchSteps) -> BatchSteps:
    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        for row in joining if active else []:
            row.cache = active[-1].cache.fork()
        return steps.join(active, joining)

    return replace(steps, join=join)


def _finished_cache(steps: BatchSteps) -> BatchSteps:
    """A late row is given the cache of one that has ended, with its rows."""
    left: list[AppendableCache] = []

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        going_on = steps.condense(rows)
        left.extend(row.cache for row in rows if row.finish_reason is not None and row.rounds)
        return going_on

    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        for row in joining[: len(left)]:
            row.cache = left.pop()
        return steps.join(active, joining)

    return replace(steps, join=join, condense=condense)


def _holes_filled_from_the_front(steps: BatchSteps) -> BatchSteps:
    """Each hole is filled by the last slot, which may itself have ended: right while one row ends at a time."""

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        holes = [idx for idx, row in enumerate(rows) if row.finish_reason is not None]
        slots, caches = list(rows), [row.cache for row in rows]
        for hole in reversed(holes):
            _fill(slots, hole)
        for hole in holes:
            _fill(caches, hole)
        for row, cache in zip(slots, caches, strict=False):
            row.cache = cache
        return steps.condense(slots)

    return replace(steps, condense=condense)


def _fill(slots: list[Any], hole: int) -> None:
    last = slots.pop()
    if hole < len(slots):
        slots[hole] = last


def _ended_rows_count(steps: BatchSteps) -> BatchSteps:
    """A row that has ended still counts, with nothing accepted, when the shortest path of the batch is sought."""
    some_ended = False

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        nonlocal some_ended
        going_on = steps.condense(rows)
        some_ended = bool(going_on) and (some_ended or len(going_on) < len(rows))
        return going_on

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.verify(walk, trees, flat_logits, cu_nodes)
        return [VerifyResult((), one.bonus_token) for one in results] if some_ended else results

    return replace(steps, condense=condense, verify=verify)


def _paths_close_up(steps: BatchSteps) -> BatchSteps:
    """Paths of rows that have just ended are left out of the commit, their caches are not: the last go without one."""
    there: list[BatchRow] = []

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        there[:] = steps.condense(rows)
        return list(there)

    def commit_all(
        commit: CommitStep,
        caches: Sequence[AppendableCache],
        prefix_lens: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        paths = [one for row, one in zip(there, kept, strict=True) if row.finish_reason is None]
        num_rows = [cache.length - prefix_len for cache, prefix_len in zip(caches, prefix_lens, strict=True)]
        moved = [*paths, *(range(num) for num in num_rows[len(paths) :])]
        clipped = [[min(row, num - 1) for row in rows] for rows, num in zip(moved, num_rows, strict=True)]
        steps.commit(commit, caches, prefix_lens, clipped)

    return replace(steps, condense=condense, commit=commit_all)


def _late_prompt_padded(steps: BatchSteps) -> BatchSteps:
    """A late prompt is padded by one on the left, and the padding stays in its cache."""

    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        for row in joining if active else []:
            row.decoder.model.forward(flatten_causal([0], 0), row.cache)
        return steps.join(active, joining)

    return replace(steps, join=join)


def _waiting_counts(steps: BatchSteps) -> BatchSteps:
    """The limit counts rounds from the batch's first on, those that a late row has waited too."""

    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        for row in joining:
            num_left = max(min(1, row.request.max_new_tokens), row.request.max_new_tokens - row.request.arrival)
            row.request = replace(row.request, max_new_tokens=num_left)
        return steps.join(active, joining)

    return replace(steps, join=join)


def _twins_share(steps: BatchSteps) -> BatchSteps:
    """Rows that arrive with the same prompt are given one cache, and all of them write to it."""

    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        by_prompt: dict[tuple[int, ...], AppendableCache] = {}
        for row in joining:
            row.cache = by_prompt.setdefault(tuple(row.context), row.cache)
        return steps.join(active, joining)

    return replace(steps, join=join)


def _one_history(steps: BatchSteps) -> BatchSteps:
    """One table of counts for the batch: penalties of a row count what the others have said."""

    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        rows = steps.join(active, joining)
        for row in joining:
            row.decoder = row.decoder._like(row.decoder._drafter, _counting_all(row.decoder.steps, row, rows))
        return rows

    return replace(steps, join=join)


def _counting_all(steps: Steps, own: BatchRow, rows: list[BatchRow]) -> Steps:
    def process(tree: DraftTree, target_logits: Tensor, *, context: Sequence[int], **rules: Any) -> Tensor:
        num_prompt = rules.pop("num_prompt")
        said = [token for row in rows if row is not own for token in row.output]
        history = [*context[:num_prompt], *said, *context[num_prompt:]]
        return steps.process(tree, target_logits, context=history, num_prompt=num_prompt, **rules)

    return replace(steps, process=process)


class _OneAnswerAPrompt(Decoder):
    """Requests with the same prompt are taken for the same request."""

    def _generate_batch(self, requests: Sequence[Request], **keywords: Any) -> list[Generation]:
        prompts = list(dict.fromkeys(tuple(one.prompt) for one in requests))
        firsts = [next(one for one in requests if tuple(one.prompt) == prompt) for prompt in prompts]
        answers = super()._generate_batch(firsts, **keywords)
        return [answers[prompts.index(tuple(one.prompt))] for one in requests]


class _AnswersAsTheyEnd(Decoder):
    """Answers are handed out in the order in which rows end."""

    def _generate_batch(self, requests: Sequence[Request], **keywords: Any) -> list[Generation]:
        answers = super()._generate_batch(requests, **keywords)
        ends = [request.arrival + len(one.rounds) for request, one in zip(requests, answers, strict=True)]
        return [answers[idx] for idx in sorted(range(len(answers)), key=ends.__getitem__)]


class _FirstRowsDrafts(Decoder):
    """The drafter is asked for the first row; every row verifies that draft below its own root."""

    _drafts: list[DraftTree] | None = None  # of this round; None outside a batch

    def _generate_batch(self, requests: Sequence[Request], **keywords: Any) -> list[Generation]:
        self._drafts = []
        self._batch_steps = _forgetting(self._batch_steps, self._drafts)
        answers = super()._generate_batch(requests, **keywords)
        self._drafts = None
        return answers

    def draft_round(self, context: list[int], *, num_remaining: int, **asked: Any) -> DraftTree:
        if self._drafts is None:
            return super().draft_round(context, num_remaining=num_remaining, **asked)
        if not self._drafts:
            self._drafts.append(super().draft_round(context, num_remaining=num_remaining, **asked))
        first = self._drafts[0]
        return DraftTree.of([context[-1], *first.token_list[1:]], first.parent_list)


def _forgetting(steps: BatchSteps, drafts: list[DraftTree]) -> BatchSteps:
    """The next round asks the drafter again."""

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        drafts.clear()
        return steps.condense(rows)

    return replace(steps, condense=condense)


def _first_limit(steps: BatchSteps) -> BatchSteps:
    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        rows = steps.join(active, joining)
        for row in joining:
            row.request = replace(row.request, max_new_tokens=rows[0].request.max_new_tokens)
        return rows

    return replace(steps, join=join)


def _first_stop(steps: BatchSteps) -> BatchSteps:
    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        rows = steps.join(active, joining)
        for row in rows[1:]:
            row.request = replace(row.request, stop=rows[0].request.stop)
        return rows

    return replace(steps, join=join)


FAULTS = (
    Fault(
        "stale_slots",
        "batch-cross-talk",
        "when a row has ended the others close up, but their caches stay in the old order",
        "a row that ends before one behind it",
        "batch.join",
        target=_target(_stale_slots),
        subtle="a row that ends before one behind it",
    ),
    Fault(
        "stale_sampling",
        "batch-cross-talk",
        "when a row has ended the others close up, but take the sampling of the row that stood there before",
        "a row that ends before one with other penalties",
        "batch.join",
        target=_target(_stale_sampling),
        subtle="a row that ends before one with other penalties",
    ),
    Fault(
        "neighbours_cache",
        "batch-cross-talk",
        "a row that joins late starts behind what its neighbour has cached",
        "a late row",
        "batch.join",
        target=_target(_neighbours_cache),
        origin="ggml-org/llama.cpp#27148",
        subtle="a late row",
        kin="join_cache",
    ),
    Fault(
        "first_rows_stop",
        "batch-cross-talk",
        "the first row's end token holds for all rows",
        "rows with different end tokens",
        "batch.join",
        target=_target(_first_stop),
        kin="first_rows_request",
    ),
    Fault(
        "finished_rows_cache",
        "batch-cross-talk",
        "a row that joins late is given the cache of one that has ended, rows and all",
        "a late row behind one that has ended",
        "batch.join",
        target=_target(_finished_cache),
        origin="ggml-org/llama.cpp#27148",
        subtle="a row that ends before another one joins",
        kin="join_cache",
    ),
    Fault(
        "holes_filled_from_front",
        "batch-cross-talk",
        "the hole of an ended row is filled by the last slot, even where that has ended in the same round",
        "two rows that end in one round, the last one of them",
        "batch.join",
        target=_target(_holes_filled_from_the_front),
        subtle="two rows that end in the same round",
    ),
    Fault(
        "ended_row_counts",
        "batch-raggedness",
        "a row that has ended still counts as one that accepts nothing, and all others are cut to it",
        "drafts accepted behind the end of another row",
        "batch.join",
        target=_target(_ended_rows_count),
        subtle="a row that has ended before the others",
        kin="batch_minimum",
    ),
    Fault(
        "paths_close_up",
        "kv-wrong-path-compacted",
        "a commit leaves out the paths of rows that have just ended: those behind move up to other caches",
        "a row that ends in front of one with another path",
        "batch.join",
        target=_target(_paths_close_up),
        subtle="a row that ends, and a different path behind it",
    ),
    Fault(
        "late_prompt_padded",
        "mask-prefix/padding",
        "a late row's prompt is padded by one token, which stays in its cache",
        "a late row",
        "batch.join",
        target=_target(_late_prompt_padded),
        subtle="a late row",
    ),
    Fault(
        "waiting_counts",
        "eos/stop/max-length",
        "a late row's limit counts the rounds it has waited",
        "a late row",
        "batch.join",
        target=_target(_waiting_counts),
        subtle="a late row",
    ),
    Fault(
        "twins_share_a_cache",
        "kv-slot/page-mapping",
        "rows with the same prompt share one cache and all write to it",
        "two equal prompts in a batch",
        "batch.solo",
        target=_target(_twins_share),
        subtle="two equal prompts",
    ),
    Fault(
        "one_history",
        "logits-processor-state",
        "penalties of a row count what all rows of the batch have said",
        "penalties, and other tokens in another row",
        "batch.solo",
        target=_target(_one_history),
        subtle="penalties in a batch of two",
    ),
    Fault(
        "one_answer_a_prompt",
        "batch-cross-talk",
        "requests with the same prompt are given one answer, whatever else they ask for",
        "two equal prompts with different limits or penalties",
        "batch.solo",
        target=lambda: ReferenceTarget(decoder=_OneAnswerAPrompt),
        subtle="two equal prompts, different requests",
    ),
    Fault(
        "answers_as_they_end",
        "batch-cross-talk",
        "answers are returned in the order in which rows end",
        "a row that ends before one in front of it",
        "batch.solo",
        target=lambda: ReferenceTarget(decoder=_AnswersAsTheyEnd),
    ),
    Fault(
        "first_rows_drafts",
        "batch-cross-talk",
        "every row verifies the draft that was made for the first one",
        "two rows with drafts; the output stays right, only acceptance falls",
        "batch.solo",
        target=lambda: ReferenceTarget(decoder=_FirstRowsDrafts),
        subtle="different texts in a batch; the output stays right",
    ),
    Fault(
        "first_rows_limit",
        "batch-cross-talk",
        "the first row's max_new_tokens holds for all rows",
        "rows of different length",
        "batch.solo",
        target=_target(_first_limit),
        kin="first_rows_request",
    ),
)
