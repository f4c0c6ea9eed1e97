"""Key/value caches of one sequence behind one interface, by name: append, commit, truncate, rows, fork, poison.

Rows are positions in order. Storage differs by kind (`reference/caches/`, one a file); what a reader gets does not,
but for quantised kinds, which return what their codes say. Nothing here knows trees: whoever commits names rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from specbench.reference.caches.cache import (
    AppendableCache,
    CacheSpec,
    LayerSpec,
    RowsLost,
    check_truncation,
    kept_rows,
)
from specbench.reference.caches.contiguous import ContiguousCache
from specbench.reference.caches.paged import PagedCache
from specbench.reference.caches.preallocated import PreallocatedCache
from specbench.reference.caches.quantised import Fp8Cache, Int8Cache
from specbench.reference.caches.ring import RingCache

__all__ = [
    "CACHES",
    "QUANTISED",
    "AppendableCache",
    "CacheSpec",
    "ContiguousCache",
    "Fp8Cache",
    "Int8Cache",
    "LayerSpec",
    "PagedCache",
    "PreallocatedCache",
    "RingCache",
    "RowsLost",
    "check_truncation",
    "kept_rows",
    "new_cache",
]

CACHES: dict[str, Callable[[CacheSpec], AppendableCache]] = {
    "contiguous": ContiguousCache,
    "preallocated": PreallocatedCache,
    "paged_1": partial(PagedCache, page_size=1),
    "paged_4": partial(PagedCache, page_size=4),
    "paged_16": partial(PagedCache, page_size=16),
    "ring": RingCache,
    "int8": Int8Cache,
    "fp8": Fp8Cache,
}
# Kinds whose rows are rounded: what is cached depends on the kind, so plain decoding and oracle have to ask.
QUANTISED = ("int8", "fp8")


def new_cache(kind: str, spec: CacheSpec) -> AppendableCache:
    """An empty cache; ValueError lists the kinds."""
    if kind not in CACHES:
        raise ValueError(f"cache kind {kind!r} is unknown: choose one of {', '.join(sorted(CACHES))}")
    return CACHES[kind](spec)
