"""Caches that keep the wrong rows between rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specbench.protocols import Cache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.rewrite import rewrite, rows_behind
from specbench.steps import CommitStep, Steps


def _with_commit(commit: CommitStep) -> Callable[[Steps], Steps]:
    return lambda steps: replace(steps, commit=commit)


def _no_rollback(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """Nothing is dropped: rejected rows stay where the forward left them."""


def _first_rows(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    cache.commit(prefix_len, range(len(rows)))


def _keys_only(cache: Cache, prefix_len: int, rows: Sequence[int]) -> None:
    """Keys are gathered, values stay the first rows."""
    layers = rows_behind(cache, prefix_len)
    cache.commit(prefix_len, rows)
    rewrite(cache, prefix_len, [(k[:, list(rows)], v[:, : len(rows)]) for k, v in layers])


FAULTS = (
    Fault(
        "no_rollback",
        "kv-not-rolled-back",
        "rejected rows stay in the cache",
        "a rejected draft",
        "kv.commit",
        _with_commit(_no_rollback),
    ),
    Fault(
        "first_rows",
        "kv-wrong-path-compacted",
        "the first rows of the block are kept, as many as were accepted, whichever path it was",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _with_commit(_first_rows),
    ),
    Fault(
        "values_not_moved",
        "kv-wrong-path-compacted",
        "keys of the accepted path are gathered, values are not",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        _with_commit(_keys_only),
    ),
)
