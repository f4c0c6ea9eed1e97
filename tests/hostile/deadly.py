"""A decoder that takes its process down, each process in another way, and is right once all of them are used up.

How many processes there were stands in the file that HOSTILE_DEATHS names.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from specbench.reference.decoder import Decoder
from specbench.types import Taps, VerifyResult


def exits() -> None:
    os._exit(3)


def interrupts_itself() -> None:
    raise KeyboardInterrupt("by myself")


def crashes() -> None:
    ctypes.string_at(0)


def aborts() -> None:
    os.abort()


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs_in_native_code() -> None:
    """With the interpreter's lock held, so that no thread of this process would notice, and deaf to signals."""
    for one in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(one, signal.SIG_IGN)
    ctypes.PyDLL(None).usleep(2_000_000_000)


def closes_every_file() -> None:
    os.closerange(3, 256)
    time.sleep(3_600)


def floods() -> None:
    """Megabytes on both streams, then a crash."""
    for fd in (1, 2):
        for _ in range(40):
            os.write(fd, b"::error::" + b"x" * 100_000 + b"\n")
    os._exit(9)


def leaves_a_child() -> None:
    """That holds every pipe open and would outlive the run."""
    if os.fork() == 0:
        time.sleep(3_600)
    os._exit(0)


DEATHS = (
    exits,
    interrupts_itself,
    crashes,
    aborts,
    is_killed,
    hangs_in_native_code,
    closes_every_file,
    lambda: None,  # the process in which verify() eats the memory
    floods,
    leaves_a_child,
)


class Deadly:
    def __init__(self) -> None:
        file = Path(os.environ["HOSTILE_DEATHS"])
        count = int(file.read_text("ascii"))
        file.write_text(str(count + 1), "ascii")
        self._deaths = DEATHS[count : count + 1]

    def build(self, model: Any, drafter: Any) -> Decoder:
        return _Decoder(model, drafter, self._deaths)


class _Decoder(Decoder):
    def __init__(self, model: Any, drafter: Any, deaths: tuple[Callable[[], None], ...]) -> None:
        super().__init__(model, drafter)
        self._deaths = deaths

    def forward_tree(self, *args: Any, taps: Taps | None = None) -> torch.Tensor:
        for die in self._deaths:
            die()
        return super().forward_tree(*args, taps=taps)

    def verify(self, *args: Any, **keywords: Any) -> VerifyResult:
        """Eats memory until there is none left, and keeps it."""
        while True:
            _eaten.append(torch.ones(2**26, dtype=torch.uint8))


_eaten: list[torch.Tensor] = []


class DiesOnImport:
    """Made, not built: the process is gone before there is a target."""

    def __init__(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class HangsOnImport:
    def __init__(self) -> None:
        time.sleep(3_600)
