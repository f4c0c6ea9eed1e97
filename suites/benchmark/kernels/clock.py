"""How long a call takes, and what the card can do at most. Times are the device's, and nothing is checked here.

On CUDA the call is captured as a CUDA graph (launches from Python would leave gaps), warmed up, then replayed again and
again; before each replay a buffer larger than the L2 is overwritten, and a pair of CUDA events times the replay.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

Call = Callable[[], Any]
WARM_UPS, WARM_SECONDS = 3, 0.03  # at least, of the host's clock
FEWEST, MOST = 10, 100  # times of a row
COPIED = 2**32  # bytes, far more than any cache holds
SQUARE = 8192
SECONDS = 0.1  # of device time a row, from FEWEST times on


class Clock(Protocol):
    """method: told in every report. prepared: what is timed in place of the call; its answer is the call's."""

    method: str

    def prepared(self, call: Call) -> Call: ...
    def once(self, call: Call) -> float: ...
    def wall(self, call: Call) -> float: ...


class HostClock:
    """perf_counter: for devices that compute while the host waits."""

    method = "host clock, no flush of caches"

    def prepared(self, call: Call) -> Call:
        return call

    def once(self, call: Call) -> float:
        started = time.perf_counter()
        call()
        return time.perf_counter() - started

    wall = once


class CudaClock:
    """once: seconds of the device for one call behind a flush of the L2. wall: of the host, from call to end."""

    def __init__(self) -> None:
        l2 = torch.cuda.get_device_properties(0).L2_cache_size
        size = max(4 * l2, 2**28)
        self._flush = torch.empty(size, dtype=torch.int8, device="cuda")
        self.method = (
            f"CUDA graph replays timed by CUDA events behind {WARM_SECONDS:g} s of warm-up, {size >> 20} MiB written "
            f"before each (L2: {l2 >> 20} MiB), median of {FEWEST} to {MOST}"
        )

    def prepared(self, call: Call) -> Call:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):  # compiles, and plans what a capture must not
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = call()

        def replay() -> Any:
            graph.replay()
            return answer

        return replay

    def once(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000.0

    def wall(self, call: Call) -> float:
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return time.perf_counter() - started


def times(once: Callable[[Call], float], call: Call) -> dict[str, float]:
    """Median, quartiles, least and number of times, in seconds. once: a clock's `once` or `wall`."""
    _warm_up(once, call, WARM_SECONDS)
    found: list[float] = []
    while len(found) < FEWEST or (sum(found) < SECONDS and len(found) < MOST):
        found.append(once(call))
    lower, median, upper = statistics.quantiles(found, n=4, method="inclusive")
    return {"median": median, "q25": lower, "q75": upper, "min": min(found), "n": len(found)}


def _warm_up(once: Callable[[Call], float], call: Call, seconds: float) -> None:
    """An idle card takes a while until its clocks are up."""
    started, num = time.perf_counter(), 0
    while num < WARM_UPS or time.perf_counter() - started < seconds:
        once(call)
        num += 1


def ceilings(clock: CudaClock) -> list[dict[str, Any]]:
    """What this card does at most, measured now: rows of the record."""
    matrix, copy, launch = _matrix(clock), _copy(clock), _launch(clock)
    return [
        {"name": "copy", "value": 2 * COPIED / copy["median"], "unit": "bytes/s", "n": copy["n"],
         "how": f"{COPIED >> 30} GiB device to device, bytes read and written"},
        {"name": "matrix", "value": 2 * SQUARE**3 / matrix["median"], "unit": "FLOP/s", "n": matrix["n"],
         "how": f"bf16 product of {SQUARE} x {SQUARE} x {SQUARE}, random numbers"},
        {"name": "launch", "value": launch["median"], "unit": "s", "n": launch["n"],
         "how": "CUDA graph of two kernels of one element"},
    ]  # fmt: skip


def _copy(clock: CudaClock) -> dict[str, float]:
    source = torch.randint(-128, 128, (COPIED,), dtype=torch.int8, device="cuda")
    destination = torch.empty_like(source)
    return times(clock.once, lambda: destination.copy_(source))


def _matrix(clock: CudaClock) -> dict[str, float]:
    left, right = (torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product = torch.empty_like(left)

    def call() -> None:
        torch.matmul(left, right, out=product)

    _warm_up(clock.once, call, 1.0)
    return times(clock.once, call)


def _launch(clock: CudaClock) -> dict[str, float]:
    number = torch.zeros(1, device="cuda")
    return times(clock.once, clock.prepared(lambda: number.add_(1).add_(1)))
