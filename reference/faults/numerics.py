"""Numbers that are kept, added or scaled in another way than the model says: nothing is at a wrong place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.caches.cache import kept_rows
from specbench.reference.caches.contiguous import ContiguousCache
from specbench.reference.caches.quantised import Int8Cache
from specbench.reference.faults.fault import Fault
from specbench.reference.faults.housing import CacheTarget
from specbench.reference.model import LlamaModel
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree
from specbench.types import Taps

PART = 8
EPS_OF_OTHERS = 1e-6


class _HalfWeights(LlamaModel):
    """The last layer's attention weights pass through half precision."""

    def _attention_weights(
        self, q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        weights = super()._attention_weights(q, k, block_mask, q_positions, k_positions, layer)
        return weights.half().to(weights.dtype) if layer == self.num_layers - 1 else weights


class _OtherScale(LlamaModel):
    """Scores are divided by the root of hidden size / heads, whatever the head size is."""

    def _attention_weights(
        self, q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        size = self.config.hidden_size // self.config.num_heads
        q = q * math.sqrt(self.config.head_dim / size)
        return super()._attention_weights(q, k, block_mask, q_positions, k_positions, layer)


class _HalfSums(LlamaModel):
    """Behind a prefix of more than PART rows the softmax is in two parts, whose sums are merged in half precision."""

    def _attention_weights(
        self, q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
    ) -> Tensor:
        weights = super()._attention_weights(q, k, block_mask, q_positions, k_positions, layer)
        if k.shape[2] - q.shape[2] <= PART:
            return weights
        parts = [weights[..., :PART], weights[..., PART:]]
        sums = [one.sum(dim=-1, keepdim=True) for one in parts]
        merged = [one.half().to(one.dtype) / one.clamp(min=1e-300) for one in sums]
        return torch.cat([part * factor for part, factor in zip(parts, merged, strict=True)], dim=-1)


class _OtherEps(LlamaModel):
    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.to(self._wide)
        scale = torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + EPS_OF_OTHERS)
        return self._weights[name] * (wide * scale).to(self.dtype)


class _HalfLogits(LlamaModel):
    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        logits = super().forward(flat, cache, taps=taps)
        return logits.half().to(logits.dtype)


class _RoundedTable(LlamaModel):
    """The table of rotations is kept in bf16."""

    def _rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = super()._rotation(position_ids)
        return cos.bfloat16().to(cos.dtype), sin.bfloat16().to(sin.dtype)


class _RoundedPositions(LlamaModel):
    """Angles are computed from positions in bf16, which holds every whole number up to 256."""

    def _rotation(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return super()._rotation(position_ids.bfloat16().long())


class _HalfCache(ContiguousCache):
    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return super().append(layer, k.half().to(k.dtype), v.half().to(v.dtype))


class _HalfMoves(ContiguousCache):
    """Rows that a commit moves pass through a buffer of half precision; those that stay do not."""

    def commit(self, prefix_len: int, rows: Sequence[int]) -> None:
        moved = [row for row, kept in enumerate(kept_rows(self.length, prefix_len, rows)) if row != kept]
        super().commit(prefix_len, rows)
        for stored in (*self._keys, *self._values):
            stored[:, moved] = stored[:, moved].half().to(stored.dtype)


class _SharedScale(Int8Cache):
    """The rows of a forward share one scale a head: that of the largest."""

    def _quantise(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scales = super()._quantise(x)[1].amax(dim=1, keepdim=True).expand(-1, x.shape[1], -1)
        wide = x.to(scales.dtype)
        return self._codes((wide / scales).clamp(-self.largest, self.largest)), scales


def _computing(kind: type[LlamaModel]) -> Callable[[], Any]:
    """A target over models of ours that compute so; models with a forward of their own stay."""

    def plant(model: LanguageModel) -> LanguageModel:
        if type(model) is not LlamaModel:
            return model
        return kind(model.config, model._weights, name=model.name).with_codec(model._codec)

    return lambda: ReferenceTarget(plant_model=plant)


FAULTS = (
    Fault(
        "weights_in_half",
        "dtype/precision",
        "the last layer's attention weights are rounded to fp16",
        "any tree",
        "tree.layers",
        target=_computing(_HalfWeights),
        subtle="one layer",
    ),
    Fault(
        "scale_of_hidden_size",
        "dtype/precision",
        "scores are divided by the root of hidden size / heads instead of the head size",
        "a head size other than that",
        "tree.layers",
        target=_computing(_OtherScale),
        subtle="a head size other than hidden size / heads",
    ),
    Fault(
        "sums_in_half",
        "dtype/precision",
        "behind a prefix of more than 8 rows the softmax is in two parts, whose sums are kept in fp16",
        "a prefix of more than 8 tokens",
        "tree.logits",
        target=_computing(_HalfSums),
        subtle="a prefix of more than 8 tokens",
    ),
    Fault(
        "eps_of_others",
        "dtype/precision",
        "norms add 1e-6 to the mean square, whatever the model says",
        "any tree",
        "tree.layers",
        target=_computing(_OtherEps),
    ),
    Fault(
        "logits_in_half",
        "dtype/precision",
        "logits are rounded to fp16",
        "any tree",
        "tree.logits",
        target=_computing(_HalfLogits),
    ),
    Fault(
        "rotations_in_bf16",
        "dtype/precision",
        "the table of rotary cosines and sines is kept in bf16",
        "any tree behind a prefix",
        "tree.layers",
        target=_computing(_RoundedTable),
        origin="KellerJordan/modded-nanogpt#39",
    ),
    Fault(
        "positions_in_bf16",
        "dtype/precision",
        "rotary angles are computed from positions in bf16, where 257 is 256",
        "a position beyond 256",
        "tree.long",
        target=_computing(_RoundedPositions),
        origin="huggingface/candle#3520",
        subtle="a position beyond 256",
    ),
    Fault(
        "cache_in_half",
        "dtype/precision",
        "the cache keeps rows in fp16, whatever the model computes in",
        "any row",
        "kv.commit",
        target=lambda: CacheTarget("contiguous", _HalfCache),
        kin="rows in half",
    ),
    Fault(
        "moves_in_half",
        "dtype/precision",
        "rows that a commit moves pass through a buffer in fp16",
        "an accepted path that is not the first rows in memory",
        "kv.commit",
        target=lambda: CacheTarget("contiguous", _HalfMoves),
        subtle="a partial accept off the leftmost path",
        kin="rows in half",
    ),
    Fault(
        "scale_shared_by_block",
        "dtype/precision",
        "rows of an int8 cache that were written together share one scale, that of the largest, rejected or not",
        "two rows in a forward",
        "kv.commit",
        target=lambda: CacheTarget("int8", _SharedScale),
        subtle="rows of unequal size",
    ),
)
