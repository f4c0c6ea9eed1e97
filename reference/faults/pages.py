"""Page tables that lose count: of slots, of what a fork shares, of pages given back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from specbench.reference.caches.cache import CacheSpec
from specbench.reference.caches.paged import PagedCache, PagePool
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


class _FirstRowOfAPage(PagedCache):
    """The page of a row is looked up by the rows before it: the first row of a page is put at the start of the last."""

    def _slots(self, rows: Sequence[int]) -> Tensor:
        size = self.page_size
        slots = [self._table[max(row - 1, 0) // size] * size + row % size for row in rows]
        return torch.tensor(slots, dtype=torch.int64)


class _PageNumberIsSlot(PagedCache):
    """A page's number is taken for the slot of its first row."""

    def _slots(self, rows: Sequence[int]) -> Tensor:
        slots = [self._table[row // self.page_size] + row % self.page_size for row in rows]
        return torch.tensor(slots, dtype=torch.int64)


class _ShiftOfZero(PagedCache):
    """Rows are mapped by a shift, 1 << shift rows a page, and a shift of 0 means that none was given: then it is 2."""

    def _slots(self, rows: Sequence[int]) -> Tensor:
        shift = (self.page_size.bit_length() - 1) or 2
        slots = [self._table[row >> shift] * self.page_size + row % self.page_size for row in rows]
        return torch.tensor(slots, dtype=torch.int64)


class _EmptyPageHeld(PagedCache):
    """As many pages stay as there are whole ones and one more, which is empty when a cut ends with a page."""

    def _drop_behind(self, length: int) -> None:
        num_pages = length // self.page_size + 1 if length else 0
        for page in self._table[num_pages:]:
            self._pool.release(page)
        del self._table[num_pages:]
        self._lengths = [length] * len(self._lengths)


class _PartialPageFreed(PagedCache):
    """A page that a cut leaves half full is given back, and read on."""

    def _drop_behind(self, length: int) -> None:
        super()._drop_behind(length)
        if length % self.page_size and self._pool.references[self._table[-1]]:
            self._pool.release(self._table[-1])

    def _own_pages(self, start: int, end: int) -> None:
        pass


class _TableShared(PagedCache):
    """A fork is given the very table, so that a page more in the one is a page more in the other."""

    def fork(self) -> PagedCache:
        twin = super().fork()
        twin._table = self._table
        return twin


class _WholePagesOnly(PagedCache):
    """A fork takes whole pages over; for the half-filled one behind them it gets an empty one."""

    def fork(self) -> PagedCache:
        twin = super().fork()
        if self.length % self.page_size:
            self._pool.release(twin._table[-1])
            twin._table[-1] = self._pool.allocate()
        return twin


class _KeysCopied(PagePool):
    """The copy of a page holds its keys, and of its values what was there."""

    def copy(self, page: int) -> int:
        twin = self.allocate()
        for pool in self.keys:
            pool[:, self.slots(twin)] = pool[:, self.slots(page)]
        return twin


class _TwoHoldersAtMost(PagePool):
    """A shared page is marked as held by two, however many share it."""

    def share(self, page: int) -> None:
        self.references[page] = 2

    def release(self, page: int) -> None:
        if self.references[page]:
            super().release(page)


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


def _pooled(pool: type[PagePool]) -> type[PagedCache]:
    """A cache over pages of another pool."""

    class Pooled(PagedCache):
        def __init__(self, spec: CacheSpec, *, page_size: int = 16) -> None:
            super().__init__(spec, page_size=page_size)
            self._pool = pool(spec, page_size=page_size)

    return Pooled


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
        origin="RBLN-SW/vllm-rbln#326",
        subtle="a page boundary",
    ),
    Fault(
        "freed_page_kept",
        "kv-slot/page-mapping",
        "a page that was given back stays in the page table, and the next rows are written to it",
        "a cut across the end of a page, then rows behind it",
        "kv.pages",
        target=lambda: _target(_FreedPageKept),
        origin="vllm-project/vllm#56734",
        subtle="a cut across a page boundary, then rows behind it",
    ),
    Fault(
        "no_copy_on_write",
        "kv-slot/page-mapping",
        "a sequence writes to the half-filled page that it shares with its fork",
        "two sequences with one prefix that both go on",
        "kv.fork",
        target=lambda: _target(_NoCopyOnWrite, page_size=16),  # room for rounds that differ
        origin="Avarok-Cybersecurity/atlas#1193",
        subtle="a fork inside a page",
    ),
    Fault(
        "page_leak",
        "memory",
        "pages of rejected rows are never given back",
        "a rejection across the end of a page",
        "kv.pages",
        target=lambda: _target(_Leak),
        origin="sgl-project/sglang-jax#1147",
        subtle="a page boundary",
        kin="page_leak",
    ),
    Fault(
        "first_row_of_a_page",
        "kv-slot/page-mapping",
        "the first row of every page but the first is put into the page before",
        "a row at the start of a second page",
        "kv.commit",
        target=lambda: _target(_FirstRowOfAPage),
        subtle="a page boundary",
    ),
    Fault(
        "page_number_is_slot",
        "kv-slot/page-mapping",
        "the number of a page is used as the number of a slot: pages overlap",
        "pages of more than one row, two of them held",
        "kv.commit",
        target=lambda: CacheTarget("paged_4", partial(_PageNumberIsSlot, page_size=2)),  # so that small cases show it
        origin="vllm-project/vllm#40172",
        subtle="a page size other than 1",
    ),
    Fault(
        "shift_of_zero",
        "kv-slot/page-mapping",
        "the page of a row is found by a shift, and the shift of pages of one row counts as none given",
        "pages of one row",
        "kv.commit",
        target=lambda: _target(_ShiftOfZero, page_size=1),
        subtle="page size 1",
    ),
    Fault(
        "empty_page_held",
        "memory",
        "a cut keeps one page more than whole ones, also when it ends with a page",
        "a cut whose length is a whole number of pages; the output stays right",
        "kv.pages",
        target=lambda: CacheTarget("paged_4", partial(_EmptyPageHeld, page_size=2)),
        subtle="a cut to a page boundary",
    ),
    Fault(
        "partial_page_freed",
        "kv-slot/page-mapping",
        "a cut gives the half-filled last page back too, and goes on reading it",
        "a cut that ends inside a page",
        "kv.pages",
        target=lambda: _target(_PartialPageFreed),
        subtle="a cut that ends inside a page",
    ),
    Fault(
        "fork_shares_the_table",
        "kv-slot/page-mapping",
        "a fork is given the page table itself instead of a copy",
        "a fork and a page more in either",
        "kv.fork",
        target=lambda: _target(_TableShared),
        subtle="a fork, then rows in a new page",
    ),
    Fault(
        "fork_takes_whole_pages",
        "kv-slot/page-mapping",
        "a fork takes over whole pages and loses the rows of the half-filled one",
        "a fork inside a page",
        "kv.fork",
        target=lambda: _target(_WholePagesOnly),
        subtle="a fork inside a page",
    ),
    Fault(
        "copy_without_values",
        "kv-slot/page-mapping",
        "copy on write copies the keys of a page and forgets its values",
        "a fork inside a page that is written to",
        "kv.fork",
        target=lambda: _target(_pooled(_KeysCopied)),
        subtle="a fork inside a page, values only",
    ),
    Fault(
        "two_holders_at_most",
        "kv-slot/page-mapping",
        "a second fork does not raise the count of a page's holders",
        "two forks of one sequence, inside a page",
        "kv.fork",
        target=lambda: _target(_pooled(_TwoHoldersAtMost)),
        subtle="a second fork",
    ),
)
