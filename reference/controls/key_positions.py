"""Keys that are not cached as plain decoding caches them: turned to the number of their slot, or not turned at all.

The attention that reads them, and whoever asks for the cache, gets them turned to where their tokens stand. In between
they are kept in fp64, so that turning forth and back rounds nothing. Models of ours only: transformers turn their keys
in ways of their own, and a cache that rounds its rows would round other numbers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.batch import BatchSteps
from specbench.reference.batch_layouts import RaggedModel
from specbench.reference.controls.control import Control
from specbench.reference.controls.models import Rehoused
from specbench.reference.kv_cache import CACHES, QUANTISED, AppendableCache, CacheSpec, new_cache
from specbench.reference.model import LlamaModel
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.types import Taps

Home = Callable[[int], int]  # row number -> the position that its key is turned to while it lies in the cache


class _TurnedKeys:
    """Rows of `held`, whose keys are turned to their home. A forward has to say first where its rows stand."""

    def __init__(self, kind: str, model: LlamaModel, home: Home) -> None:
        self.spec: CacheSpec = model.cache_spec
        self._held: AppendableCache = new_cache(kind, replace(self.spec, dtype=torch.float64))
        self._theta = model.config.rope_theta
        self._home = home
        self._positions: list[int] = []  # where the token of each row stands

    def announce(self, position_ids: Tensor) -> None:
        """Where the rows of the next forward stand, int64 [M]."""
        self._positions = [*self._positions[: self.length], *position_ids.tolist()]

    @property
    def length(self) -> int:
        return self._held.length

    @property
    def nbytes(self) -> int:
        return self._held.nbytes

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes, over all layers."""
        return self._held.row_nbytes

    @property
    def page_size(self) -> int | None:
        return self._held.page_size

    @property
    def pages_in_use(self) -> int | None:
        return self._held.pages_in_use

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H, M, Dk], v: [H, M, Dv] new rows. Returns the rows held, the new ones last."""
        new = range(len(self._positions) - k.shape[1], len(self._positions))
        turns = [self._home(row) - self._positions[row] for row in new]
        return self._read(layer, *self._held.append(layer, self._turned(layer, k.double(), turns), v.double()))

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [H, n, Dk or Dv], the keys as plain decoding caches them."""
        return self._read(layer, *self._held.rows(layer))

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`, each key turned to
        its new home."""
        self._held.commit(prefix_len, rows)
        turns = [self._home(prefix_len + idx) - self._home(prefix_len + row) for idx, row in enumerate(rows)]
        layers = [self._held.rows(layer) for layer in range(len(self.spec.layers))]
        moved = [(k[:, k.shape[1] - len(rows) :].clone(), v[:, v.shape[1] - len(rows) :].clone()) for k, v in layers]
        self._held.truncate(prefix_len)
        for layer, (k, v) in enumerate(moved):
            self._held.append(layer, self._turned(layer, k, turns), v)
        self._positions = list(range(self.length))

    def truncate(self, length: int) -> None:
        self._held.truncate(length)
        self._positions = self._positions[:length]

    def fork(self) -> _TurnedKeys:
        twin = copy.copy(self)
        twin._held = self._held.fork()
        return twin

    def poison(self, value: float) -> None:
        self._held.poison(value)

    def _read(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The last rows of a layer as they lie there -> as they are to be read."""
        held = range(len(self._positions) - keys.shape[1], len(self._positions))
        turns = [self._positions[row] - self._home(row) for row in held]
        return self._turned(layer, keys, turns).to(self.spec.dtype), values.to(self.spec.dtype)

    def _turned(self, layer: int, keys: Tensor, turns: Sequence[int]) -> Tensor:
        """keys: float64 [H, n, D], each turned on by as many positions as `turns` says; a recurrent state has none."""
        if self.spec.layers[layer].is_state:
            return keys
        exponents = torch.arange(0, keys.shape[2], 2, device=keys.device).double() / keys.shape[2]
        angles = torch.tensor(turns, device=keys.device).double()[:, None] * self._theta**-exponents  # [n, D/2]
        left, right = keys.chunk(2, dim=-1)
        return torch.cat(
            [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], dim=-1
        )


def _announcing(steps: Steps) -> Steps:
    def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        if isinstance(cache, _TurnedKeys):
            cache.announce(flat.position_ids)
        return steps.forward(model, flat, cache, taps=taps)

    return replace(steps, forward=forward)


def _announcing_batch(steps: BatchSteps) -> BatchSteps:
    def forward(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
        for block, cache in zip(blocks, caches, strict=True):
            if isinstance(cache, _TurnedKeys):
                cache.announce(block.position_ids)
        return steps.forward(model, blocks, caches)

    return replace(steps, forward=forward)


class _TurnedKeysTarget(ReferenceTarget):
    cache_kinds = tuple(kind for kind in CACHES if kind not in QUANTISED)

    def __init__(self, home: Home) -> None:
        def rehoused(model: LanguageModel) -> Any:
            return Rehoused(model, lambda kind, inner: _TurnedKeys(kind, inner, home))

        super().__init__(_announcing, plant_batch=_announcing_batch, plant_model=rehoused)


CONTROLS = (
    Control(
        "index_positions",
        "a drafted key is cached turned to its index in the cache, and turned on when a commit moves it",
        "queries meet every key at the distance of the two tokens, and a committed row's index is its position",
        lambda: _TurnedKeysTarget(lambda row: row),
    ),
    Control(
        "keys_turned_when_read",
        "keys are cached without their rotation, which is applied whenever they are read",
        "a rotation is right wherever it is applied, and a gather need not touch what has none",
        lambda: _TurnedKeysTarget(lambda row: 0),
    ),
)
