"""Key/value caches of one sequence behind one interface: append, commit, truncate, rows, length.

Rows are positions in order. Storage differs by kind; what a reader gets does not. Paged, ring and quantised kinds will
register in `CACHES`. Nothing here knows trees: whoever commits names rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specbench.protocols import Cache


class AppendableCache(Cache, Protocol):
    """A cache that a written-out forward fills by itself; transformers fills its own."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: [Hkv, M, D] new rows. Returns all keys and values of the layer, each [Hkv, P+M, D]."""
        ...


class ContiguousCache:
    """Exactly the valid rows are stored; every append, commit and truncation copies. The obvious cache."""

    def __init__(self, *, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu"):
        empty = torch.empty(num_kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._keys = [empty] * num_layers
        self._values = [empty] * num_layers

    @property
    def length(self) -> int:
        return self._keys[-1].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in [*self._keys, *self._values])

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: [Hkv, M, D] new rows. Returns all keys and values of the layer, each [Hkv, P+M, D]."""
        self._keys[layer] = torch.cat([self._keys[layer], k], dim=1)
        self._values[layer] = torch.cat([self._values[layer], v], dim=1)
        return self._keys[layer], self._values[layer]

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        kept = kept_rows(self.length, prefix_len, rows)
        index = torch.tensor(kept, dtype=torch.int64, device=self._keys[0].device)
        self._keys = [keys[:, index] for keys in self._keys]
        self._values = [values[:, index] for values in self._values]

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer."""
        check_truncation(self.length, length)
        # Copies, so that dropped rows are freed and `nbytes` is what is held.
        self._keys = [keys[:, :length].clone() for keys in self._keys]
        self._values = [values[:, :length].clone() for values in self._values]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [Hkv, length, D]."""
        return self._keys[layer], self._values[layer]


class PreallocatedCache:
    """A fixed buffer with a length. Rows beyond the length hold garbage, as they do in real engines.

    The buffer is born full of large values and dead rows keep what was written there, so that a reader who looks past
    the length gets a wrong answer rather than a lucky zero.
    """

    GARBAGE = 1e4

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str = "cpu",
        capacity: int = 4096,
    ):
        shape = (num_layers, 2, num_kv_heads, capacity, head_dim)
        self._buffer = torch.full(shape, self.GARBAGE, dtype=dtype, device=device)
        self._lengths = [0] * num_layers

    @property
    def length(self) -> int:
        return self._lengths[-1]

    @property
    def nbytes(self) -> int:
        return self._buffer.numel() * self._buffer.element_size()

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k, v: [Hkv, M, D] new rows. Returns all keys and values of the layer, each [Hkv, P+M, D]."""
        start, end = self._lengths[layer], self._lengths[layer] + k.shape[1]
        if end > self._buffer.shape[3]:
            raise ValueError(
                f"cache rows {start}..{end - 1} exceed capacity {self._buffer.shape[3]}: give a larger `capacity`"
            )
        self._buffer[layer, 0, :, start:end] = k
        self._buffer[layer, 1, :, start:end] = v
        self._lengths[layer] = end
        return self.rows(layer)

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        kept = kept_rows(self.length, prefix_len, rows)
        index = torch.tensor(kept[prefix_len:], dtype=torch.int64, device=self._buffer.device)
        # index_select copies, so a source row is never overwritten before it is read.
        self._buffer[:, :, :, prefix_len : len(kept)] = self._buffer.index_select(3, index)
        self._lengths = [len(kept)] * len(self._lengths)

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer."""
        check_truncation(self.length, length)
        self._lengths = [length] * len(self._lengths)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [Hkv, length, D]."""
        length = self._lengths[layer]
        return self._buffer[layer, 0, :, :length], self._buffer[layer, 1, :, :length]


CACHES = {"contiguous": ContiguousCache, "preallocated": PreallocatedCache}


def kept_rows(length: int, prefix_len: int, rows: Sequence[int]) -> list[int]:
    """Absolute row numbers that a commit keeps, after checking that each exists."""
    if not 0 <= prefix_len <= length:
        raise ValueError(f"prefix_len = {prefix_len} must be between 0 and the cache length {length}")
    for idx, row in enumerate(rows):
        if not 0 <= row < length - prefix_len:
            raise ValueError(f"rows[{idx}] = {row} must be >= 0 and < {length - prefix_len} (rows behind the prefix)")
    return [*range(prefix_len), *(prefix_len + row for row in rows)]


def check_truncation(length: int, new_length: int) -> None:
    if not 0 <= new_length <= length:
        raise ValueError(f"length = {new_length} must be between 0 and the cache length {length}")
