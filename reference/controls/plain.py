"""The reference itself, one control a cache kind, so that each is judged as often as any unusual decoder."""

from __future__ import annotations

from functools import partial

from specbench.reference.controls.control import Control
from specbench.reference.kv_cache import CACHES
from specbench.reference.target import ReferenceTarget


class _OfOneKind(ReferenceTarget):
    """The reference with one cache kind; a model that has no such cache keeps its usual one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.cache_kinds = (kind,)


CONTROLS = tuple(
    Control(
        f"reference_{kind}",
        f"the reference decoder over a {kind} cache",
        "it is the reference",
        partial(_OfOneKind, kind),
    )
    for kind in CACHES
)
