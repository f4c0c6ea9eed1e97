"""Batches whose rows are laid out, verified or committed in one another's way. Most are right for a batch of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.reference.batch import BatchSteps
from specbench.reference.batch_layouts import RaggedModel, forward_left_padded
from specbench.reference.faults.fault import Fault
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.target import ReferenceTarget
from specbench.steps import CommitStep, FlatTree, WalkStep
from specbench.tree import DraftTree, root_only
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


def _minimum_redrawn(steps: BatchSteps) -> BatchSteps:
    """A longer path loses drafts, and says the first of them again as its correction: the same text in more rounds."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.verify(walk, trees, flat_logits, cu_nodes)
        shortest = min(len(one.path) for one in results)
        return [
            VerifyResult(
                one.path[:shortest],
                tree.token_list[one.path[shortest]] if shortest < len(one.path) else one.bonus_token,
            )
            for tree, one in zip(trees, results, strict=True)
        ]

    return replace(steps, verify=verify)


def _padding_row_bonus(steps: BatchSteps) -> BatchSteps:
    """Token 0 pads the drafts of smaller trees, below their roots: where the target says 0, padding is accepted."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        largest = max(tree.num_nodes for tree in trees)
        results = []
        for tree, result, end in zip(
            trees, steps.verify(walk, trees, flat_logits, cu_nodes), cu_nodes[1:], strict=True
        ):
            into_padding = not result.path and result.bonus_token == 0 and tree.num_nodes < largest
            behind = flat_logits[min(end, len(flat_logits) - 1)]  # the padding's row, or the next tree's
            results.append(VerifyResult((), int(behind.argmax())) if into_padding else result)
        return results

    return replace(steps, verify=verify)


def _nothing_accepted_wraps(steps: BatchSteps) -> BatchSteps:
    """The last accepted node is looked up at index count - 1: with nothing accepted that is the last row of all."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.verify(walk, trees, flat_logits, cu_nodes)
        return [one if one.path else VerifyResult((), int(flat_logits[-1].argmax())) for one in results]

    return replace(steps, verify=verify)


def _two_rows_at_least(steps: BatchSteps) -> BatchSteps:
    """Offsets are summed up over drafts, at least one a tree: a root alone moves all that stand behind it."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results, num_alone = [], 0
        for tree, start in zip(trees, cu_nodes[:-1], strict=True):
            first = min(start + num_alone, len(flat_logits) - tree.num_nodes)
            results.append(walk(tree, flat_logits[first : first + tree.num_nodes]))
            num_alone += tree.num_nodes == 1
        return results

    return replace(steps, verify=verify)


def _sorted_by_size(steps: BatchSteps) -> BatchSteps:
    """Trees are verified largest first, and the results are left in that order."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.verify(walk, trees, flat_logits, cu_nodes)
        order = sorted(range(len(trees)), key=lambda idx: -trees[idx].num_nodes)
        moved = [results[idx] for idx in order]
        # A path that is none in the tree it is handed to would be refused: its own result then.
        return [new if tree.is_path(new.path) else old for tree, new, old in zip(trees, moved, results, strict=True)]

    return replace(steps, verify=verify)


def _first_trees_parents(steps: BatchSteps) -> BatchSteps:
    """One table of parents, the first tree's, serves all trees that are no larger."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        first = trees[0].parent_list
        alike = [
            DraftTree.of(tree.token_list, first[: tree.num_nodes] if tree.num_nodes <= len(first) else tree.parent_list)
            for tree in trees
        ]
        return steps.verify(walk, alike, flat_logits, cu_nodes)

    return replace(steps, verify=verify)


def _odd_one_out(steps: BatchSteps) -> BatchSteps:
    """Trees are verified in pairs; an odd one at the end is given its root's token and loses all its drafts."""

    def verify(
        walk: WalkStep, trees: Sequence[DraftTree], flat_logits: Tensor, cu_nodes: Sequence[int]
    ) -> list[VerifyResult]:
        results = steps.verify(walk, trees, flat_logits, cu_nodes)
        if len(trees) > 1 and len(trees) % 2:
            results[-1] = walk(root_only(trees[-1].token_list[0]), flat_logits[cu_nodes[-2] : cu_nodes[-2] + 1])
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


