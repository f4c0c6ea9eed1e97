"""One row of the record: who computed which cell, whether it was right, and how long it took.

Right first: what is timed is asked for its answer, and one that is wrong gets no time. Whoever is missing here has a
row that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from specbench.kernels.launch import CannotRun
from specbench.suites.benchmark.kernels.clock import Call, Clock, times

Timing = Callable[[Callable[[Call], float], Call], dict[str, float]]
OWN, PEER, FLOOR = "own", "peer", "floor"
TIMED, WRONG, FAILED, NOT_RUN, NOT_TIMED = "timed", "wrong", "failed", "not run", "not timed"
NO_GPU = "a time needs a CUDA device, bytes and operations are by formula"


class NotHere(Exception):
    """A contender cannot run here; the text says what is missing. Nothing else is run in its place."""


class Task(Protocol):
    """What contenders are asked. kernel: its name in the record. cell: has sizes, num_bytes and num_flops (the fewest).
    wrong: what is wrong with an answer, "" for nothing; checked: how much of it was looked at."""

    kernel: str
    cell: Any
    checked: str

    def wrong(self, answer: Any) -> str: ...


@dataclass(frozen=True)
class Contender:
    """make: from a task, the call to be timed and what makes an answer of its result; NotHere where it cannot run.
    facts: what the row tells besides, from the task's cell."""

    name: str
    role: str
    make: Callable[[Any], tuple[Call, Callable[[Any], Any]]]
    facts: Callable[[Any], Mapping[str, Any]] = lambda cell: {}


def row_of(kernel: str, cell: Any, contender: Contender, status: str, why: str = "") -> dict[str, Any]:
    """A row without a time. cell: has sizes, num_bytes and num_flops."""
    return {
        "row": "time",
        "kernel": kernel,
        "cell": dict(cell.sizes),
        "contender": contender.name,
        "role": contender.role,
        "status": status,
        "why": why,
        "bytes": cell.num_bytes,
        "flops": cell.num_flops,
        **contender.facts(cell),
    }


def measured(
    task: Task,
    contender: Contender,
    clock: Clock | None,
    *,
    once: Callable[[Call], float] | None = None,
    timing: Timing = times,
) -> dict[str, Any]:
    """The contender's row. clock: None to check and time nothing. once: how a call is timed as it is, in place of what
    the clock prepares. timing: takes the times."""

    def row(status: str, why: str = "", **more: Any) -> dict[str, Any]:
        return row_of(task.kernel, task.cell, contender, status, why) | more

    try:
        call, answer_of = contender.make(task)
        timed = call if clock is None or once is not None else clock.prepared(call)
        result = timed()
        if why := task.wrong(answer_of(result)):
            return row(WRONG, why)
        if clock is None:
            return row(NOT_TIMED, NO_GPU, checked=task.checked)
        seconds = timing(once or clock.once, timed)
        if why := task.wrong(answer_of(result)):  # the last replay's answer too
            return row(WRONG, f"after {seconds['n']:g} times: {why}")
        return row(TIMED, seconds=seconds, checked=task.checked)
    except (NotHere, CannotRun) as error:
        return row(NOT_RUN, one_line(error))
    except torch.OutOfMemoryError as error:
        return row(NOT_RUN, f"out of memory: {one_line(error)}")
    except Exception as error:  # compilers and other people's kernels raise what they like
        return row(FAILED, f"{type(error).__name__}: {one_line(error)}")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]
