"""What single cache kinds keep beside or instead of rows: rings and scales of quantised rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.caches.cache import GARBAGE, CacheSpec, check_truncation, kept_rows
from specbench.reference.caches.quantised import Int8Cache
from specbench.reference.caches.ring import ROOM, Ring, RingCache
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


class _SlotsOfASmallerRing(Ring):
    """A row's slot is its number modulo one less than the ring has: the oldest and the newest of a full ring meet."""

    def slots(self, rows: Sequence[int]) -> Tensor:
        return torch.tensor(list(rows), dtype=torch.int64) % max(self.size - 1, 1)


class _BlockRunsOverTheEnd(Ring):
    """A block is written as one stretch from the slot of its first row; what runs over the end stays at the end."""

    def append(self, k: Tensor, v: Tensor) -> None:
        super().append(k, v)
        num_new = k.shape[1]
        first = (self.length - num_new) % max(self.size, 1)
        num_over = first + num_new - self.size
        if num_over > 0:
            self.keys[:, -1], self.values[:, -1] = k[:, -1], v[:, -1]
            self.keys[:, :num_over], self.values[:, :num_over] = GARBAGE, GARBAGE


class _OneRowTooFew(Ring):
    """The ring is made one slot too small for what the block's first row reads. Its spare slots hide that from blocks
    that do not fill them."""

    def append(self, k: Tensor, v: Tensor) -> None:
        super().append(k, v)
        if self.layer.window is not None and k.shape[1] >= ROOM:
            self.first = max(self.first, min(self.length - self.size + 1, self.length))


def _rings_of(kind: type[Ring]) -> CacheTarget:
    class Rings(RingCache):
        def __init__(self, spec: CacheSpec) -> None:
            super().__init__(spec)
            self._rings = [kind(layer, spec) if layer.window else Ring(layer, spec) for layer in spec.layers]

    return CacheTarget("ring", Rings)


class _ScalesHalved(Int8Cache):
    """Scales are stored in half precision by a commit, in full by the forward."""

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        super().commit(prefix_len, rows)
        for parts, layer in zip(self._parts, self.spec.layers, strict=True):
            for scales in () if layer.is_state else (parts[1], parts[3]):
                moved = scales[:, prefix_len : self.length]
                moved.copy_(moved.half())


class _BlockNotRounded(Int8Cache):
    """A forward reads its own rows as they are, later ones read what their codes say."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = super().append(layer, k, v)
        num_before = keys.shape[1] - k.shape[1]
        return torch.cat([keys[:, :num_before], k], dim=1), torch.cat([values[:, :num_before], v], dim=1)


FAULTS = (
    Fault(
        "siblings_share_a_slot",
        "sliding-window",
        "a layer with a window stores the rows of a block by position, so that siblings overwrite each other",
        "an accepted node with a later sibling or cousin, in a model with a window",
        "kv.commit",
        _siblings_share_a_slot,
        origin="Avarok-Cybersecurity/atlas#745",
        subtle="an accepted node with a later sibling, in a layer with a window",
    ),
    Fault(
        "ring_never_restored",
        "sliding-window",
        "after a cut, rows that had left the ring are read from slots that others have overwritten",
        "a cut by more rows than the ring has to spare, in a model with a window",
        "kv.rollback",
        target=lambda: CacheTarget("ring", _NeverRestored),
        origin="ml-explore/mlx-lm#1486",
        subtle="a cut in a full ring",
    ),
    Fault(
        "scales_not_moved",
        "kv-wrong-path-compacted",
        "a commit gathers the codes of int8 rows and leaves their scales where they were",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        target=lambda: CacheTarget("int8", _ScalesLeftBehind),
        subtle="an accepted path off the first rows",
        kin="part_not_moved",
    ),
    Fault(
        "value_scales_not_moved",
        "kv-wrong-path-compacted",
        "a commit gathers the codes of int8 rows and the scales of keys, and leaves those of values where they were",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        target=lambda: CacheTarget("int8", _ValueScalesLeftBehind),
        subtle="an accepted path off the first rows, values only",
        kin="part_not_moved",
    ),
    Fault(
        "slots_of_a_smaller_ring",
        "sliding-window",
        "slots of a ring are counted modulo one less than it has",
        "a full ring, in a model with a window",
        "kv.commit",
        target=lambda: _rings_of(_SlotsOfASmallerRing),
        subtle="a full ring",
    ),
    Fault(
        "block_over_the_end_of_a_ring",
        "sliding-window",
        "a block is written to a ring as one stretch, and does not go round its end",
        "a block that goes round the end of a ring, in a model with a window",
        "kv.commit",
        target=lambda: _rings_of(_BlockRunsOverTheEnd),
        subtle="a ring that wraps in the middle of a block",
    ),
    Fault(
        "ring_one_row_too_few",
        "sliding-window",
        "a ring has one slot too few for its window, which its spare slots hide",
        "a block that fills the spare slots, in a model with a window",
        "kv.rollback",
        target=lambda: _rings_of(_OneRowTooFew),
        subtle="a full ring and a block larger than its spare slots",
    ),
    Fault(
        "scales_halved_by_commit",
        "dtype/precision",
        "a commit stores the scales of the rows it keeps in half precision",
        "any commit",
        "kv.commit",
        target=lambda: CacheTarget("int8", _ScalesHalved),
    ),
    Fault(
        "block_not_rounded",
        "dtype/precision",
        "a forward reads its own rows before they are rounded to int8",
        "any draft, whose row its descendants read rounded in plain decoding",
        "kv.rollback",
        target=lambda: CacheTarget("int8", _BlockNotRounded),
        subtle="rows right in the cache, logits not",
    ),
)
