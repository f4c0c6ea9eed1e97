"""Questions that a faulty kernel is asked in a process of its own: it may read where nothing is."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
from collections.abc import Callable

import torch

CAUGHT, LIMIT = 3, 120.0  # exit code, seconds


def is_caught(ask: Callable[[str], bool], fault: str) -> bool:
    """Whether `ask(fault)`, in a child, says so or dies of what the kernel did; False for any other end."""
    child = multiprocessing.get_context("fork").Process(target=_answer, args=(ask, fault))
    child.start()
    child.join(LIMIT)
    if child.exitcode is None:
        child.kill()
    return child.exitcode in (CAUGHT, -signal.SIGSEGV, -signal.SIGBUS)


def _answer(ask: Callable[[str], bool], fault: str) -> None:
    faulthandler.disable()  # a crash is an answer here
    torch.set_num_threads(1)  # of the parent's threads none has come along
    os._exit(CAUGHT if ask(fault) else 0)
