"""Storage that holds more than rows: NaN wherever no row is, and a ring longer than its window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.batch import BatchSteps
from specbench.reference.batch_layouts import RaggedModel
from specbench.reference.caches.ring import Ring, RingCache
from specbench.reference.controls.control import Control
from specbench.reference.controls.models import Rehoused
from specbench.reference.kv_cache import AppendableCache, CacheSpec, new_cache
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.types import Taps

BLOCK = 64


def _nan_beyond_the_length(steps: Steps) -> Steps:
    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        if hasattr(cache, "poison"):
            cache.poison(math.nan)
        return steps.forward(model, flat, cache, taps=taps)

    return replace(steps, forward=forward)


def _nan_in_a_batch(steps: BatchSteps) -> BatchSteps:
    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        for cache in caches:
            cache.poison(math.nan)
        return steps.forward(model, blocks, caches)

    return replace(steps, forward=forward)


class _RoomyRing(Ring):
    """Never shorter than the window and a block of 64 less one."""

    def _resize(self, size: int, num_new: int) -> None:
        super()._resize(max(size, self.size, (self.layer.window or 0) + BLOCK - 1), num_new)


class _RoomyRings(RingCache):
    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._rings = [_RoomyRing(layer, spec) for layer in spec.layers]


def _with_roomy_rings(model: LanguageModel) -> Any:
    return Rehoused(
        model,
        lambda kind, inner: _RoomyRings(inner.cache_spec) if kind == "ring" else new_cache(kind, inner.cache_spec),
    )


class _RoomyTarget(ReferenceTarget):
    cache_kinds = ("ring",)


CONTROLS = (
    Control(
        "nan_beyond_the_length",
        "before every forward, storage that holds no row is overwritten with NaN",
        "nothing reads beyond the length; engines hand out memory as they find it",
        lambda: ReferenceTarget(_nan_beyond_the_length, plant_batch=_nan_in_a_batch),
    ),
    Control(
        "ring_longer_than_its_window",
        "a sliding layer keeps a ring of its window and 63 rows more",
        "a block of S rows needs room for S - 1 more than the window, and the mask hides what has left it",
        lambda: _RoomyTarget(plant_model=_with_roomy_rings),
    ),
)