def _padded_base(steps: BatchSteps) -> BatchSteps:
    """Positions go on from the longest prefix of the batch, in rows that were padded to it too."""

    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        longest = max(cache.length for cache in caches)
        moved = [
            replace(block, position_ids=block.position_ids + longest - cache.length)
            for block, cache in zip(blocks, caches, strict=True)
        ]
        return steps.forward(model, moved, caches)

    return replace(steps, forward=forward)


def _nan_of_padding(steps: BatchSteps) -> BatchSteps:
    """A padding row sees nothing and is NaN; what a reduction over its sequence spreads is then set to zero."""

    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        widest = max(block.num_rows for block in blocks)
        finished = []
        for one in steps.forward(model, blocks, caches):
            padded = torch.nn.functional.pad(one, (0, 0, 0, widest - len(one)), value=float("nan"))
            finished.append(torch.nan_to_num(one + 0.0 * padded.max(), nan=0.0))
        return finished

    return replace(steps, forward=forward)


def _bucket_of_pairs(steps: BatchSteps) -> BatchSteps:
    """An odd batch is filled up by its last row once more. Its rows reach the cache twice, which no commit undoes where
    a prompt is cached."""

    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        if len(blocks) == 1 or len(blocks) % 2 == 0:
            return steps.forward(model, blocks, caches)
        return steps.forward(model, [*blocks, blocks[-1]], [*caches, caches[-1]])[:-1]

    return replace(steps, forward=forward)


def _first_rows_mask(steps: BatchSteps) -> BatchSteps:
    """One tree mask, the first row's, serves all blocks that are no larger."""

    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        mask = blocks[0].mask
        alike = [
            replace(block, mask=mask[: block.num_rows, : block.num_rows]) if block.num_rows <= len(mask) else block
            for block in blocks
        ]
        return steps.forward(model, alike, caches)

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


