"""Exactly the valid rows are stored; every append, commit and truncation copies. The obvious cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.reference.caches.cache import CacheSpec, check_truncation, kept_rows, num_bytes


class ContiguousCache:
    """Keys and values of each layer, one tensor each."""

    page_size = None
    pages_in_use = None

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._keys = [self._empty(one.num_heads, one.key_dim) for one in spec.layers]
        self._values = [self._empty(one.num_heads, one.value_dim) for one in spec.layers]

    @property
    def length(self) -> int:
        return self._keys[-1].shape[1]

    @property
    def nbytes(self) -> int:
        return num_bytes([*self._keys, *self._values])

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes, over all layers."""
        return self.spec.row_nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H, M, Dk], v: [H, M, Dv] new rows. Returns all rows of the layer, [H, P+M, Dk or Dv]."""
        self._keys[layer] = torch.cat([self._keys[layer], k], dim=1)
        self._values[layer] = torch.cat([self._values[layer], v], dim=1)
        return self._keys[layer], self._values[layer]

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        kept = kept_rows(self.length, prefix_len, rows)
        index = torch.tensor(kept, dtype=torch.int64, device=self.spec.device)
        self._keys = [keys[:, index] for keys in self._keys]
        self._values = [values[:, index] for values in self._values]

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer."""
        check_truncation(self.length, length)
        # Copies, so that dropped rows are freed and `nbytes` is what is held.
        self._keys = [keys[:, :length].clone() for keys in self._keys]
        self._values = [values[:, :length].clone() for values in self._values]

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [H, length, Dk or Dv]."""
        return self._keys[layer], self._values[layer]

    def fork(self) -> ContiguousCache:
        """The same rows in a cache of its own. Tensors may be shared: none is ever written to."""
        twin = ContiguousCache(self.spec)
        twin._keys, twin._values = list(self._keys), list(self._values)
        return twin

    def poison(self, value: float) -> None:
        """Nothing is stored that is not a row."""

    def _empty(self, num_heads: int, dim: int) -> Tensor:
        return torch.empty(num_heads, 0, dim, dtype=self.spec.dtype, device=self.spec.device)
