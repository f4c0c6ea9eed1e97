"""A cache of ours as transformers sees it, so that its forwards write to and read from any kind that keeps all rows.

What a row holds is the model's business: keys and values, or the latent and the rotary key of an MLA model. Rows that
have left a sliding window are kept too: a rejection may bring them back, and the window is the mask's business.
"""

from __future__ import annotations

from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from specbench.reference.kv_cache import AppendableCache

# A ring would hand out fewer keys than a mask has columns; rounded rows have no oracle in transformers' own forward.
CACHE_KINDS = ("contiguous", "preallocated", "paged_1", "paged_4", "paged_16")


class HFCache(Cache):
    """Hands `held` to one forward of a batch of one. All state is in `held`."""

    def __init__(self, held: AppendableCache) -> None:
        super().__init__(layers=[_Layer(held, idx) for idx in range(len(held.spec.layers))])


class _Layer(CacheLayerMixin):
    """One layer of `held`. transformers asks it for lengths and gives it new rows."""

    is_sliding = False
    is_croppable = False

    def __init__(self, held: AppendableCache, idx: int) -> None:
        super().__init__()
        self._held = held
        self._idx = idx
        self._length = held.length  # before the forward: layers grow one by one while it runs
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """[1, heads, M, size] each. Returns all rows, [1, heads, P+M, size]."""
        self._length += key_states.shape[2]
        keys, values = self._held.append(self._idx, key_states[0], value_states[0])
        return keys[None], values[None]

    def get_seq_length(self) -> int:
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: `held` has its storage."""


def keys_values(dynamic: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
    """The cached keys and values of one layer of a `DynamicCache`, each [B, heads, length, size]."""
    held = dynamic.layers[layer]
    return held.keys, held.values
