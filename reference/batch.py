"""Several requests at once: one target forward a round for all rows, each row with a cache and a drafter of its own.

Rows may differ in everything: prompt, tree, accept length, stop rules, processors, when they join and when they end. A
row that ends is condensed away; one that arrives late joins between rounds. How the rows of one forward lie side by
side stands in `batch_layouts.py`. No scheduling beyond that: every row that is there takes part in every round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from specbench.protocols import Coins, Drafter
from specbench.reference.batch_layouts import BatchForwardStep, RaggedModel, forward_packed
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.layouts import flatten_causal
from specbench.reference.verify import SharedNoise
from specbench.steps import CommitStep, WalkStep
from specbench.tree import DraftTree
from specbench.types import Generation, Request, Round, Sampling, VerifyResult, as_token_ids

if TYPE_CHECKING:
    from specbench.reference.decoder import Decoder

DrafterFor = Callable[[Request], Drafter | None]


@dataclass
class BatchRow:
    """One request on its way. context: prompt and output so far, the root last; cache: all of it but the root."""

    request: Request
    decoder: Decoder  # drafts for this row and decides on it; its own cache stays unused
    cache: AppendableCache
    context: list[int]
    coins: Coins
    finish_reason: str | None = None
    rounds: list[Round] = field(default_factory=list)

    @property
    def output(self) -> tuple[int, ...]:
        return tuple(self.context[len(self.request.prompt) :])

    @property
    def num_remaining(self) -> int:
        return len(self.request.prompt) + self.request.max_new_tokens - len(self.context)


@dataclass(frozen=True)
class Draw:
    """How one row of a batch accepts: its decoder's rules, its parameters, its own coins. root_place: of its root."""

    decoder: Decoder
    sampling: Sampling
    coins: Coins | None
    root_place: int = 0

    def __call__(self, tree: DraftTree, logits: Tensor) -> VerifyResult:
        return self.decoder.accept(tree, logits, sampling=self.sampling, coins=self.coins, root_place=self.root_place)


