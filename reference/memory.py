"""Memory by formula: what verifying a tree takes, and what the streaming oracle takes; and a counter to check them by.

Bytes of tensors that are made on the way, at the worst moment. Weights are not among them unless the oracle reads them,
and neither is what an operator of torch uses inside itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.reference.model import LlamaConfig
from specbench.reference.streaming import HEAD_ROWS


@dataclass(frozen=True)
class VerifyMemory:
    """Bytes that one forward of N nodes behind P cached rows takes in `reference.model`, without taps.

    cache: rows that the forward adds to a contiguous cache. The others are the moments at which most is held: the
    softmax of the last layer, the product inside the feed-forward, the logits.
    """

    cache: int
    attention: int
    feed_forward: int
    logits: int

    @property
    def peak(self) -> int:
        return self.cache + max(self.attention, self.feed_forward, self.logits)


def verify_bytes(config: LlamaConfig, *, num_nodes: int, prefix_len: int, dtype: torch.dtype) -> VerifyMemory:
    """The formula. With e bytes a number, w a number of the softmax (fp32 at least), K = P + N keys:

    attention = scores Hq N K (2 w, + e where w > e, + e for the weights of the layer before) + keys repeated Hq K D e
    + N (4 hidden + inner + D (2 Hq + 3 Hkv)) e + N D w, or, inside a window, K (8 + 1) bytes a node in place of one w.
    feed_forward = weights Hq N K e + N (4 hidden + 3 inner) e. logits = N (hidden + V) e. cache = 2 L Hkv N D e.
    The mask is never wider than its N x N bytes.
    """
    rows, keys = num_nodes, prefix_len + num_nodes
    e, w = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
    hidden, inner = rows * config.hidden_size * e, rows * config.intermediate_size * e
    scores = heads * rows * keys
    # A layer's weights, gates and outputs are let go when the next layer's take their names.
    layer_before = scores * e + inner + 2 * hidden if config.num_layers > 1 else 0
    softmax = scores * (2 * w + (e if w != e else 0))
    if any(config.windows):
        softmax = max(softmax, scores * w + rows * keys * (8 + 1))
    projected = rows * size * ((2 * heads + 3 * kv_heads) * e + w)
    return VerifyMemory(
        cache=2 * config.num_layers * kv_heads * rows * size * e,
        attention=softmax + layer_before + heads * keys * size * e + 2 * hidden + projected + 16 * keys,
        feed_forward=scores * e + 4 * hidden + 3 * inner,
        logits=hidden + rows * config.vocab_size * e,
    )


def streamed_bytes(config: LlamaConfig, *, num_rows: int, block_rows: int, stored: torch.dtype) -> int:
    """At most what `StreamedOracle.logits` holds of a checkpoint for a text of `num_rows` tokens, its answer included.

    One layer in fp64 and the matrix that is being widened, beside: the hidden states of all rows, one layer's keys and
    values, the scores of a block. Then a block of the output matrix and the logits.
    """
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * size, config.num_kv_heads * size
    matrices = [hidden * q_size] * 2 + [hidden * kv_size] * 2 + [hidden * inner] * 3
    layer = 8 * (sum(matrices) + 2 * hidden) + stored.itemsize * max(matrices)
    held = 8 * num_rows * (hidden + 2 * kv_size)
    block = 8 * block_rows * (2 * config.num_heads * num_rows + 4 * (hidden + q_size + kv_size) + 4 * inner)
    head = 8 * (num_rows * config.vocab_size + hidden * min(config.vocab_size, HEAD_ROWS)) + 16 * num_rows * hidden
    return max(layer + held + block, held + head)


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators make under it, for as long as they live: `with LiveBytes() as live:`.

    peak: the most at one time, largest: the bytes of the largest tensor by dtype, both since the start or `restart()`.
    Tensors made before, and mapped files, are not counted; views count once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.largest: dict[torch.dtype, int] = {}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = {_storage(one) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor) and (_storage(one) not in given or _storage(one) in self._alive):
                storage = one.untyped_storage()
                if storage.resizable():  # otherwise its memory is a mapped file's or numpy's
                    self._alive[_storage(one)] = StorageWeakRef(storage), storage.nbytes()
                self.largest[one.dtype] = max(self.largest.get(one.dtype, 0), one.numel() * one.element_size())
        self.peak = max(self.peak, self.now)
        return out

    def restart(self) -> int:
        """Forgets what was seen so far; returns what is held now."""
        self.peak, self.largest = self.now, {}
        return self.peak

    @property
    def now(self) -> int:
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        return sum(size for _, size in self._alive.values())


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
