"""Where the time of a run goes: seconds by activity, each moment counted once."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager


class Clock:
    """Activities nest: time inside an inner one is not counted for the outer one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._stack: list[str] = []
        self._since = time.perf_counter()

    def count(self, activity: str) -> AbstractContextManager[None]:
        return _Activity(self, activity)

    def begin(self, activity: str) -> None:
        self._settle()
        self._stack.append(activity)

    def end(self) -> None:
        self._settle()
        self._stack.pop()

    def _settle(self) -> None:
        now = time.perf_counter()
        if self._stack:
            current = self._stack[-1]
            self.seconds[current] = self.seconds.get(current, 0.0) + now - self._since
        self._since = now


class _Activity(AbstractContextManager[None]):
    """Written out: every call of a target goes through it."""

    def __init__(self, clock: Clock, activity: str) -> None:
        self._clock = clock
        self._activity = activity

    def __enter__(self) -> None:
        self._clock.begin(self._activity)

    def __exit__(self, *error: object) -> None:
        self._clock.end()
