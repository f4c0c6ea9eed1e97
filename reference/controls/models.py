"""A model with another part in it, however the harness has wrapped that model: what controls hand to a decoder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from specbench.protocols import LanguageModel
from specbench.reference.kv_cache import AppendableCache
from specbench.reference.model import LlamaModel
from specbench.wrapping import WrappedModel


def inside(model: LanguageModel, change: Callable[[LlamaModel], LlamaModel]) -> LanguageModel:
    """The model with `change` done to the one of ours behind its wrappers; another implementation is left alone."""
    if isinstance(model, WrappedModel):
        twin = copy.copy(model)
        twin._model = inside(model._model, change)
        return twin
    return change(model) if isinstance(model, LlamaModel) else model


def innermost(model: LanguageModel) -> LanguageModel:
    """The model behind its wrappers."""
    return innermost(model._model) if isinstance(model, WrappedModel) else model


class Rehoused:
    """A model of ours with other caches: `make_cache(kind, model)`. Everything else is the model's own."""

    def __init__(self, model: LanguageModel, make_cache: Callable[[str, LlamaModel], AppendableCache]) -> None:
        self._model = model
        self._make_cache = make_cache

    def new_cache(self, kind: str = "contiguous") -> Any:
        inner = innermost(self._model)
        return self._make_cache(kind, inner) if isinstance(inner, LlamaModel) else self._model.new_cache(kind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
