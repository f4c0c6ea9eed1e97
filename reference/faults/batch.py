"""Batches in which rows get in one another's way. Each is right for a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.batch import BatchRow, BatchSteps
from specbench.reference.batch_layouts import RaggedModel, forward_left_padded
from specbench.reference.faults.fault import Fault
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.target import ReferenceTarget
from specbench.steps import CommitStep, FlatTree, WalkStep
from specbench.tree import DraftTree
from specbench.types import VerifyResult


def _target(plant: Callable[[BatchSteps], BatchSteps]) -> Callable[[], ReferenceTarget]:
    return lambda: ReferenceTarget(plant_batch=plant)


def _minimum(steps: BatchSteps) -> BatchSteps:
    """A longer path loses drafts, but keeps the bonus token that was drawn behind them."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.verify(walk, trees, flat_logits, cu_nodes)
        shortest = min(len(one.path) for one in results)
        return [VerifyResult(one.path[:shortest], one.bonus_token) for one in results]

    return replace(steps, verify=verify)


def _padding_accepted(steps: BatchSteps) -> BatchSteps:
    """Token 0 pads the drafts, and the argmax of an all-zero padding row is 0: a match."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        largest = max(tree.num_nodes for tree in trees)
        results = []
        for tree, result in zip(trees, steps.verify(walk, trees, flat_logits, cu_nodes), strict=True):
            last = result.path[-1] if result.path else 0
            into_padding = last == tree.num_nodes - 1 and tree.num_nodes < largest
            results.append(VerifyResult(result.path, 0) if into_padding else result)
        return results

    return replace(steps, verify=verify)


def _padded_offsets(steps: BatchSteps) -> BatchSteps:
    """Rows are looked up as if every tree had as many nodes as the largest."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        largest = max(tree.num_nodes for tree in trees)
        results = []
        for idx, tree in enumerate(trees):
            start = min(idx * largest, len(flat_logits) - tree.num_nodes)
            results.append(walk(tree, flat_logits[start : start + tree.num_nodes]))
        return results

    return replace(steps, verify=verify)


def _root_reads_before(steps: BatchSteps) -> BatchSteps:
    """The offset of a tree's last draft is taken for the bonus row: one too low where there is no draft."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = []
        for tree, start in zip(trees, cu_nodes[:-1], strict=True):
            first = max(0, start - 1) if tree.num_nodes == 1 else start
            results.append(walk(tree, flat_logits[first : first + tree.num_nodes]))
        return results

    return replace(steps, verify=verify)


class _SeesPadding:
    """The model with the positions that hide padding taken for ordinary ones."""

    def __init__(self, model: RaggedModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_mask: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
    ) -> tuple[Tensor, Tensor]:
        is_padding = (k_positions < 0)[:, None, :, None]
        k, v = k.masked_fill(is_padding, 0.0), v.masked_fill(is_padding, 0.0)  # zero-filled, as it mostly is
        return self._model.attention(layer, q, k, v, block_mask, q_positions, k_positions.clamp(min=0))


def _padding_visible(steps: BatchSteps) -> BatchSteps:
    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        return forward_left_padded(_SeesPadding(model), blocks, caches)

    return replace(steps, forward=forward)


def _first_path(steps: BatchSteps) -> BatchSteps:
    """As many rows as were accepted, but those numbered by the first sequence's path."""

    def commit_all(
        commit: CommitStep,
        caches: Sequence[AppendableCache],
        prefix_lens: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        theirs = []
        for cache, prefix_len, own in zip(caches, prefix_lens, kept, strict=True):
            last = cache.length - prefix_len - 1
            first = [*kept[0], *own[len(kept[0]) :]][: len(own)]
            theirs.append([min(row, last) for row in first])
        steps.commit(commit, caches, prefix_lens, theirs)

    return replace(steps, commit=commit_all)


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


def _first_stop(steps: BatchSteps) -> BatchSteps:
    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        rows = steps.join(active, joining)
        for row in rows[1:]:
            row.request = replace(row.request, stop=rows[0].request.stop)
        return rows

    return replace(steps, join=join)


def _bleeding_logits(steps: BatchSteps) -> BatchSteps:
    """A reduction over the batch (a shared largest logit to stabilise softmax, say) that is stored in place."""

    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        logits = steps.forward(model, blocks, caches)
        ceiling = torch.stack([one.max() for one in logits]).min()
        return [one.clamp(max=ceiling) for one in logits]

    return replace(steps, forward=forward)


FAULTS = (
    Fault(
        "batch_minimum",
        "batch-raggedness",
        "all rows are cut to the shortest accept length of the batch, and what was drawn behind the longer paths stays",
        "unequal accept lengths",
        "verify.batch",
        target=_target(_minimum),
    ),
    Fault(
        "padding_accepted",
        "accept-padding/placeholder",
        "behind a fully accepted shorter tree its padding counts as a match: the bonus token is the padding token",
        "a path that ends in the last node of a smaller tree",
        "verify.batch",
        target=_target(_padding_accepted),
    ),
    Fault(
        "padded_offsets",
        "batch-raggedness",
        "each tree's rows are looked up at multiples of the largest tree",
        "trees of unequal size",
        "verify.batch",
        target=_target(_padded_offsets),
    ),
    Fault(
        "root_reads_before",
        "batch-raggedness",
        "a tree without drafts is decided by the row before its own, the last one of the tree before it",
        "a root alone behind another tree",
        "verify.batch",
        target=_target(_root_reads_before),
    ),
    Fault(
        "padding_visible",
        "mask-prefix/padding",
        "shorter rows attend to the zeros that pad them on the left",
        "prefixes of unequal length",
        "batch.solo",
        target=_target(_padding_visible),
    ),
    Fault(
        "first_rows_path",
        "kv-wrong-path-compacted",
        "the first sequence's path says which rows of every cache are kept",
        "different accepted paths",
        "batch.solo",
        target=_target(_first_path),
    ),
    Fault(
        "shared_ceiling",
        "batch-cross-talk",
        "logits are clipped at the smallest of the rows' largest logits",
        "any batch of two",
        "batch.solo",
        target=_target(_bleeding_logits),
    ),
    Fault(
        "stale_slots",
        "batch-cross-talk",
        "when a row has ended the others close up, but their caches stay in the old order",
        "a row that ends before one behind it",
        "batch.join",
        target=_target(_stale_slots),
    ),
    Fault(
        "stale_sampling",
        "batch-cross-talk",
        "when a row has ended the others close up, but take the sampling of the row that stood there before",
        "a row that ends before one with other penalties",
        "batch.join",
        target=_target(_stale_sampling),
    ),
    Fault(
        "neighbours_cache",
        "batch-cross-talk",
        "a row that joins late starts behind what its neighbour has cached",
        "a late row",
        "batch.join",
        target=_target(_neighbours_cache),
    ),
    Fault(
        "first_rows_stop",
        "batch-cross-talk",
        "the first row's end token holds for all rows",
        "rows with different end tokens",
        "batch.join",
        target=_target(_first_stop),
    ),
)
