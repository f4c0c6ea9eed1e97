"""Caches that never give back some of what they took. Nothing is computed wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from specbench.reference.caches.paged import PagedCache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget


class _NothingAccepted(PagedCache):
    """A commit of the root alone returns early, before the pages of the drafts are given back."""

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        if len(rows) > 1:
            super().commit(prefix_len, rows)
            return
        length = prefix_len + len(rows)
        del self._table[-(-length // self.page_size) :]
        self._lengths = [length] * len(self._lengths)


class _ReservedAhead(PagedCache):
    """Each forward reserves a page for what may come behind it, and the next one does so again."""

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == 0 and k.shape[1]:
            self._pool.allocate()
        return super().append(layer, k, v)


class _FinishedKept(PagedCache):
    """Pages are given back by cuts inside a text; the end of the text only forgets them."""

    def truncate(self, length: int) -> None:
        if length:
            super().truncate(length)
            return
        self._table.clear()
        self._lengths = [0] * len(self._lengths)


def _target(cache: type[PagedCache]) -> Callable[[], CacheTarget]:
    return lambda: CacheTarget("paged_1", partial(cache, page_size=1))


FAULTS = (
    Fault(
        "pages_kept_when_nothing_accepted",
        "memory",
        "pages of refused drafts are given back where a draft was accepted, and lost where none was",
        "a round that accepts nothing",
        "kv.pages",
        target=_target(_NothingAccepted),
        subtle="accept 0",
        kin="page_leak",
    ),
    Fault(
        "page_reserved_each_forward",
        "memory",
        "each forward reserves a page for the next one, and none of them is ever used or given back",
        "any forward",
        "kv.pages",
        target=_target(_ReservedAhead),
    ),
    Fault(
        "finished_text_kept",
        "memory",
        "the pages of a text are not given back when it ends",
        "a reset",
        "kv.pages",
        target=_target(_FinishedKept),
        subtle="a finished request",
        kin="page_leak",
    ),
)
