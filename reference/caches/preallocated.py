"""Fixed buffers with a length. Rows beyond the length hold garbage, as they do in real engines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from specbench.reference.caches.cache import (
    GARBAGE,
    CacheSpec,
    LayerSpec,
    check_truncation,
    kept_rows,
    num_bytes,
)

Kind = TypeVar("Kind", bound="PreallocatedCache")


class PreallocatedCache:
    """Each layer is a tuple of buffers [H, capacity, width], the parts of which a row is made: its key and its value.

    A subclass may store a row in other parts (codes and scales); whatever the parts are, they move together.
    """

    page_size = None
    pages_in_use = None

    def __init__(self, spec: CacheSpec, *, capacity: int = 4096) -> None:
        self.spec = spec
        self.capacity = capacity
        self._parts = [self._new_parts(layer) for layer in spec.layers]
        self._lengths = [0] * len(spec.layers)
        self.poison(GARBAGE)

    @property
    def length(self) -> int:
        return self._lengths[-1]

    @property
    def nbytes(self) -> int:
        return num_bytes([part for parts in self._parts for part in parts])

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes, over all layers."""
        return self.nbytes // self.capacity

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H, M, Dk], v: [H, M, Dv] new rows. Returns all rows of the layer, [H, P+M, Dk or Dv]."""
        start, end = self._lengths[layer], self._lengths[layer] + k.shape[1]
        if end > self.capacity:
            raise ValueError(f"cache rows {start}..{end - 1} exceed capacity {self.capacity}: give a larger `capacity`")
        for buffer, part in zip(self._parts[layer], self._encode(layer, k, v), strict=True):
            buffer[:, start:end] = part
        self._lengths[layer] = end
        return self.rows(layer)

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        kept = kept_rows(self.length, prefix_len, rows)
        index = torch.tensor(kept[prefix_len:], dtype=torch.int64, device=self.spec.device)
        for buffer in (part for parts in self._parts for part in parts):
            # index_select copies, so a source row is never overwritten before it is read.
            buffer[:, prefix_len : len(kept)] = buffer.index_select(1, index)
        self._lengths = [len(kept)] * len(self._lengths)

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer."""
        check_truncation(self.length, length)
        self._lengths = [length] * len(self._lengths)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [H, length, Dk or Dv]: views where the parts are keys and values."""
        return self._decode(layer, tuple(part[:, : self._lengths[layer]] for part in self._parts[layer]))

    def in_place(self, prefix_len: int, num_rows: int) -> tuple[list[Tensor], Tensor | None]:
        """For who moves rows itself: the parts of all layers, each [1, capacity, H, width], and no page table."""
        return [part.transpose(0, 1)[None] for parts in self._parts for part in parts], None

    def fork(self: Kind) -> Kind:
        """The same rows in buffers of its own."""
        twin = copy.copy(self)
        twin._parts = [tuple(part.clone() for part in parts) for parts in self._parts]
        twin._lengths = list(self._lengths)
        return twin

    def poison(self, value: float) -> None:
        """Overwrites every row beyond the length with `value`."""
        for parts, length in zip(self._parts, self._lengths, strict=True):
            for part in parts:
                part[:, length:] = value

    def _new_parts(self, layer: LayerSpec) -> tuple[Tensor, ...]:
        return self._buffer(layer, layer.key_dim), self._buffer(layer, layer.value_dim)

    def _buffer(self, layer: LayerSpec, width: int, dtype: torch.dtype | None = None) -> Tensor:
        shape = (layer.num_heads, self.capacity, width)
        return torch.empty(shape, dtype=dtype or self.spec.dtype, device=self.spec.device)

    def _encode(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Rows taken apart, in the order of `_new_parts`."""
        return k, v

    def _decode(self, layer: int, parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values from the parts of some rows."""
        keys, values = parts
        return keys, values
