"""Where the time of a run goes: seconds by activity, each moment counted once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Activities nest: time inside an inner one is not counted for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def count(self, activity: str) -> Iterator[None]:
        self._settle()
        self._stack.append(activity)
        try:
            yield
        finally:
            self._settle()
            self._stack.pop()

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._stack:
            current = self._stack[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now
