"""Triton's interpreter, made quicker: what it does anew for every function that a kernel calls is done once a launch.

It puts its own functions in the place of `triton.language`'s when a kernel is launched, and again for each call of
another function within, `tl.max` for instance, which is a third of its time. What it puts there is always the same.
Where Triton has no such function any more, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """For the rest of the process. Twice does no harm."""
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is not None and not isinstance(patch, _Once):
        interpreter._patch_lang = _Once(patch)


class _Once:
    """In the place of `_patch_lang`: fn -> what undoes it, which the launch alone looks at."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._done: set[tuple[bool, bool]] = set()  # of the launch under way: which modules were patched

    def __call__(self, fn: Any) -> Any:
        modules = _modules(fn)
        if modules in self._done:
            return None
        scope = self._patch(fn)
        if not self._done:  # the launch itself
            scope = _Undone(scope, self._done)
        self._done.add(modules)
        return scope


class _Undone:
    """The launch's own patches, with which the others end."""

    def __init__(self, scope: Any, done: set[tuple[bool, bool]]) -> None:
        self._scope, self._done = scope, done

    def restore(self) -> None:
        self._done.clear()
        self._scope.restore()


def _modules(fn: Any) -> tuple[bool, bool]:
    """Which of the modules that are patched a function sees by a name of its own."""
    seen = [one for one in fn.__globals__.values() if one is tl or one is tl.core]
    return tl in seen, tl.core in seen
