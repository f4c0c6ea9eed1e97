"""A changed copy of the model in place of the good one, in every forward or in those of trees only."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.reference.model import LlamaModel
from specbench.reference.target import ReferenceTarget
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree
from specbench.types import Taps

Change = Callable[[LlamaModel], None]


def everywhere(change: Change) -> Callable[[], ReferenceTarget]:
    """Targets whose models are changed; those that are not ours are handed on as they are."""
    return lambda: ReferenceTarget(plant_model=lambda model: _changed(model, change))


def in_verify(change: Change) -> Callable[[Steps], Steps]:
    """The forward of a tree runs on a changed model, that of a prompt on the good one."""

    def plant(steps: Steps) -> Steps:
        last: FlatTree | None = None

        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            nonlocal last
            last = steps.flatten(tree, prefix_len)
            return last

        def forward(model: LanguageModel, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
            return steps.forward(_changed(model, change) if flat is last else model, flat, cache, taps=taps)

        return replace(steps, flatten=flatten, forward=forward)

    return plant


def _changed(model: LanguageModel, change: Change) -> LanguageModel:
    inner = getattr(model, "_model", model)  # a counting wrapper keeps its model there
    if not isinstance(inner, LlamaModel):
        return model
    faulty = copy.copy(inner)
    change(faulty)
    if inner is model:
        return faulty
    wrapper = copy.copy(model)
    wrapper._model = faulty  # type: ignore[attr-defined]
    return wrapper


@dataclass(frozen=True)
class Sight:
    """What M rows of one layer are to see of K keys, the last M of them their own.

    block_mask: bool [..., M, M]. q_positions: [..., M], k_positions: [..., K], negative for padding.
    """

    model: LlamaModel
    layer: int
    block_mask: Tensor
    q_positions: Tensor
    k_positions: Tensor

    @property
    def num_rows(self) -> int:
        return self.block_mask.shape[-1]

    @property
    def num_cached(self) -> int:
        return self.k_positions.shape[-1] - self.num_rows

    @property
    def window(self) -> int | None:
        return self.model.layer_windows[self.layer]

    @property
    def unwindowed(self) -> Tensor:
        """bool [..., M, K]: what is right in a layer without a window."""
        return self.behind_prefix(self.block_mask)

    @property
    def visible(self) -> Tensor:
        """bool [..., M, K]: what is right."""
        return self.unwindowed if self.window is None else self.unwindowed & self.near(self.window)

    def behind_prefix(self, block_mask: Tensor) -> Tensor:
        """bool [..., M, K]: the whole prefix but its padding, and `block_mask`."""
        seen = torch.nn.functional.pad(block_mask, (self.num_cached, 0), value=True)
        return seen & (self.k_positions >= 0)[..., None, :]

    def near(self, window: int, *, q_positions: Tensor | None = None, k_positions: Tensor | None = None) -> Tensor:
        """bool [..., M, K]: keys less than `window` positions back."""
        q_positions = self.q_positions if q_positions is None else q_positions
        k_positions = self.k_positions if k_positions is None else k_positions
        return q_positions[..., :, None] - k_positions[..., None, :] < window


def with_sight(see: Callable[[Sight], Tensor]) -> Change:
    """Attention to what `see` says: bool [..., M, K], or [..., Hq, M, K] where heads differ."""

    def change(model: LlamaModel) -> None:
        group = model.config.num_heads // model.config.num_kv_heads

        def attention_weights(
            q: Tensor, k: Tensor, block_mask: Tensor, q_positions: Tensor, k_positions: Tensor, layer: int
        ) -> Tensor:
            seen = see(Sight(model, layer, block_mask, q_positions, k_positions))
            if seen.ndim == block_mask.ndim:
                seen = seen.unsqueeze(-3)
            scores = (q @ k.repeat_interleave(group, dim=1).mT).to(model._wide) / math.sqrt(model.config.head_dim)
            return scores.masked_fill(~seen, -math.inf).softmax(dim=-1).to(model.dtype)

        model._attention_weights = attention_weights  # type: ignore[method-assign]

    return change