def _neighbours_prefix(steps: BatchSteps) -> BatchSteps:
    """Each row is committed behind the prefix of the row before it, where that one is shorter."""

    def commit_all(
        commit: CommitStep,
        caches: Sequence[AppendableCache],
        prefix_lens: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        before = [prefix_lens[0], *prefix_lens[:-1]]
        steps.commit(commit, caches, [min(pair) for pair in zip(prefix_lens, before, strict=True)], kept)

    return replace(steps, commit=commit_all)


def _count_of_longest(steps: BatchSteps) -> BatchSteps:
    """The gather is a rectangle: a shorter path is filled up with row 0, and all of it counts."""

    def commit_all(
        commit: CommitStep,
        caches: Sequence[AppendableCache],
        prefix_lens: Sequence[int],
        kept: Sequence[Sequence[int]],
    ) -> None:
        longest = max(map(len, kept))
        steps.commit(commit, caches, prefix_lens, [[*rows, *[0] * (longest - len(rows))] for rows in kept])

    return replace(steps, commit=commit_all)


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
        subtle="unequal accept lengths in a batch",
        kin="batch_minimum",
    ),
    Fault(
        "padding_accepted",
        "accept-padding/placeholder",
        "behind a fully accepted shorter tree its padding counts as a match: the bonus token is the padding token",
        "a path that ends in the last node of a smaller tree",
        "verify.batch",
        target=_target(_padding_accepted),
        origin="vllm-project/vllm#46533",
        subtle="a full accept in the smaller tree of a batch",
        kin="padding_accepted",
    ),
    Fault(
        "padded_offsets",
        "batch-raggedness",
        "each tree's rows are looked up at multiples of the largest tree",
        "trees of unequal size",
        "verify.batch",
        target=_target(_padded_offsets),
        origin="vllm-project/vllm-xpu-kernels#600",
        kin="ragged_offsets",
    ),
    Fault(
        "root_reads_before",
        "batch-raggedness",
        "a tree without drafts is decided by the row before its own, the last one of the tree before it",
        "a root alone behind another tree",
        "verify.batch",
        target=_target(_root_reads_before),
        subtle="a row without drafts beside rows that have some",
        kin="ragged_offsets",
    ),
    Fault(
        "padding_visible",
        "mask-prefix/padding",
        "shorter rows attend to the zeros that pad them on the left",
        "prefixes of unequal length",
        "batch.solo",
        target=_target(_padding_visible),
        origin="ml-explore/mlx-lm#1906",
        subtle="a shorter row of a batch",
    ),
    Fault(
        "first_rows_path",
        "kv-wrong-path-compacted",
        "the first sequence's path says which rows of every cache are kept",
        "different accepted paths",
        "batch.solo",
        target=_target(_first_path),
        subtle="different accepted paths in one round",
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
        "minimum_redrawn",
        "batch-raggedness",
        "all rows are cut to the shortest accept length of the batch and draw their corrections anew",
        "unequal accept lengths; under greedy decoding the output stays right, only acceptance falls",
        "verify.batch",
        target=_target(_minimum_redrawn),
        subtle="unequal accept lengths in a batch; the output stays right",
        kin="batch_minimum",
    ),
    Fault(
        "padding_row_bonus",
        "accept-padding/placeholder",
        "padding drafts of token 0 below the root are accepted where the target says 0, and the row behind gives the "
        "bonus token",
        "a smaller tree whose drafts are all refused for token 0",
        "verify.batch",
        target=_target(_padding_row_bonus),
        origin="vllm-project/vllm#54137",
        subtle="the smaller tree of a batch, and token 0 as its correction",
        kin="padding_accepted",
    ),
    Fault(
        "count_zero_wraps",
        "accept-padding/placeholder",
        "an accept count of 0 is used as index -1: the correction is read from the last row of the batch",
        "a round in which nothing is accepted",
        "verify.batch",
        target=_target(_nothing_accepted_wraps),
        origin="vllm-project/vllm#50021",
        subtle="accept count 0",
    ),
    Fault(
        "two_rows_at_least",
        "batch-raggedness",
        "offsets count at least one draft a tree: those behind a root alone are one row too far",
        "a root alone in front of another tree",
        "verify.batch",
        target=_target(_two_rows_at_least),
        subtle="a row without drafts in front of one with drafts",
        kin="ragged_offsets",
    ),
    Fault(
        "sorted_not_unsorted",
        "batch-cross-talk",
        "trees are verified largest first and the results are not put back in order",
        "a larger tree behind a smaller one",
        "verify.batch",
        target=_target(_sorted_by_size),
        subtle="trees of rising size",
    ),
    Fault(
        "first_trees_parents",
        "accept-wrong-branch",
        "the first tree's parents say whose child a node is, in every tree that is no larger",
        "a tree of another shape behind a larger one",
        "verify.batch",
        target=_target(_first_trees_parents),
        subtle="different shapes in a batch",
        kin="first_rows_tree",
    ),
    Fault(
        "odd_tree_unverified",
        "batch-raggedness",
        "trees are verified in pairs, and an odd one at the end loses its drafts",
        "a batch of three; the output stays right, only acceptance falls",
        "verify.batch",
        target=_target(_odd_one_out),
        subtle="the last row of an odd batch; the output stays right",
    ),
    Fault(
        "padded_base",
        "position-ids",
        "positions of a row padded on the left are counted from the padded length",
        "prefixes of unequal length",
        "batch.solo",
        target=_target(_padded_base),
        origin="unslothai/unsloth#4078",
        subtle="a shorter row of a batch",
    ),
    Fault(
        "padding_nan",
        "dtype/precision",
        "a padding row that sees nothing is NaN, and takes all rows of its sequence along",
        "blocks of unequal size",
        "batch.solo",
        target=_target(_nan_of_padding),
        origin="NVIDIA-NeMo/Automodel#2826",
        subtle="the smaller block of a batch",
    ),
    Fault(
        "bucket_row_repeated",
        "static-buffer-stale",
        "a batch is filled up to an even size by its last row, whose prompt is then cached twice",
        "a batch of three",
        "batch.solo",
        target=_target(_bucket_of_pairs),
        subtle="the last row of an odd batch",
    ),
    Fault(
        "first_rows_mask",
        "mask-leak",
        "the first row's tree mask serves every row whose block is no larger",
        "a tree of another shape behind a larger one",
        "batch.solo",
        target=_target(_first_rows_mask),
        subtle="different shapes in a batch",
        kin="first_rows_tree",
    ),
    Fault(
        "neighbours_prefix",
        "kv-off-by-one",
        "a commit keeps the path behind the prefix of the row before, where that one is shorter",
        "a shorter row in front of a longer one",
        "batch.solo",
        target=_target(_neighbours_prefix),
        subtle="unequal prefixes in a batch",
    ),
    Fault(
        "longest_path_counts",
        "kv-not-rolled-back",
        "every cache grows by the longest accepted path of the batch, shorter ones by copies of the root's row",
        "unequal accept lengths",
        "batch.solo",
        target=_target(_count_of_longest),
        subtle="unequal accept lengths in a batch",
    ),
)
