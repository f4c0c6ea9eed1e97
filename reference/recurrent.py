"""A toy hybrid: Llama layers of which some keep a state instead of rows, a short causal convolution and a gated linear
recurrence, as the layers of Mamba-like models do.

Query, key and value are bounded and the memory is a weighted mean, so that nothing grows with the text: random models
whose state ran to thousands overflowed in fp16, and magnified rounding a hundred times more on some texts than on
others.

A row's state comes from its parent's, so siblings never share one. Every row leaves a snapshot in the cache: the key is
the recurrent state behind it, the value its convolution window. Rolling back is then what it is for rows. No batches
over several caches, no checkpoint format.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.reference.caches.cache import AppendableCache, CacheSpec, LayerSpec
from specbench.reference.model import Attend, LlamaConfig, LlamaModel, Mix, tiny_llama
from specbench.steps import FlatTree
from specbench.types import Taps


@dataclass(frozen=True)
class Recurrence:
    """layers: which layers recur. The state is [key_dim, value_dim]; the convolution sees `kernel` rows of `inner`
    channels, its own included."""

    layers: tuple[int, ...]
    inner: int = 6
    key_dim: int = 4
    value_dim: int = 5
    kernel: int = 3

    def __post_init__(self) -> None:
        if self.kernel < 2:
            raise ValueError(f"kernel = {self.kernel} must be >= 2 (a window of earlier rows is what is kept)")

    @property
    def snapshot(self) -> LayerSpec:
        """A row reads its parent's snapshot and leaves one: a window of two."""
        return LayerSpec(1, self.key_dim * self.value_dim, (self.kernel - 1) * self.inner, window=2, is_state=True)


class State(NamedTuple):
    """Behind one row. memory: [B, key_dim, value_dim]. window: [B, kernel - 1, inner], the last inputs."""

    memory: Tensor
    window: Tensor


class HybridModel(LlamaModel):
    """`LlamaModel` with `recurrence.layers` replaced. Their taps have no attention weights."""

    def __init__(
        self, config: LlamaConfig, recurrence: Recurrence, weights: dict[str, Tensor], *, name: str = "hybrid"
    ) -> None:
        super().__init__(config, weights, name=name)
        self.recurrence = recurrence

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """How many rows each layer reads, the row's own included; a recurrent layer reads its parent's snapshot."""
        return tuple(
            2 if layer in self.recurrence.layers else window for layer, window in enumerate(super().layer_windows)
        )

    def to(self, dtype: torch.dtype, device: str | torch.device | None = None) -> HybridModel:
        """The same weights rounded to (or widened to) another dtype."""
        weights = {key: one.to(device=device, dtype=dtype) for key, one in self._weights.items()}
        twin = HybridModel(self.config, self.recurrence, weights, name=self.name)
        twin._codec = self._codec
        return twin

    def first_layers(self, num_layers: int) -> HybridModel:
        """The model cut after `num_layers` layers, with the same norm and head: the weights are shared, not copied."""
        short = super().first_layers(num_layers)
        twin = HybridModel(short.config, self.recurrence, self._weights, name=short.name)
        twin._codec = self._codec
        return twin

    @property
    def cache_spec(self) -> CacheSpec:
        """The shape of one sequence's cache: rows of attention layers, snapshots of recurrent ones."""
        spec = super().cache_spec
        layers = [
            self.recurrence.snapshot if idx in self.recurrence.layers else layer
            for idx, layer in enumerate(spec.layers)
        ]
        return replace(spec, layers=tuple(layers))

    def rows(self, tokens: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        raise ValueError("a model with recurrent layers has no rows() under a given attention: use forward()")

    def save(self, folder: Path) -> None:
        raise ValueError("a hybrid toy has no checkpoint format: save a LlamaModel")

    def _mix_behind(self, cache: AppendableCache, flat: FlatTree, taps: Taps | None) -> Mix:
        """States start from the parent row's, at the top of the block from the last snapshot in the cache."""
        attention = super()._mix_behind(cache, flat, taps)
        parents = parent_rows(flat.mask)
        num_cached = cache.length

        def mix(layer: int, normed: Tensor) -> tuple[Tensor, Tensor | None]:
            if layer not in self.recurrence.layers:
                return attention(layer, normed)
            behind_prefix = self._initial(1)
            if num_cached:
                keys, values = cache.rows(layer)
                behind_prefix = self._unpacked(keys[:, -1], values[:, -1])
            states: list[State] = []
            outputs: list[Tensor] = []
            for row, parent in enumerate(parents):
                before = behind_prefix if parent is None else states[parent]
                output, state = self._step(layer, normed[:, row], before)
                outputs.append(output)
                states.append(state)
            k, v = self._packed(states)
            cache.append(layer, k[0], v[0])
            if taps is not None:
                taps.layer(layer).k, taps.layer(layer).v = k, v
            return torch.stack(outputs, dim=1), None

        return mix

    def _mix_causal(self, position_ids: Tensor, taps: Taps | None) -> Mix:
        """Whole sequences from an empty state, one position after the other."""
        attention = super()._mix_causal(position_ids, taps)

        def mix(layer: int, normed: Tensor) -> tuple[Tensor, Tensor | None]:
            if layer not in self.recurrence.layers:
                return attention(layer, normed)
            state = self._initial(normed.shape[0])
            states: list[State] = []
            outputs: list[Tensor] = []
            for position in range(normed.shape[1]):
                output, state = self._step(layer, normed[:, position], state)
                outputs.append(output)
                states.append(state)
            if taps is not None:
                taps.layer(layer).k, taps.layer(layer).v = self._packed(states)
            return torch.stack(outputs, dim=1), None

        return mix

    def _step(self, layer: int, x: Tensor, before: State) -> tuple[Tensor, State]:
        """One row a sequence. x: [B, hidden]. Returns what the layer adds [B, hidden] and the state behind the row.

        memory = decay * memory + (1 - decay) * key (x) value, output = query . memory, all from the convolved input;
        query, key and value are each x / sqrt(1 + |x|^2), shorter than 1.
        """
        prefix = f"model.layers.{layer}.recurrence."
        entered = self._linear(x, prefix + "in_proj")[:, None]  # [B, 1, inner]
        seen = torch.cat([before.window, entered], dim=1)  # [B, kernel, inner]
        mixed = torch.nn.functional.silu((seen * self._weights[prefix + "conv.weight"]).sum(dim=1))
        query, key, value = (
            _bounded(self._linear(mixed, f"{prefix}{name}_proj").to(self._wide)) for name in ("q", "k", "v")
        )
        decay = torch.sigmoid(self._linear(x, prefix + "decay_proj").to(self._wide))
        entering = ((1 - decay) * key)[:, :, None] * value[:, None, :]
        memory = decay[:, :, None] * before.memory.to(self._wide) + entering
        memory = memory.to(self.dtype)  # as it is cached, so that a row in a block and a row by itself read the same
        output = (query[:, None] @ memory.to(self._wide))[:, 0].to(self.dtype)  # [B, value_dim]
        return self._linear(output, prefix + "out_proj"), State(memory, seen[:, 1:])

    def _initial(self, num_sequences: int) -> State:
        one = self.recurrence

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_sequences, *shape, dtype=self.dtype, device=self.device)

        return State(zeros(one.key_dim, one.value_dim), zeros(one.kernel - 1, one.inner))

    def _packed(self, states: Iterable[State]) -> tuple[Tensor, Tensor]:
        """States of M rows as keys and values, each [B, 1, M, ...]."""
        memories, windows = zip(*states, strict=True)
        return (
            torch.stack([one.flatten(1) for one in memories], dim=1)[:, None],
            torch.stack([one.flatten(1) for one in windows], dim=1)[:, None],
        )

    def _unpacked(self, key: Tensor, value: Tensor) -> State:
        """key: [1, key_dim * value_dim], value: [1, (kernel - 1) * inner], one row of the cache."""
        one = self.recurrence
        return State(key.view(-1, one.key_dim, one.value_dim), value.view(-1, one.kernel - 1, one.inner))


