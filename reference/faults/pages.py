"""Page tables that lose count: of slots, of what a fork shares, of pages given back."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from specbench.reference.caches.paged import PagedCache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget


class _NextSlot(PagedCache):
    """New rows go to the slots behind the first one, as if pages followed one another in the pool."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        start, end = self._lengths[layer], self._lengths[layer] + k.shape[1]
        if end > start:
            self._hold_pages(end)
            self._own_pages(start, end)
            pool = self._pool.keys[layer], self._pool.values[layer]
            slots = (int(self._slots([start])) + torch.arange(end - start)) % pool[0].shape[1]
            pool[0][:, slots], pool[1][:, slots] = k, v
            self._lengths[layer] = end
        return self.rows(layer)


class _FreedPageKept(PagedCache):
    """A cut gives pages back and leaves them in the table, where the next rows are written."""

    def _drop_behind(self, length: int) -> None:
        num_pages = -(-length // self.page_size)
        for page in self._table[num_pages:]:
            if self._pool.references[page]:
                self._pool.release(page)
        self._lengths = [length] * len(self._lengths)


class _NoCopyOnWrite(PagedCache):
    """Shared pages are written to as if they were owned."""

    def _own_pages(self, start: int, end: int) -> None:
        pass


class _Leak(PagedCache):
    """Pages behind a cut leave the table and are never given back."""

    def _drop_behind(self, length: int) -> None:
        del self._table[-(-length // self.page_size) :]
        self._lengths = [length] * len(self._lengths)


def _target(cache: type[PagedCache], *, page_size: int = 4) -> CacheTarget:
    return CacheTarget(f"paged_{page_size}", partial(cache, page_size=page_size))


FAULTS = (
    Fault(
        "next_slot",
        "kv-slot/page-mapping",
        "the slots of new rows are counted on from the first one instead of looked up in the page table",
        "a block that crosses the end of a page",
        "kv.commit",
        target=lambda: _target(_NextSlot),
    ),
    Fault(
        "freed_page_kept",
        "kv-slot/page-mapping",
        "a page that was given back stays in the page table, and the next rows are written to it",
        "a cut across the end of a page, then rows behind it",
        "kv.pages",
        target=lambda: _target(_FreedPageKept),
    ),
    Fault(
        "no_copy_on_write",
        "kv-slot/page-mapping",
        "a sequence writes to the half-filled page that it shares with its fork",
        "two sequences with one prefix that both go on",
        "kv.fork",
        target=lambda: _target(_NoCopyOnWrite, page_size=16),  # room for rounds that differ
    ),
    Fault(
        "page_leak",
        "kv-slot/page-mapping",
        "pages of rejected rows are never given back",
        "a rejection across the end of a page",
        "kv.pages",
        target=lambda: _target(_Leak),
    ),
)
