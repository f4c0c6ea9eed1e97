"""Where a fault is housed that lies in no step: a target over a faulty cache, or with a faulty drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specbench.protocols import Drafter, LanguageModel
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.model import ModelDrafter
from specbench.reference.kv_cache import CACHES, AppendableCache, CacheSpec
from specbench.reference.target import ReferenceTarget

MakeDrafter = Callable[[LanguageModel], Drafter]


def drafting(drafter: MakeDrafter, *, itself: bool = False, looks_up: bool = False) -> Callable[[], ReferenceTarget]:
    """A target whose only drafter is the faulty one. itself, looks_up: what the target says of it: that it drafts what
    the model itself says, or what has stood in the context."""
    return lambda: ReferenceTarget(
        drafters={"faulty": drafter},
        self_drafters=("faulty",) if itself else (),
        lookup_drafters=("faulty",) if looks_up else (),
    )


def shaped(kind: Callable[..., ModelDrafter], *widths: int) -> MakeDrafter:
    """Drafters of a kind with a tree of these widths."""
    return lambda model: kind(model, widths=widths)


class CacheTarget(ReferenceTarget):
    """kind: the cache kind that `make_cache` gets wrong; no other is offered."""

    def __init__(self, kind: str, make_cache: Callable[[CacheSpec], AppendableCache]) -> None:
        if kind not in CACHES:
            raise ValueError(f"cache kind {kind!r} is unknown: choose one of {', '.join(CACHES)}")
        super().__init__()
        self.cache_kinds = (kind,)
        self._make_cache = make_cache

    def build(self, model: LanguageModel, drafter: Drafter | None, *, cache: str = "", **keywords: Any) -> Decoder:
        """A fresh decoder whose model hands out the faulty cache."""
        return super().build(_Rehoused(model, self._make_cache), drafter, cache=cache or "contiguous", **keywords)


class _Rehoused:
    """A model with another cache; transformers models keep theirs."""

    def __init__(self, model: LanguageModel, make_cache: Callable[[CacheSpec], AppendableCache]) -> None:
        self._model = model
        self._make_cache = make_cache

    def new_cache(self, kind: str = "contiguous") -> Any:
        good = self._model.new_cache(kind)
        return self._make_cache(good.spec) if hasattr(good, "spec") else good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