def _bounded(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(1 + vectors.pow(2).sum(dim=-1, keepdim=True))


def parent_rows(mask: Tensor) -> list[int | None]:
    """The row before each row of a block on its own path, None for a row right behind the prefix.

    mask: bool [M, M]. Of the earlier rows that a row sees, its parent is the one that sees most.
    """
    num_seen = mask.sum(dim=1).tolist()
    parents: list[int | None] = []
    for row, sees in enumerate(mask.tolist()):
        visible = [other for other in range(row) if sees[other]]
        parents.append(max(visible, key=lambda other: (num_seen[other], other), default=None))
    return parents


def tiny_hybrid(
    config: LlamaConfig, recurrence: Recurrence, *, seed: int, dtype: torch.dtype = torch.float64
) -> HybridModel:
    """A seeded random model; its attention layers are those of `tiny_llama` with the same seed."""
    weights = dict(tiny_llama(config, seed=seed)._weights)
    generator = torch.Generator().manual_seed(seed + 1000)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * (gain / math.sqrt(columns))

    for layer in recurrence.layers:
        prefix = f"model.layers.{layer}.recurrence."
        weights = {key: one for key, one in weights.items() if f"layers.{layer}.self_attn" not in key}
        weights[prefix + "in_proj.weight"] = matrix(recurrence.inner, config.hidden_size, gain=2.0)
        weights[prefix + "conv.weight"] = matrix(recurrence.kernel, recurrence.inner, gain=2.0)
        for name, size in (("q", recurrence.key_dim), ("k", recurrence.key_dim), ("v", recurrence.value_dim)):
            weights[f"{prefix}{name}_proj.weight"] = matrix(size, recurrence.inner, gain=2.0)
        weights[prefix + "decay_proj.weight"] = matrix(recurrence.key_dim, config.hidden_size, gain=2.0)
        weights[prefix + "out_proj.weight"] = matrix(config.hidden_size, recurrence.value_dim, gain=2.0)
    rounded = {key: one.to(dtype) for key, one in weights.items()}
    return HybridModel(config, recurrence, rounded, name=f"tiny hybrid {seed}")
