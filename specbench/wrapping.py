"""A language model that hands every call on to another one: what counts or changes something overrides a method."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specbench.protocols import Cache, LanguageModel
from specbench.steps import FlatTree
from specbench.types import Taps


class WrappedModel:
    """Satisfies `specbench.protocols.LanguageModel`; the model behind it is `_model`."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def num_layers(self) -> int:
        return self._model.num_layers

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    def new_cache(self, kind: str = "contiguous") -> Cache:
        return self._model.new_cache(kind)

    def with_attention(self, attention: Any) -> WrappedModel:
        """The same wrapping over the model with another attention; AttributeError where the model takes none."""
        inner: Any = self._model
        twin = copy.copy(self)
        twin._model = inner.with_attention(attention)
        return twin

    def forward(self, flat: FlatTree, cache: Cache, *, taps: Taps | None = None) -> Tensor:
        return self._model.forward(flat, cache, taps=taps)

    def causal(self, tokens: Tensor, *, taps: Taps | None = None) -> Tensor:
        return self._model.causal(tokens, taps=taps)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self._model.logits(tokens)
