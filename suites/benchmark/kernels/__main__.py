"""The prepared run: checks, then times, within so many minutes; rows as they come, and at the end a table and drawings.

    python -m specbench.suites.benchmark.kernels --out DIR [--minutes 9]

DIR gets kernels.jsonl, kernels.md and two drawings as SVG and PNG. A run that was cut off has left its rows; `--report`
makes the rest of them.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

import specbench
import specbench.suites.kernels
from specbench.reports import kernels as report
from specbench.suites.benchmark.kernels import DEVICE, attention, rounds, verify
from specbench.suites.benchmark.kernels.cells import KINDS, ROUND_CELLS, VERIFY_CELLS, attention_cells
from specbench.suites.benchmark.kernels.clock import Clock, CudaClock, ceilings
from specbench.suites.benchmark.kernels.rows import (
    FAILED,
    NO_GPU,
    NOT_RUN,
    NOT_TIMED,
    OWN,
    WRONG,
    Contender,
    measured,
    one_line,
    row_of,
)

CHECKS = Path(str(specbench.suites.kernels.__file__)).parent
# Of the suite's own power, and of GPUs that are not here: neither says anything of this one.
NOT_CHECKED = ("test_faults.py", "test_compiled.py")
MAX_WORKERS = 8
SPARE = 15.0  # seconds of the run, for the row under way and the report
RECORD, PAGE = "kernels.jsonl", "kernels.md"
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """A cell and who is asked about it. task: builds its inputs. needed_bytes: of device memory, 0 for little."""

    kernel: str
    cell: Any
    contenders: Sequence[Contender]
    task: Callable[[], Any]
    row: Callable[..., Row] = measured
    needed_bytes: int = 0


class Record:
    """Rows, each written as it comes: nothing is lost when the run is cut off."""

    def __init__(self, file: TextIO) -> None:
        self._file, self.rows = file, list[Row]()

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        print(told(row), flush=True)


def all_jobs(device: str) -> Iterator[Job]:
    """The most important first; what compiles for each shape comes last."""
    for cell in VERIFY_CELLS:
        yield Job(KINDS[cell.kind], cell, verify.contenders_of(cell), partial(verify.task_of, cell, device))
    for round_cell in ROUND_CELLS:
        task = partial(rounds.RoundTask, round_cell, rounds.fused_round, device)
        yield Job("round", round_cell, rounds.CONTENDERS, task, rounds.round_row)
    for contenders in (attention.QUICK, attention.SLOW):
        for one in attention_cells():
            build = partial(attention.AttentionTask, one, device)
            yield Job("tree_attention", one, contenders, build, needed_bytes=attention.needed_bytes(one))


def run_jobs(jobs: Iterable[Job], clock: Clock | None, record: Record, *, deadline: float, minutes: float) -> None:
    """deadline: on `time.monotonic`. Every job and contender gets its row, whatever becomes of it."""
    late = f"the run's {minutes:g} minutes were used up"
    for job in jobs:
        left = list(job.contenders)
        status, why = NOT_RUN, late
        if clock is None:
            status, why = NOT_TIMED, NO_GPU
        elif job.needed_bytes > (free := free_bytes()):
            why = f"does not fit: takes {job.needed_bytes:,} bytes, {free:,} are free"
        elif time.monotonic() <= deadline:
            try:
                task = job.task()
                while left and time.monotonic() <= deadline:
                    record.add(job.row(task, left[0], clock))
                    del left[0]
                    gc.collect()  # graphs, and with them their memory
            except Exception as error:  # inputs that the card cannot hold, for instance
                status, why = FAILED, f"its inputs: {type(error).__name__}: {one_line(error)}"
            task = None  # makes room for the next one's inputs
        for one in left:
            record.add(row_of(job.kernel, job.cell, one, status, why))


def free_bytes() -> int:
    """Of device memory; everywhere else enough."""
    if not torch.cuda.is_available():
        return 2**62
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def told(row: Row) -> str:
    """One line of a row."""
    if row["row"] == "ceiling":
        return f"{row['name']}: {row['value']:.4g} {row['unit']}"
    if row["row"] != "time":
        return " ".join(f"{name}={value}" for name, value in row.items() if name != "row")
    sizes = " ".join(f"{name}={row['cell'][name]}" for name in ("P", "N", "B"))
    result = f"{row['seconds']['median'] * 1e6:,.1f} us" if "seconds" in row else f"{row['status']}: {row['why']}"
    cost = f"{row['bytes']:,} bytes, {row['flops']:,} operations"
    return f"{row['kernel']}  {sizes}  {row['contender']}: {result} ({cost})"


def checked(minutes: float) -> Row:
    """The quick suite of the kernels, on the device, in processes of its own."""
    row: Row = {"row": "check", "name": "suites/kernels, quick", "status": NOT_RUN, "why": "", "seconds": 0.0}
    if DEVICE == "cpu" or minutes <= 0:
        return row | {"why": "asked for none" if minutes <= 0 else "there is no CUDA device: run pytest suites/kernels"}
    command = [sys.executable, "-m", "pytest", str(CHECKS), "--hypothesis-profile=quick", "-q"]
    command += ["-p", "no:cacheprovider", *(f"--ignore={CHECKS / name}" for name in NOT_CHECKED)]
    if importlib.util.find_spec("xdist") is not None:
        workers = min(MAX_WORKERS, os.cpu_count() or 1)
        command += ["-n", str(workers), "--dist", "worksteal"]
    started = time.monotonic()
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    child = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = child.communicate(timeout=60 * minutes)
        status, why = ("passed" if child.returncode == 0 else "failed"), ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        output, _ = child.communicate()
        status, why = "cut off", f"after {minutes:g} minutes; "
    lines = [line for line in output.splitlines() if line.strip()]
    failures = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    why += " / ".join([*failures[:5], *lines[-1:]])[:1500]
    return row | {"status": status, "why": why, "seconds": round(time.monotonic() - started, 1)}


def about(clock: Clock | None) -> Row:
    return {
        "row": "run",
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()} without CUDA",
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "python": platform.python_version(),
        "specbench": specbench.__version__,
        "method": "bytes and operations by formula, nothing timed" if clock is None else clock.method,
    }


def write_report(rows: Sequence[Row], folder: Path) -> None:
    (folder / PAGE).write_text(report.markdown(rows), encoding="utf-8")
    for name, figure in (("roofline", report.roofline_figure(rows)), ("peers", report.peer_figure(rows))):
        for kind in ("svg", "png"):
            (folder / f"{name}.{kind}").write_bytes(report.drawn(figure, kind))


def is_good(rows: Sequence[Row]) -> bool:
    """Whether nothing of ours was wrong or failed, and no check did."""
    bad = [row for row in rows if row["row"] == "time" and row["role"] == OWN and row["status"] in (WRONG, FAILED)]
    return not bad and all(row["status"] != "failed" for row in rows if row["row"] == "check")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specbench.suites.benchmark.kernels", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where rows, table and drawings go")
    parser.add_argument("--minutes", type=float, default=9.0, help="for all of it (default 9)")
    parser.add_argument("--check-minutes", type=float, default=3.5, help="of these for checks (default 3.5; 0: none)")
    parser.add_argument("--report", action="store_true", help="run nothing: table and drawings of the rows in DIR")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.report:
        rows = report.rows_of((args.out / RECORD).read_text("utf-8"))
        write_report(rows, args.out)
        return 0 if is_good(rows) else 1
    deadline = time.monotonic() + 60 * args.minutes - SPARE
    clock = CudaClock() if torch.cuda.is_available() else None
    with (args.out / RECORD).open("w", encoding="utf-8") as file:
        record = Record(file)
        record.add(about(clock))
        record.add(checked(args.check_minutes))
        gc.freeze()  # what is imported needs no looking at after each row
        try:
            with torch.no_grad():
                for row in [] if clock is None else ceilings(clock):
                    record.add({"row": "ceiling"} | row)
                run_jobs(all_jobs(DEVICE), clock, record, deadline=deadline, minutes=args.minutes)
        finally:
            gc.unfreeze()
            write_report(record.rows, args.out)
    return 0 if is_good(record.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
