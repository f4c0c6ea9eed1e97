"""Other rows in place of those that a commit kept, in any cache of ours: faults say what, not how a kind stores it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specbench.protocols import Cache
from specbench.reference.kv_cache import CacheSpec


def spec_of(cache: Cache) -> CacheSpec:
    """ValueError for a cache that is not one of ours."""
    spec = getattr(cache, "spec", None)
    if not isinstance(spec, CacheSpec):
        raise ValueError("this fault can be planted in the caches of reference.kv_cache only")
    return spec


def rows_behind(cache: Cache, prefix_len: int) -> list[tuple[Tensor, Tensor]]:
    """Copies of each layer's keys and values behind the first `prefix_len` rows."""
    num_rows = cache.length - prefix_len
    layers = []
    for layer in range(len(spec_of(cache).layers)):
        keys, values = cache.rows(layer)
        first = keys.shape[1] - num_rows  # a sliding cache shows its last rows only
        layers.append((keys[:, first:].clone(), values[:, first:].clone()))
    return layers


def rewrite(cache: Cache, prefix_len: int, layers: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Keep the first `prefix_len` rows and put `layers` behind them."""
    cache.truncate(prefix_len)
    for layer, (k, v) in enumerate(layers):
        cache.append(layer, k, v)  # type: ignore[attr-defined]
