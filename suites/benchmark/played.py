"""Seconds that somebody else measured, as the timer that pytest-benchmark reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Played:
    """The sum of what was measured so far: read before and after a call, it gives that call's seconds."""

    def __init__(self) -> None:
        self.total = 0.0

    def once(self, measure: Callable[..., float], *args: Any) -> None:
        self.total += measure(*args)

    def read(self) -> float:
        return self.total


PLAYED = Played()
