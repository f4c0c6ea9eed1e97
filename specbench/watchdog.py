"""Ends a run that a target keeps hanging: native code cannot be interrupted, so the process leaves, report written.

A thread watches the one call that is in progress. When it outlives the limit, `on_hang` gets the sentence, prints what
there is, and does not return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

EXIT_HUNG = 7


class Watchdog:
    """timeout: seconds one call of the target may take; 0 switches the watchdog off."""

    def __init__(self, timeout: float, on_hang: Callable[[str], None]) -> None:
        self._timeout = timeout
        self._on_hang = on_hang
        self._lock = threading.Lock()
        self._deadline: float | None = None
        self._what = ""
        self._thread: threading.Thread | None = None
        self._closed = threading.Event()

    def guard(self, what: str) -> AbstractContextManager[None]:
        """`what` names the call, such as `generate()`. Calls do not nest."""
        return nullcontext() if self._timeout <= 0 else self._guarded(what)

    @contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="specbench-watchdog", daemon=True)
            self._thread.start()
        with self._lock:
            self._deadline, self._what = time.monotonic() + self._timeout, what
        try:
            yield
        finally:
            with self._lock:
                self._deadline = None

    def note_case(self, replay: str) -> None:
        """The case that calls belong to from now on: for those who watch from another process, see `board`."""

    def close(self) -> None:
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(min(0.2, self._timeout / 4)):
            with self._lock:
                hung = self._deadline is not None and time.monotonic() > self._deadline
                what = self._what
            if hung:
                self._on_hang(
                    f"{what} did not return within {self._timeout:g} s: "
                    "give --specbench-timeout SECONDS if it needs longer, otherwise it hangs"
                )
                return
