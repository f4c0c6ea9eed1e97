"""Room that ends: rows, positions, ids and tokens beyond what a buffer or a limit was made for.

Buffers are a few rows large, so that short texts reach their end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.reference.caches.cache import GARBAGE, CacheSpec, kept_rows
from specbench.reference.caches.preallocated import PreallocatedCache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget
from specbench.steps import Emission, FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Stop, VerifyResult

ROWS = 4
POSITIONS = 512
DRAFTS = 3


class _GrownOneRowShort(PreallocatedCache):
    """A full buffer is replaced by one of twice the size, and the last row is not copied."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec, capacity=ROWS)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if self._lengths[layer] + k.shape[1] > self.capacity:
            old = self._parts
            while self._lengths[layer] + k.shape[1] > self.capacity:
                self.capacity *= 2
            self._parts = [self._new_parts(one) for one in self.spec.layers]
            for new_parts, old_parts, length in zip(self._parts, old, self._lengths, strict=True):
                for new, part in zip(new_parts, old_parts, strict=True):
                    new.fill_(GARBAGE)
                    new[:, : length - 1] = part[:, : length - 1]
        return super().append(layer, k, v)


class _Wraps(PreallocatedCache):
    """Row r lies in slot r modulo the capacity, and nothing says when that is taken."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec, capacity=ROWS)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self._lengths[layer], self._lengths[layer] + k.shape[1]
        for buffer, part in zip(self._parts[layer], self._encode(layer, k, v), strict=True):
            for row in range(start, end):
                buffer[:, self._slot(row)] = part[:, row - start]
        self._lengths[layer] = end
        return self.rows(layer)

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        kept = kept_rows(self.length, prefix_len, rows)
        index = torch.tensor([self._slot(row) for row in kept], dtype=torch.int64)
        for buffer in (part for parts in self._parts for part in parts):
            for row, one in enumerate(buffer.index_select(1, index).unbind(1)):
                buffer[:, self._slot(row)] = one
        self._lengths = [len(kept)] * len(self._lengths)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        index = torch.tensor([self._slot(row) for row in range(self._lengths[layer])], dtype=torch.int64)
        return self._decode(layer, tuple(part.index_select(1, index) for part in self._parts[layer]))

    def _slot(self, row: int) -> int:
        return row % self.capacity


class _Clamps(_Wraps):
    """What does not fit is written to the last slot."""

    def _slot(self, row: int) -> int:
        return min(row, self.capacity - 1)


def _positions_clamped(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        return replace(flat, position_ids=flat.position_ids.clamp(max=POSITIONS - 1))

    return replace(steps, flatten=flatten)


def _ids_of_three_drafts(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        return replace(flat, tokens=flat.tokens.where(flat.node_of_row <= DRAFTS, 0))

    return replace(steps, flatten=flatten)


def _last_token_unreachable(steps: Steps) -> Steps:
    def emit(
        tree: DraftTree, result: VerifyResult, *, stop: Stop, num_remaining: int, output: Sequence[int] = ()
    ) -> Emission:
        emission = steps.emit(tree, result, stop=stop, num_remaining=num_remaining, output=output)
        is_last_but_one = num_remaining - len(emission.tokens) == 1
        return replace(emission, finish_reason="length") if is_last_but_one else emission

    return replace(steps, emit=emit)


FAULTS = (
    Fault(
        "grown_one_row_short",
        "capacity/out-of-range",
        "a full buffer is copied into one of twice the size without its last row",
        "a text that outgrows the buffer in a later forward",
        "greedy.lossless",
        target=lambda: CacheTarget("preallocated", _GrownOneRowShort),
        subtle="a text that crosses the capacity between two forwards",
    ),
    Fault(
        "write_wraps",
        "capacity/out-of-range",
        "rows beyond the capacity overwrite the first ones",
        "a text longer than the buffer",
        "greedy.lossless",
        target=lambda: CacheTarget("preallocated", _Wraps),
        subtle="a text longer than the buffer",
        kin="capacity_write",
    ),
    Fault(
        "write_clamped",
        "capacity/out-of-range",
        "rows beyond the capacity all land in the last slot",
        "a text longer than the buffer",
        "greedy.lossless",
        target=lambda: CacheTarget("preallocated", _Clamps),
        subtle="a text longer than the buffer",
        kin="capacity_write",
    ),
    Fault(
        "positions_clamped",
        "capacity/out-of-range",
        "positions beyond the last of 512 collide there",
        "a tree that reaches beyond position 511",
        "tree.long",
        _positions_clamped,
        subtle="a context of more than 512 tokens",
        kin="position_limit",
    ),
    Fault(
        "ids_of_three_drafts",
        "capacity/out-of-range",
        "the buffer of draft ids holds three, later nodes keep their parents and are computed as token 0",
        "a fourth draft",
        "tree.logits",
        _ids_of_three_drafts,
        subtle="more than three drafts",
    ),
    Fault(
        "last_token_unreachable",
        "eos/stop/max-length",
        "the loop ends one token before the limit, unless a run jumps over that place",
        "a round that leaves one token to be said",
        "stop.max_tokens",
        _last_token_unreachable,
        subtle="exactly one token left",
    ),
)
