"""Sliding windows: a layer that sees W positions keeps its last rows in a ring, layers without a window keep all.

A row's slot comes from its number in the cache, never from its position: siblings share a position and must not share a
slot. What has left the ring cannot be cut back to; `RowsLost` says so and the session encodes the text again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.reference.caches.cache import (
    GARBAGE,
    CacheSpec,
    LayerSpec,
    RowsLost,
    check_truncation,
    kept_rows,
    num_bytes,
)

ROOM = 4  # slots beyond the window that a layer keeps at least, for short blocks


class Ring:
    """Rows first..length-1 of one layer, row r in slot r mod size. Every size fits the window and the block."""

    def __init__(self, layer: LayerSpec, spec: CacheSpec) -> None:
        self.layer = layer
        self.first = 0
        self.length = 0
        self._spec = spec
        self.keys = self._garbage(0, layer.key_dim)
        self.values = self._garbage(0, layer.value_dim)

    @property
    def size(self) -> int:
        return self.keys.shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        """New rows take the slots of the oldest, which are given up, but none that the new rows may read."""
        num_new = k.shape[1]
        self._resize(self.layer.num_needed(self.length) + max(num_new, ROOM), num_new)
        slots = self.slots(range(self.length, self.length + num_new))
        self.keys[:, slots], self.values[:, slots] = k, v
        self.length += num_new
        self.first = max(self.first, self.length - self.size)

    def check_cut(self, length: int, num_behind: int = 0) -> None:
        """RowsLost unless what the next row reads can be `length` first rows and `num_behind` rows still here."""
        needed = self.layer.num_needed(length + num_behind)
        oldest = min(length, length + num_behind - needed)
        if self.first > oldest and (oldest < length or num_behind):
            raise RowsLost(
                f"rows {oldest}..{self.first - 1} have left the ring of a layer with window {self.layer.window}: "
                "encode the committed tokens again"
            )

    def move(self, sources: Sequence[int], destination: int) -> None:
        """Rows `sources` become the rows from `destination` on, and the last ones."""
        read = self.slots(sources)
        keys, values = self.keys[:, read], self.values[:, read]  # copies: sources and destinations overlap
        slots = self.slots(range(destination, destination + len(sources)))
        self.keys[:, slots], self.values[:, slots] = keys, values
        self.cut(destination + len(sources))

    def cut(self, length: int) -> None:
        self.length = length
        self.first = min(self.first, length)

    def rows(self) -> tuple[Tensor, Tensor]:
        """Keys and values held, oldest first: each [H, length - first, Dk or Dv]."""
        slots = self.slots(range(self.first, self.length))
        return self.keys[:, slots], self.values[:, slots]

    def poison(self, value: float) -> None:
        live = self.slots(range(self.first, self.length))
        dead = torch.ones(self.size, dtype=torch.bool, device=self._spec.device)
        dead[live] = False
        self.keys[:, dead], self.values[:, dead] = value, value

    def clone(self) -> Ring:
        twin = copy.copy(self)
        twin.keys, twin.values = self.keys.clone(), self.values.clone()
        return twin

    def slots(self, rows: Sequence[int]) -> Tensor:
        """int64 [len(rows)]: where rows lie."""
        index = torch.tensor(list(rows), dtype=torch.int64, device=self._spec.device)
        return index % max(self.size, 1)

    def _resize(self, size: int, num_new: int) -> None:
        """To `size` slots, the oldest rows given up where they are too few for `num_new` rows more."""
        if size == self.size:
            return
        self.first = max(self.first, self.length + num_new - size)
        keys, values = self.rows()
        self.keys, self.values = self._garbage(size, self.layer.key_dim), self._garbage(size, self.layer.value_dim)
        slots = self.slots(range(self.first, self.length))
        self.keys[:, slots], self.values[:, slots] = keys, values

    def _garbage(self, size: int, dim: int) -> Tensor:
        shape = (self.layer.num_heads, size, dim)
        return torch.full(shape, GARBAGE, dtype=self._spec.dtype, device=self._spec.device)


class RingCache:
    """One ring a layer; `rows` returns the last rows that the ring still holds."""

    page_size = None
    pages_in_use = None

    def __init__(self, spec: CacheSpec) -> None:
        self.spec = spec
        self._rings = [Ring(layer, spec) for layer in spec.layers]

    @property
    def length(self) -> int:
        return self._rings[-1].length

    @property
    def nbytes(self) -> int:
        return num_bytes([one for ring in self._rings for one in (ring.keys, ring.values)])

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes, over all layers."""
        return self.spec.row_nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H, M, Dk], v: [H, M, Dv] new rows. Returns the rows held, the new ones last."""
        self._rings[layer].append(k, v)
        return self._rings[layer].rows()

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        kept = kept_rows(self.length, prefix_len, rows)
        for ring in self._rings:
            ring.check_cut(prefix_len, len(rows))
        for ring in self._rings:
            ring.move(kept[prefix_len:], prefix_len)

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows. ValueError when there are fewer, RowsLost when the ring let them go."""
        check_truncation(self.length, length)
        for ring in self._rings:
            ring.check_cut(length)
        for ring in self._rings:
            ring.cut(length)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each [H, n, Dk or Dv]: the last n rows, at least what the window needs."""
        return self._rings[layer].rows()

    def fork(self) -> RingCache:
        """The same rows in rings of its own."""
        twin = copy.copy(self)
        twin._rings = [ring.clone() for ring in self._rings]
        return twin

    def poison(self, value: float) -> None:
        """Overwrites every slot that holds no row with `value`."""
        for ring in self._rings:
            ring.poison(value)
