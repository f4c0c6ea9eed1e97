"""What a process that judges a target is doing right now, written where its parent can read it after a crash.

A file of fixed size mapped into both processes: the case in progress, the call in progress, and since when. Standard
library only, no locks: one process writes, and the other reads once the writer is dead or looks stuck.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specbench.watchdog import Watchdog

_HEAD = struct.Struct("=dI")  # CLOCK_MONOTONIC when the field was set (shared by all processes), its length in bytes
_CALL_SIZE = 1024
_CASE_SIZE = 1_100_000  # replay words have at most a million characters
SIZE = 2 * _HEAD.size + _CALL_SIZE + _CASE_SIZE


class Board:
    """fd: of a file of SIZE bytes, inherited by the process that writes."""

    def __init__(self, fd: int) -> None:
        self._memory = mmap.mmap(fd, SIZE)

    def note_case(self, replay: str) -> None:
        """The case in progress as its replay word; "" for none."""
        self._write(_HEAD.size + _CALL_SIZE, replay, _CASE_SIZE)

    def note_call(self, what: str) -> None:
        """The call in progress, such as `Decoder.generate()`; "" for none."""
        self._write(0, what, _CALL_SIZE)

    @property
    def case(self) -> str:
        return self._read(_HEAD.size + _CALL_SIZE, _CASE_SIZE)[1]

    @property
    def call(self) -> tuple[float, str]:
        """Since when, and which; ("" while none is in progress, and then since when that is so)."""
        return self._read(0, _CALL_SIZE)

    @property
    def last_sign(self) -> float:
        """When anything was written last."""
        return max(self._read(0, _CALL_SIZE)[0], self._read(_HEAD.size + _CALL_SIZE, _CASE_SIZE)[0])

    def _write(self, place: int, text: str, size: int) -> None:
        raw = text.encode("utf-8", "replace")[:size]
        _HEAD.pack_into(self._memory, place, time.monotonic(), 0)  # a crash in between leaves nothing half-written
        self._memory[place + _HEAD.size : place + _HEAD.size + len(raw)] = raw
        _HEAD.pack_into(self._memory, place, time.monotonic(), len(raw))

    def _read(self, place: int, size: int) -> tuple[float, str]:
        since, length = _HEAD.unpack_from(self._memory, place)
        raw = self._memory[place + _HEAD.size : place + _HEAD.size + min(length, size)]
        return since, raw.decode("utf-8", "replace")


class NotedCalls(Watchdog):
    """A watchdog whose watching is done by another process, from what stands on the board."""

    def __init__(self, board: Board) -> None:
        super().__init__(0.0, print)
        self._board = board

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        self._board.note_call(what)
        try:
            yield
        finally:
            self._board.note_call("")

    def note_case(self, replay: str) -> None:
        self._board.note_case(replay)
