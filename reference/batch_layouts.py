"""Two ways to lay blocks of several sequences out as the rows of one forward: `(model, blocks, caches) -> logits`.

`packed`: all rows one behind the other, no padding; each sequence attends to its own cache. `left_padded`: a rectangle,
prefixes padded on the left to the longest and blocks on the right to the largest, with padding hidden by its position.
Only real rows reach a cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from specbench.protocols import LanguageModel
from specbench.reference.caches.cache import GARBAGE
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.recurrent import HybridModel
from specbench.steps import FlatTree


@runtime_checkable
class RaggedModel(LanguageModel, Protocol):
    """A model that computes any rows under any attention, as `reference.model.LlamaModel` does."""

    def rows(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        attend: Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]],
    ) -> Tensor: ...

    def attention(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        block_mask: Tensor,
        q_positions: Tensor,
        k_positions: Tensor,
    ) -> tuple[Tensor, Tensor]: ...


def can_batch(model: LanguageModel) -> bool:
    """Whether rows of several sequences can be computed at once. A recurrent layer has no attention to bring along."""
    return isinstance(model, RaggedModel) and not isinstance(model, HybridModel)


class BatchForwardStep(Protocol):
    def __call__(
        self, model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]
    ) -> list[Tensor]:
        """Computes the M rows of each block behind the cache beside it, which grows by them. Returns float [M, V]
        for each."""
        ...


def forward_packed(model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]) -> list[Tensor]:
    """One sequence of sum M rows for everything but attention, which is done block by block."""
    spans = _spans(blocks)
    prefix_lens = [cache.length for cache in caches]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        mixed = []
        for block, cache, prefix_len, rows in zip(blocks, caches, prefix_lens, spans, strict=True):
            keys, values = cache.append(layer, k[0, :, rows], v[0, :, rows])
            positions = block.position_ids.to(q.device)
            k_positions = torch.cat([_cached_positions(keys, block, prefix_len), positions])
            mask = block.mask.to(q.device)
            one, _ = model.attention(layer, q[:, :, rows], keys[None], values[None], mask, positions, k_positions)
            mixed.append(one)
        return torch.cat(mixed, dim=2), torch.empty(0)  # weights differ in width and nobody asks for them

    tokens = torch.cat([block.tokens for block in blocks])
    positions = torch.cat([block.position_ids for block in blocks])
    logits = model.rows(tokens[None], positions, attend)[0]
    return [logits[rows] for rows in spans]


def forward_left_padded(
    model: RaggedModel, blocks: Sequence[FlatTree], caches: Sequence[AppendableCache]
) -> list[Tensor]:
    """B sequences of max M rows. A padding row sees itself and the prefix, so that it holds numbers; nobody sees it."""
    num_sequences, widest = len(blocks), max(block.num_rows for block in blocks)
    prefix_lens = [cache.length for cache in caches]
    tokens = torch.zeros(num_sequences, widest, dtype=torch.int64)
    positions = torch.zeros(num_sequences, widest, dtype=torch.int64)
    mask = torch.eye(widest, dtype=torch.bool).repeat(num_sequences, 1, 1)
    for idx, block in enumerate(blocks):
        tokens[idx, : block.num_rows] = block.tokens
        positions[idx, : block.num_rows] = block.position_ids
        mask[idx, : block.num_rows, : block.num_rows] = block.mask

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        held = [
            cache.append(layer, k[idx, :, : block.num_rows], v[idx, :, : block.num_rows])
            for idx, (block, cache) in enumerate(zip(blocks, caches, strict=True))
        ]
        longest = max(keys.shape[1] - block.num_rows for (keys, _), block in zip(held, blocks, strict=True))
        all_k, all_v = (torch.nn.functional.pad(one, (0, 0, longest, 0), value=GARBAGE) for one in (k, v))
        k_positions = torch.nn.functional.pad(positions, (longest, 0), value=-1).to(q.device)  # padding is hidden
        for idx, ((keys, values), block) in enumerate(zip(held, blocks, strict=True)):
            start = longest + block.num_rows - keys.shape[1]
            all_k[idx, :, start : longest + block.num_rows] = keys
            all_v[idx, :, start : longest + block.num_rows] = values
            k_positions[idx, start:longest] = _cached_positions(keys, block, prefix_lens[idx])
        return model.attention(layer, q, all_k, all_v, mask.to(q.device), positions.to(q.device), k_positions)

    logits = model.rows(tokens, positions, attend)
    return [logits[idx, : block.num_rows] for idx, block in enumerate(blocks)]


BATCH_LAYOUTS: dict[str, BatchForwardStep] = {"packed": forward_packed, "left_padded": forward_left_padded}


def _spans(blocks: Sequence[FlatTree]) -> list[slice]:
    spans, start = [], 0
    for block in blocks:
        spans.append(slice(start, start + block.num_rows))
        start += block.num_rows
    return spans


def _cached_positions(keys: Tensor, block: FlatTree, prefix_len: int) -> Tensor:
    """Positions of the cached rows in keys [Hkv, K, D]; a sliding cache may hold the last rows of the prefix only."""
    return torch.arange(prefix_len - (keys.shape[1] - block.num_rows), prefix_len, device=keys.device)
