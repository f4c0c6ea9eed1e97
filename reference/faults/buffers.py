"""Buffers that are filled once and read again: what an earlier tree, step or sequence has left in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps, VerifyResult


def _stale_mask(steps: Steps) -> Steps:
    buffer = torch.zeros(0, 0, dtype=torch.bool)

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal buffer
        flat = steps.flatten(tree, prefix_len)
        size = max(len(buffer), flat.num_rows)
        grown = torch.zeros(size, size, dtype=torch.bool)
        grown[: len(buffer), : len(buffer)] = buffer
        grown[: flat.num_rows, : flat.num_rows] |= flat.mask  # what an earlier, larger tree let see is still set
        buffer = grown
        return replace(flat, mask=buffer[: flat.num_rows, : flat.num_rows].clone())

    return replace(steps, flatten=flatten)


def _too_small_mask(steps: Steps) -> Steps:
    """The first tree's mask sets the size. The buffer grows with a larger tree; the rows added know only themselves."""
    num_rows = 0

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal num_rows
        flat = steps.flatten(tree, prefix_len)
        num_rows = num_rows or flat.num_rows
        mask = flat.mask.clone()
        mask[num_rows:] = torch.eye(flat.num_rows, dtype=torch.bool)[num_rows:]
        return replace(flat, mask=mask)

    return replace(steps, flatten=flatten)


def _depths_of_first(steps: Steps) -> Steps:
    """The depths of the nodes are written once for each row of the buffer, by the first tree that has it."""
    depths = torch.zeros(0, dtype=torch.int64)

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal depths
        flat = steps.flatten(tree, prefix_len)
        depths = torch.cat([depths, (flat.position_ids - prefix_len)[len(depths) :]])
        return replace(flat, position_ids=prefix_len + depths[: flat.num_rows])

    return replace(steps, flatten=flatten)


def _plain_step_goes_on(steps: Steps) -> Steps:
    """The last tree's depth is still in the buffer that a plain step adds to its position."""
    depth = 0

    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        nonlocal depth
        flat = steps.flatten(tree, prefix_len)
        if tree.num_nodes > 1:
            depth = int(tree.depth.max())
            return flat
        return replace(flat, position_ids=flat.position_ids + depth)

    return replace(steps, flatten=flatten)


def _ghost_nodes(steps: Steps) -> Steps:
    """The walk reads tokens and parents from buffers that still hold the end of a larger tree."""
    tokens: list[int] = []
    parents: list[int] = []

    def walk(tree: DraftTree, target_logits: Tensor) -> VerifyResult:
        tokens[: tree.num_nodes], parents[: tree.num_nodes] = tree.token_list, tree.parent_list
        num_ghosts = len(tokens) - tree.num_nodes
        rows = torch.nn.functional.pad(target_logits, (0, 0, 0, num_ghosts))
        result = steps.walk(DraftTree.of(tokens, parents), rows)
        return VerifyResult(tuple(node for node in result.path if node < tree.num_nodes), result.bonus_token)

    return replace(steps, walk=walk)


def _logits_by_place(steps: Steps) -> Steps:
    """Logits are kept by prefix length and number of rows, and handed out again for another tree in that place."""
    known: dict[tuple[int, int], Tensor] = {}

    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        place = (cache.length, flat.num_rows)
        return known.setdefault(place, steps.forward(model, flat, cache, taps=taps))

    return replace(steps, forward=forward)


def _path_never_shrinks(steps: Steps) -> Steps:
    """The buffer for the rows to keep is as long as the longest path so far, and is used up to its end."""
    buffer: list[int] = []

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        buffer[: len(rows)] = rows
        last = cache.length - prefix_len - 1
        steps.commit(cache, prefix_len, [min(row, last) for row in buffer])

    return replace(steps, commit=commit)


class _ForksShareARound(Decoder):
    """A sequence and its forks keep their uncommitted forward in one and the same place."""

    _place: list[tuple[DraftTree, FlatTree, int] | None]

    @property
    def _pending(self) -> tuple[DraftTree, FlatTree, int] | None:
        return self._place[0]

    @_pending.setter
    def _pending(self, pending: tuple[DraftTree, FlatTree, int] | None) -> None:
        self.__dict__.setdefault("_place", [None])[0] = pending


FAULTS = (
    Fault(
        "mask_buffer_stale",
        "static-buffer-stale",
        "the mask buffer keeps what an earlier, larger tree let see",
        "a smaller tree after a larger one",
        "kv.commit",
        _stale_mask,
        origin="flashinfer-ai/flashinfer#1028",
        subtle="a smaller tree after a larger one",
    ),
    Fault(
        "mask_buffer_too_small",
        "mask-missing-ancestor",
        "the mask buffer grows with a tree larger than the first, but is filled up to the first one's rows only",
        "a larger tree after a smaller one",
        "kv.commit",
        _too_small_mask,
        subtle="a larger tree after a smaller one",
    ),
    Fault(
        "depths_of_first_tree",
        "static-buffer-stale",
        "nodes are run with the depths that the first tree gave to their numbers",
        "a second tree of another shape",
        "kv.commit",
        _depths_of_first,
        subtle="a second round with a tree of another shape",
    ),
    Fault(
        "plain_step_goes_on",
        "static-buffer-stale",
        "a plain step behind a tree round stands as many positions too far as the tree was deep",
        "a plain step behind a round with drafts",
        "greedy.lossless",
        _plain_step_goes_on,
        subtle="a tree round followed by a plain step",
    ),
    Fault(
        "ghost_nodes",
        "static-buffer-stale",
        "the walk still finds the last nodes of an earlier, larger tree",
        "a smaller tree after a larger one, whose end is accepted",
        "greedy.repeatable",
        _ghost_nodes,
        subtle="a smaller tree after a larger one",
    ),
    Fault(
        "logits_by_place",
        "static-buffer-stale",
        "logits are kept by prefix length and number of rows, and handed out for another tree there",
        "a second tree of one size behind as many tokens",
        "greedy.repeatable",
        _logits_by_place,
        subtle="another request, tree or attempt of the same size",
    ),
    Fault(
        "path_buffer_never_shrinks",
        "static-buffer-stale",
        "as many rows are kept as the longest accepted path so far had",
        "a shorter accept after a longer one",
        "kv.commit",
        _path_never_shrinks,
        subtle="a shorter accept after a longer one",
    ),
    Fault(
        "forks_share_a_round",
        "static-buffer-stale",
        "a sequence and its forks keep their uncommitted forward in one place",
        "a forward of the fork between forward and commit of the sequence",
        "kv.fork",
        target=lambda: ReferenceTarget(decoder=_ForksShareARound),
        subtle="two sequences whose forward and commit interleave",
    ),
)
