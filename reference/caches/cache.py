"""What every cache kind is made from, can do and refuses. No storage here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specbench.protocols import Cache

# Unused storage is born full of this: a reader who looks past the length gets a wrong answer, not a lucky zero.
GARBAGE = 1e4


@dataclass(frozen=True)
class LayerSpec:
    """The rows of one layer: keys [num_heads, rows, key_dim], values [num_heads, rows, value_dim].

    window: how many rows the layer reads, the newest included; None for all. is_state: rows are snapshots of a
    recurrent state, kept in full precision by every kind.
    """

    num_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    is_state: bool = False

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window = {self.window} must be >= 1 (a row sees itself), or None for all rows")

    def num_needed(self, length: int) -> int:
        """How many of the last rows the next row may read when `length` rows are cached."""
        return length if self.window is None else min(length, self.window - 1)


@dataclass(frozen=True)
class CacheSpec:
    """What a model asks of its cache. Layers may differ."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row over all layers, stored as it is."""
        return sum(one.num_heads * (one.key_dim + one.value_dim) for one in self.layers) * self.dtype.itemsize

    @classmethod
    def uniform(
        cls, *, num_layers: int, num_heads: int, head_dim: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
    ) -> CacheSpec:
        """Equal layers that read all rows."""
        return cls((LayerSpec(num_heads, head_dim, head_dim),) * num_layers, dtype, device)


class RowsLost(ValueError):
    """A cut needs rows that a sliding cache has let go. Nothing has changed; the committed tokens restore them."""


class AppendableCache(Cache, Protocol):
    """A cache that a written-out forward fills by itself; transformers fills its own."""

    spec: CacheSpec

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes, over all layers."""
        ...

    @property
    def page_size(self) -> int | None:
        """Rows a page, None for a kind without pages."""
        ...

    @property
    def pages_in_use(self) -> int | None:
        """Pages held by this sequence and those forked from it, a shared one counted once; None without pages."""
        ...

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H, M, Dk], v: [H, M, Dv], new rows behind the others.

        Returns what the layer may read, new rows last: [H, K + M, Dk or Dv], where K is all earlier rows, or for a
        layer with a window at least as many of the last ones as the window needs.
        """
        ...

    def fork(self) -> AppendableCache:
        """The same rows in a cache of its own."""
        ...

    def poison(self, value: float) -> None:
        """Overwrites all storage that holds no row with `value`."""
        ...


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


def num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors)
