"""Each cell and contender as a benchmark of pytest's: `pytest suites/benchmark/kernels --benchmark-only`.

For one cell at a time (-k), and for --benchmark-compare; reports are made from the prepared run
(`python -m specbench.suites.benchmark.kernels`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specbench.suites.benchmark.kernels import DEVICE
from specbench.suites.benchmark.kernels.__main__ import Job, all_jobs
from specbench.suites.benchmark.kernels.clock import FEWEST, WARM_UPS, Call, CudaClock
from specbench.suites.benchmark.kernels.rows import NO_GPU, NOT_RUN, TIMED, Contender
from specbench.suites.benchmark.played import PLAYED

HAS_GPU = DEVICE != "cpu"


def cases() -> list[Any]:
    """Without a GPU one for each cell: its bytes and operations are the same whoever is asked."""
    found: dict[tuple[str, str], Any] = {}
    for job in all_jobs(DEVICE):
        sizes = "-".join(f"{name}{size}" for name, size in job.cell.sizes.items() if name in ("kind", "P", "N", "B"))
        for contender in job.contenders:
            case = pytest.param(job, contender, id=f"{job.kernel}-{sizes}-{contender.name}".replace(" ", "_"))
            found.setdefault((f"{job.kernel}-{sizes}", contender.name if HAS_GPU else ""), case)
    return list(found.values())


@pytest.fixture(scope="module")
def clock() -> CudaClock | None:
    return CudaClock() if HAS_GPU else None


@pytest.mark.parametrize(("job", "contender"), cases())
@pytest.mark.benchmark(timer=PLAYED.read)
def test_kernel(job: Job, contender: Contender, clock: CudaClock | None, benchmark: Any) -> None:
    """Right first: one that is wrong fails, and has no time."""
    if clock is None:
        sizes = " ".join(f"{name}={size}" for name, size in job.cell.sizes.items())
        cost = f"{job.cell.num_bytes:,} bytes, {job.cell.num_flops:,} operations"
        pytest.skip(f"{job.kernel} {sizes}: {cost}; {NO_GPU}")

    def timing(once: Callable[[Call], float], call: Call) -> dict[str, float]:
        benchmark.pedantic(PLAYED.once, args=(once, call), rounds=FEWEST, warmup_rounds=WARM_UPS)
        return {"n": FEWEST}

    with torch.no_grad():
        row = job.row(job.task(), contender, clock, timing=timing)
    if row["status"] == NOT_RUN:
        pytest.skip(row["why"])
    assert row["status"] == TIMED, row["why"]
    benchmark.extra_info.update(row)
