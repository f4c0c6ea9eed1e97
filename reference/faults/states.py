"""Decoders that leave something behind when a sequence is cut, forked, fed in pieces or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from specbench.protocols import Drafter, LanguageModel
from specbench.reference.caches.preallocated import PreallocatedCache
from specbench.reference.decoder import Decoder
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget
from specbench.reference.layouts import LAYOUTS, flatten_causal
from specbench.reference.steps import STEPS
from specbench.reference.target import ReferenceTarget


class _AbortForgetsOnly(Decoder):
    """The dropped round is no longer pending, its rows stay in the cache."""

    def abort(self) -> None:
        self._pending = None


class _ChunksFromZero(Decoder):
    """Every piece of a prompt is encoded as if it were the first."""

    def extend(self, tokens: Sequence[int]) -> None:
        self.abort()
        if tokens:
            self.steps.forward(self.model, flatten_causal(list(tokens), 0), self._cache)
            self._tokens += tokens


class _ForkShares(Decoder):
    """A fork is given the cache itself instead of one with the same rows."""

    def fork(self) -> _ForkShares:
        twin = super().fork()
        twin._cache = self._cache
        return twin


class _ResetKeepsRows(Decoder):
    """The text is forgotten, the cache is not."""

    def reset(self) -> None:
        self._pending, self._tokens = None, []


class _TimesZero(PreallocatedCache):
    """The first row beyond the length takes part in every read, times zero."""

    def rows(self, layer: int) -> tuple[Tensor, Tensor]:
        keys, values = super().rows(layer)
        beyond = self._parts[layer][1][:, self._lengths[layer]]  # [H, Dv]
        return keys, values + 0.0 * beyond[:, None]


class _DecoderTarget(ReferenceTarget):
    """The reference target with another decoder."""

    def __init__(self, decoder: type[Decoder]) -> None:
        super().__init__()
        self._decoder = decoder

    def build(  # type: ignore[override]
        self, model: LanguageModel, drafter: Drafter | None, *, cache: str = "contiguous", layout: str = "tree_mask"
    ) -> Decoder:
        """A fresh decoder over in-process objects."""
        return self._decoder(model, drafter, steps=replace(STEPS, flatten=LAYOUTS[layout]), cache=cache)


FAULTS = (
    Fault(
        "abort_forgets_only",
        "kv-stale-after-reject",
        "an aborted round leaves its rows in the cache",
        "a forward that is dropped before its commit",
        "kv.abort",
        target=lambda: _DecoderTarget(_AbortForgetsOnly),
    ),
    Fault(
        "chunks_from_zero",
        "position-ids",
        "positions of a prompt's later pieces start from zero again",
        "a second piece, or a kept prefix",
        "kv.chunked",
        target=lambda: _DecoderTarget(_ChunksFromZero),
    ),
    Fault(
        "fork_shares_the_cache",
        "kv-slot/page-mapping",
        "two sequences behind one prefix write to one cache",
        "a fork and a round in either",
        "kv.fork",
        target=lambda: _DecoderTarget(_ForkShares),
    ),
    Fault(
        "reset_keeps_rows",
        "kv-not-rolled-back",
        "a reset forgets the text and leaves its rows in the cache",
        "a reset behind at least one committed row",
        "kv.pages",
        target=lambda: _DecoderTarget(_ResetKeepsRows),
    ),
    Fault(
        "dead_row_times_zero",
        "mask-prefix/padding",
        "a row beyond the length is read and multiplied by zero, though dead rows are declared never to be read",
        "NaN in a dead row",
        "kv.dead_rows",
        target=lambda: CacheTarget("preallocated", _TimesZero),
    ),
)
