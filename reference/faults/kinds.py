"""What single cache kinds keep beside or instead of rows: rings, scales of quantised rows, recurrent states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.caches.cache import check_truncation, kept_rows
from specbench.reference.caches.quantised import Int8Cache
from specbench.reference.caches.ring import RingCache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget
from specbench.reference.faults.rewrite import rewrite, rows_behind, spec_of
from specbench.steps import FlatTree, Steps
from specbench.types import Taps


def _siblings_share_a_slot(steps: Steps) -> Steps:
    """Behind the forward, the rows of a block are stored by position: of siblings the last one is left."""

    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        prefix_len = cache.length
        logits = steps.forward(model, flat, cache, taps=taps)
        positions = flat.position_ids.tolist()
        last = [max(row for row, one in enumerate(positions) if one == position) for position in positions]
        layers = [
            (k, v) if layer.window is None or layer.is_state else (k[:, last], v[:, last])
            for layer, (k, v) in zip(spec_of(cache).layers, rows_behind(cache, prefix_len), strict=True)
        ]
        rewrite(cache, prefix_len, layers)
        return logits

    return replace(steps, forward=forward)


class _NeverRestored(RingCache):
    """A cut below what the ring holds only moves the length: slots show what overwrote the rows."""

    def truncate(self, length: int) -> None:
        check_truncation(self.length, length)
        for ring in self._rings:
            ring.length = length
            ring.first = min(ring.first, length - ring.layer.num_needed(length))


class _ScalesLeftBehind(Int8Cache):
    """A commit moves codes; the scales stay with the first rows of the block."""

    left_behind: tuple[int, ...] = (1, 3)

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        num_kept = len(kept_rows(self.length, prefix_len, rows))
        kept = [
            {idx: parts[idx][:, prefix_len:num_kept].clone() for idx in self.left_behind if idx < len(parts)}
            for parts in self._parts
        ]
        super().commit(prefix_len, rows)
        for parts, layer, scales in zip(self._parts, self.spec.layers, kept, strict=True):
            for idx, old in scales.items() if not layer.is_state else ():
                parts[idx][:, prefix_len:num_kept] = old


class _ValueScalesLeftBehind(_ScalesLeftBehind):
    """Keys are right altogether."""

    left_behind = (3,)


def _state_of(row_of_block: str, steps: Steps) -> Steps:
    """The last kept snapshot of every recurrent layer is another row's: the block's "last", or the one "before"."""

    def commit(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
        layers = rows_behind(cache, prefix_len)
        num_rows = cache.length - prefix_len
        steps.commit(cache, prefix_len, rows)
        kept = list(rows)
        wrong = num_rows - 1 if row_of_block == "last" else kept[-2:][0]
        index = torch.tensor([*kept[:-1], wrong])
        if not any(layer.is_state for layer in spec_of(cache).layers):
            return
        rewrite(
            cache,
            prefix_len,
            [
                (k[:, index], v[:, index]) if layer.is_state else (k[:, kept], v[:, kept])
                for layer, (k, v) in zip(spec_of(cache).layers, layers, strict=True)
            ],
        )

    return replace(steps, commit=commit)


FAULTS = (
    Fault(
        "siblings_share_a_slot",
        "sliding-window",
        "a layer with a window stores the rows of a block by position, so that siblings overwrite each other",
        "an accepted node with a later sibling or cousin, in a model with a window",
        "kv.commit",
        _siblings_share_a_slot,
    ),
    Fault(
        "ring_never_restored",
        "sliding-window",
        "after a cut, rows that had left the ring are read from slots that others have overwritten",
        "a cut by more rows than the ring has to spare, in a model with a window",
        "kv.rollback",
        target=lambda: CacheTarget("ring", _NeverRestored),
    ),
    Fault(
        "scales_not_moved",
        "kv-wrong-path-compacted",
        "a commit gathers the codes of int8 rows and leaves their scales where they were",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        target=lambda: CacheTarget("int8", _ScalesLeftBehind),
    ),
    Fault(
        "value_scales_not_moved",
        "kv-wrong-path-compacted",
        "the same, for the scales of values only",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        target=lambda: CacheTarget("int8", _ValueScalesLeftBehind),
    ),
    Fault(
        "state_after_block",
        "recurrent-state-rollback",
        "a recurrent layer keeps its state behind the whole block, rejected rows included",
        "a rejection, in a model with recurrent layers",
        "kv.commit",
        lambda steps: _state_of("last", steps),
    ),
    Fault(
        "state_one_behind",
        "recurrent-state-rollback",
        "a recurrent layer keeps the state of the row before the last accepted one",
        "any accepted draft, in a model with recurrent layers: right when none is accepted",
        "kv.commit",
        lambda steps: _state_of("before", steps),
    ),
)
