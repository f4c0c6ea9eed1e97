"""Rows in pages of a pool: a page table per sequence, reference counts, copy on write for pages that forks share.

The allocator hands pages out in a shuffled (seeded) order, so that a row's neighbour is never its next slot by luck.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.reference.caches.cache import GARBAGE, CacheSpec, check_truncation, kept_rows, num_bytes


class PagePool:
    """Storage for pages of `page_size` rows over all layers. Grows when it runs out.

    keys, values: per layer [H, num_pages * page_size, Dk or Dv]. references[page] counts the tables that name it.
    """

    def __init__(self, spec: CacheSpec, *, page_size: int, num_pages: int = 8, seed: int = 0) -> None:
        if page_size < 1:
            raise ValueError(f"page_size = {page_size} must be >= 1")
        self.spec = spec
        self.page_size = page_size
        self.references: list[int] = []
        self.keys = [self._garbage(one.num_heads, 0, one.key_dim) for one in spec.layers]
        self.values = [self._garbage(one.num_heads, 0, one.value_dim) for one in spec.layers]
        self._free: list[int] = []
        self._order = torch.Generator().manual_seed(seed)
        self._grow(num_pages)

    @property
    def pages_in_use(self) -> int:
        return sum(count > 0 for count in self.references)

    @property
    def nbytes(self) -> int:
        return num_bytes([*self.keys, *self.values])

    def allocate(self) -> int:
        """A page that nobody holds, with a reference count of one."""
        if not self._free:
            self._grow(len(self.references))
        page = self._free.pop()
        self.references[page] = 1
        return page

    def share(self, page: int) -> None:
        self.references[page] += 1

    def release(self, page: int) -> None:
        """One holder less; a page that nobody holds goes back, to any place in the order."""
        if self.references[page] < 1:
            raise ValueError(f"page {page} is free and cannot be released again")
        self.references[page] -= 1
        if not self.references[page]:
            place = int(torch.randint(len(self._free) + 1, (1,), generator=self._order))
            self._free.insert(place, page)

    def copy(self, page: int) -> int:
        """A new page with the same rows."""
        twin = self.allocate()
        for pool in (*self.keys, *self.values):
            pool[:, self.slots(twin)] = pool[:, self.slots(page)]
        return twin

    def slots(self, page: int) -> slice:
        return slice(page * self.page_size, (page + 1) * self.page_size)

    def poison_free_pages(self, value: float) -> None:
        for page, count in enumerate(self.references):
            if not count:
                for pool in (*self.keys, *self.values):
                    pool[:, self.slots(page)] = value

    def _grow(self, num_pages: int) -> None:
        """`num_pages` free pages more, in shuffled order."""
        new = len(self.references) + torch.randperm(num_pages, generator=self._order)
        self._free += new.tolist()
        self.references += [0] * num_pages
        num_rows = num_pages * self.page_size
        for pools in (self.keys, self.values):
            for layer, pool in enumerate(pools):
                pools[layer] = torch.cat([pool, self._garbage(pool.shape[0], num_rows, pool.shape[2])], dim=1)

    def _garbage(self, num_heads: int, num_rows: int, dim: int) -> Tensor:
        return torch.full((num_heads, num_rows, dim), GARBAGE, dtype=self.spec.dtype, device=self.spec.device)


class PagedCache:
    """One sequence's page table over a pool that its forks share. Row r lies in page table[r // page_size]."""

    def __init__(self, spec: CacheSpec, *, page_size: int = 16) -> None:
        self.spec = spec
        self._pool = PagePool(spec, page_size=page_size)
        self._table: list[int] = []
        self._lengths = [0] * len(spec.layers)

    @property
    def length(self) -> int:
        return self._lengths[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, forks included."""
        return self._pool.nbytes

    @property
    def page_size(self) -> int:
        return self._pool.page_size

    @property
    def pages_in_use(self) -> int:
        """Pages held by this sequence and those that share its pool; a shared page counts once."""
        return self._pool.pages_in_use

    @property
    def row_nbytes(self) -> int:
        """Bytes that one row takes, over all layers."""
        return self.spec.row_nbytes

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """k: [H, M, Dk], v: [H, M, Dv] new rows. Returns all rows of the layer, [H, P+M, Dk or Dv]."""
        start, end = self._lengths[layer], self._lengths[layer] + k.shape[1]
        self._hold_pages(end)
        self._own_pages(start, end)
        slots = self._slots(range(start, end))
        self._pool.keys[layer][:, slots] = k
        self._pool.values[layer][:, slots] = v
        self._lengths[layer] = end
        return self.rows(layer)

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        """Keep the first `prefix_len` rows and then rows `prefix_len + r`, in the order of `rows`; drop the rest."""
        kept = kept_rows(self.length, prefix_len, rows)
        moved = [row for row in range(prefix_len, len(kept)) if kept[row] != row]
        sources = self._slots([kept[row] for row in moved])
        # Read before a page is replaced or written: sources and destinations overlap.
        rows_read = [pool[:, sources] for pool in (*self._pool.keys, *self._pool.values)]
        for row in moved:
            self._own_pages(row, row + 1)
        destinations = self._slots(moved)
        for pool, read in zip((*self._pool.keys, *self._pool.values), rows_read, strict=True):
            pool[:, destinations] = read
        self._drop_behind(len(kept))

    def truncate(self, length: int) -> None:
        """Keep the first `length` rows; pages without a row go back. ValueError when there are fewer."""
        check_truncation(self.length, length)
        self._drop_behind(length)

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, gathered through the table: each [H, length, Dk or Dv]."""
        slots = self._slots(range(self._lengths[layer]))
        return self._pool.keys[layer][:, slots], self._pool.values[layer][:, slots]

    def in_place(self, prefix_len: int, num_rows: int) -> tuple[list[Tensor], Tensor | None]:
        """For who moves rows itself, among rows prefix_len to prefix_len + num_rows - 1, whose pages are this cache's
        own from here on: keys and values of all layers, each [num_pages, T, H, D], and the page table int32 [1, n]."""
        self._own_pages(prefix_len, prefix_len + num_rows)
        pools = (*self._pool.keys, *self._pool.values)
        pages = [pool.unflatten(1, (-1, self.page_size)).permute(1, 2, 0, 3) for pool in pools]
        return pages, torch.tensor([self._table], dtype=torch.int32, device=self.spec.device)

    def fork(self) -> PagedCache:
        """The same rows in a sequence of its own. Pages are shared until one of both writes to them."""
        twin = PagedCache.__new__(type(self))
        twin.spec, twin._pool = self.spec, self._pool
        twin._table, twin._lengths = list(self._table), list(self._lengths)
        for page in twin._table:
            self._pool.share(page)
        return twin

    def poison(self, value: float) -> None:
        """Overwrites free pages and the tail of an own last page. A shared page may hold rows of another's."""
        self._pool.poison_free_pages(value)
        num_rows = len(self._table) * self.page_size
        dead = [
            row
            for row in range(self.length, num_rows)
            if self._pool.references[self._table[row // self.page_size]] == 1
        ]
        slots = self._slots(dead)
        for pool in (*self._pool.keys, *self._pool.values):
            pool[:, slots] = value

    def _hold_pages(self, num_rows: int) -> None:
        """Pages for `num_rows` rows in the table."""
        while len(self._table) * self.page_size < num_rows:
            self._table.append(self._pool.allocate())

    def _own_pages(self, start: int, end: int) -> None:
        """Copy on write: rows start..end-1 are about to be written."""
        for idx in sorted({row // self.page_size for row in range(start, end)}):
            page = self._table[idx]
            if self._pool.references[page] > 1:
                self._table[idx] = self._pool.copy(page)
                self._pool.release(page)

    def _drop_behind(self, length: int) -> None:
        num_pages = -(-length // self.page_size)
        for page in self._table[num_pages:]:
            self._pool.release(page)
        del self._table[num_pages:]
        self._lengths = [length] * len(self._lengths)

    def _slots(self, rows: Sequence[int]) -> Tensor:
        """int64 [len(rows)]: where rows lie in the pool."""
        slots = [self._table[row // self.page_size] * self.page_size + row % self.page_size for row in rows]
        return torch.tensor(slots, dtype=torch.int64, device=self.spec.device)