class BatchSampleStep(Protocol):
    def __call__(
        self, draws: Sequence[Draw], trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        """For batches with a row above temperature 0; draws[b]: how row b accepts. The rest as in `BatchVerifyStep`."""
        ...


class BatchVerifyStep(Protocol):
    def __call__(
        self, walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        """flat_logits: float [sum N, V]; rows cu_nodes[b] to cu_nodes[b + 1] are those of tree b."""
        ...


class BatchCommitStep(Protocol):
    def __call__(
        self,
        commit: CommitStep,
        caches: Sequence[AppendableCache],
        prefix_lens: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        """kept[b]: the rows of sequence b's block to keep, the root's first, in path order."""
        ...


@dataclass(frozen=True)
class BatchSteps:
    """What a round of a batch does that a round of one sequence does not.

    join: (rows there, rows that arrive) -> rows there. condense: rows -> those that go on.
    """

    forward: BatchForwardStep
    verify: BatchVerifyStep
    sample: BatchSampleStep
    commit: BatchCommitStep
    join: Callable[[list[BatchRow], list[BatchRow]], list[BatchRow]]
    condense: Callable[[list[BatchRow]], list[BatchRow]]


def generate_batch(
    decoder: Decoder, requests: Sequence[Request], *, steps: BatchSteps, drafter_for: DrafterFor | None = None
) -> list[Generation]:
    """One generation a request, in their order, each what the request gives alone. Records count a row's own rows,
    padding left out.

    drafter_for: makes a row's drafter; without it the decoder's own is given the contexts of all rows in turn.
    ValueError names the request that cannot be served, or says that such a drafter cannot serve several rows.
    """
    if drafter_for is None and len(requests) > 1 and decoder.drafter_observes:
        raise ValueError("a drafter with observe() is told of one text only: give each row its own by drafter_for")
    rows = [_new_row(decoder, idx, request, drafter_for) for idx, request in enumerate(requests)]
    waiting, round_idx = list(rows), 0
    active: list[BatchRow] = []
    while waiting or active:
        if not active:
            round_idx = max(round_idx, min(row.request.arrival for row in waiting))  # nothing to do until then
        joining = [row for row in waiting if row.request.arrival <= round_idx]
        waiting = [row for row in waiting if row.request.arrival > round_idx]
        active = steps.condense(_joined(decoder, active, joining, steps))  # some ask for no tokens at all
        if active:
            _round(decoder, active, steps)
        active = steps.condense(active)
        round_idx += 1
    return [Generation(row.output, row.finish_reason or "length", tuple(row.rounds)) for row in rows]


def _new_row(decoder: Decoder, idx: int, request: Request, drafter_for: DrafterFor | None) -> BatchRow:
    prompt = as_token_ids(request.prompt, argument=f"requests[{idx}].prompt", vocab_size=decoder.vocab_size)
    if not prompt:
        raise ValueError(f"requests[{idx}].prompt is empty: it must hold at least one token (the first root)")
    for name in ("max_new_tokens", "arrival"):
        if getattr(request, name) < 0:
            raise ValueError(f"requests[{idx}].{name} = {getattr(request, name)} must be >= 0")
    return BatchRow(
        request,
        decoder if drafter_for is None else decoder.with_drafter(drafter_for(request)),
        cast(AppendableCache, decoder.new_cache()),
        list(prompt),
        SharedNoise(request.seed),
        finish_reason=None if request.max_new_tokens else "length",
    )


def _joined(decoder: Decoder, active: list[BatchRow], joining: list[BatchRow], steps: BatchSteps) -> list[BatchRow]:
    """The rows that arrive have their prompts cached by one forward, all but the last token each."""
    rows = steps.join(active, joining)
    new = [row for row in joining if len(row.context) > 1 and row.finish_reason is None]
    if new:
        blocks = [flatten_causal(row.context[:-1], row.cache.length) for row in new]
        steps.forward(cast(RaggedModel, decoder.model), blocks, [row.cache for row in new])
    return rows


def _round(decoder: Decoder, rows: list[BatchRow], steps: BatchSteps) -> None:
    """Draft for each row, forward all trees at once, verify them at once, and commit what each row keeps."""
    trees = [
        row.decoder.draft_round(
            row.context, num_remaining=row.num_remaining, sampling=row.request.sampling, coins=row.coins
        )
        for row in rows
    ]
    prefix_lens = [row.cache.length for row in rows]
    blocks = [decoder.steps.flatten(tree, length) for tree, length in zip(trees, prefix_lens, strict=True)]
    computed = steps.forward(cast(RaggedModel, decoder.model), blocks, [row.cache for row in rows])
    logits = [
        row.decoder.process(
            tree,
            one[block.row_of_node.to(one.device)],
            row.context,
            num_prompt=len(row.request.prompt),
            sampling=row.request.sampling,
            stop=row.request.stop,
        )
        for row, tree, block, one in zip(rows, trees, blocks, computed, strict=True)
    ]
    cu_nodes = [0]
    for tree in trees:
        cu_nodes.append(cu_nodes[-1] + tree.num_nodes)
    if any(row.request.sampling.temperature for row in rows):
        draws = [Draw(row.decoder, row.request.sampling, row.coins, len(row.context) - 1) for row in rows]
        results = steps.sample(draws, trees, torch.cat(logits), cu_nodes)
    else:
        results = steps.verify(decoder.steps.walk, trees, torch.cat(logits), cu_nodes)
    results = decoder.agreed(results)
    kept: list[list[int]] = []
    for row, tree, block, result, prefix_len in zip(rows, trees, blocks, results, prefix_lens, strict=True):
        emission = row.decoder.conclude(
            tree,
            result,
            row.context,
            num_prompt=len(row.request.prompt),
            num_remaining=row.num_remaining,
            stop=row.request.stop,
        )
        path = result.path[: len(emission.tokens) - 1]  # a stop rule may have cut it
        kept.append([int(block.row_of_node[node]) for node in (0, *path)])
        row.rounds.append(decoder.record(tree, block, result, emission, prefix_len))
        row.context.extend(emission.tokens)
        row.finish_reason = emission.finish_reason
    steps.commit(decoder.steps.commit, [row.cache for row in rows], prefix_lens, kept)


def verify_each(
    walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
) -> list[VerifyResult]:
    """Each tree by its own rows, and nothing else."""
    return [
        walk(tree, flat_logits[start:end]) for tree, start, end in zip(trees, cu_nodes[:-1], cu_nodes[1:], strict=True)
    ]


def sample_each(
    draws: Sequence[Draw], trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
) -> list[VerifyResult]:
    """Each tree by its own rows, parameters and coins."""
    return [
        draw(tree, flat_logits[start:end])
        for draw, tree, start, end in zip(draws, trees, cu_nodes[:-1], cu_nodes[1:], strict=True)
    ]


def commit_each(
    commit: CommitStep,
    caches: Sequence[AppendableCache],
    prefix_lens: Sequence[int],
    kept: Sequence[Sequence[int]],
) -> None:
    """Each cache by its own path."""
    for cache, prefix_len, rows in zip(caches, prefix_lens, kept, strict=True):
        commit(cache, prefix_len, rows)


def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
    """Rows that arrive stand behind those that are there."""
    return [*active, *joining]


def condense(rows: list[BatchRow]) -> list[BatchRow]:
    """Rows that have ended are taken out, the others close up, each with its own cache."""
    return [row for row in rows if row.finish_reason is None]


BATCH_STEPS = BatchSteps(
    forward=forward_packed, verify=verify_each, sample=sample_each, commit=commit_each, join=join, condense=condense
)
