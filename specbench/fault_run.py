"""Judges planted faults, each by the claim that must catch it, in worker processes; nothing is lost on the way.

A worker that dies, and a fault that takes too long, become results that say so, and another process goes on. What the
results come to, in words and in numbers, is `fault_report`'s.
"""

from __future__ import annotations

import importlib
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

import torch

from specbench import models
from specbench.claims import CLAIMS, DECODER_CLAIMS
from specbench.judge import Failed, Skipped, quiet_session
from specbench.loading import Target
from specbench.naming.evidence import Evidence
from specbench.naming.suspect import Suspect
from specbench.profiles import PROFILES
from specbench.reference.faults.fault import Fault
from specbench.watchdog import Watchdog

BANK = "specbench.reference.faults.bank"
PROFILE = PROFILES["standard"]
LIMIT = 300.0  # seconds that one fault may take, naming included
NUM_PARTS = 5  # of `--part auto`
# Processes that start afresh: what one fault leaves behind in a forked one, all the others would inherit.
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Naming:
    """What a failing case was called. fault_class, fault: of the first suspect; both empty where it was "unknown", the
    second also where structure alone spoke. rank: place of the first suspect of the right class, from 1; None where
    there is none."""

    fault_class: str = ""
    fault: str = ""
    rank: int | None = None


@dataclass(frozen=True)
class FaultResult:
    """One fault judged. claim: the one that must catch it; caught_by: the one that did, empty when it survived or was
    lost. remark: what went otherwise than planned.

    cases: judged to the failing one. seconds: what drawing and checking them took, apart from reducing and naming.
    nodes: drafted ones of the reduced case, None where there is no such case. full, without_copies, without_class: its
    name by the whole bank, by the bank without itself and its num_near_copies - 1 others, and without its whole class.
    """

    fault: str
    fault_class: str
    subtle: str
    claim: str
    caught_by: str = ""
    cases: int = 0
    seconds: float = 0.0
    seconds_total: float = 0.0
    nodes: int | None = None
    full: Naming = Naming()
    without_copies: Naming = Naming()
    without_class: Naming = Naming()
    num_near_copies: int = 0
    likely: str = ""
    replay: str = ""
    remark: str = ""
    is_lost: bool = False  # neither caught nor survived: the remark says why it could not be judged


def faults_of(bank: str) -> Mapping[str, Fault]:
    """bank: a module that holds FAULTS, faults by id."""
    faults: Mapping[str, Fault] = importlib.import_module(bank).FAULTS
    return faults


def choose(ids: Sequence[str], part: tuple[int, int] | None, *, bank: str = BANK) -> list[Fault]:
    """The faults of these ids (of all, if there are none), by class. ValueError names an unknown id. part: (n, m) takes
    every m-th of them from the n-th on, so that each part has its share of every class."""
    faults = faults_of(bank)
    for one in ids:
        if one not in faults:
            raise ValueError(models.unknown_name("fault", one, faults))
    wanted = [faults[one] for one in dict.fromkeys(ids)] or list(faults.values())
    chosen = sorted(wanted, key=lambda one: (one.fault_class, one.id))
    return chosen if part is None else chosen[part[0] - 1 :: part[1]]


def part_named(text: str, *, today: date) -> tuple[int, int]:
    """`2/5`, or `auto`: another fifth every day. ValueError says what is expected."""
    if text == "auto":
        return today.toordinal() % NUM_PARTS + 1, NUM_PARTS
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ValueError(f"--part {text!r} must be auto, or N/M with 1 <= N <= M")
    return int(number), int(count)


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_faults(
    faults: Sequence[Fault], *, seed: int, num_workers: int, bank: str = BANK, limit: float = LIMIT
) -> Iterator[FaultResult]:
    """Results as they come, one a fault. bank: the module that the workers find the faults in."""
    todo = deque(sorted(faults, key=lambda one: CLAIMS[one.claim].level))  # whole generations first: they take longest
    workers = [_Worker(bank, seed, limit) for _ in range(min(num_workers, len(todo)))]
    try:
        while todo or any(worker.fault for worker in workers):
            busy = [worker for worker in workers if worker.fault or not worker.is_ready]
            seconds = min(worker.seconds_left for worker in busy)
            answering = wait([one.connection for one in busy], timeout=None if math.isinf(seconds) else seconds)
            for worker in busy:
                if worker.connection in answering:
                    result = worker.take()
                elif worker.seconds_left <= 0:
                    result = worker.give_up()
                else:
                    continue
                if result is not None:
                    yield result
            for worker in workers:
                if todo and worker.is_ready and not worker.fault:
                    worker.give(todo.popleft())
    finally:
        for worker in workers:
            worker.close()


class _Worker:
    """A process that judges one fault after another, and is replaced when it dies or is ended. is_ready: it has loaded
    what it needs, which a fault's time is not to pay for."""

    def __init__(self, bank: str, seed: int, limit: float) -> None:
        self._bank, self._seed, self._limit = bank, seed, limit
        self.fault: Fault | None = None
        self.connection, self._process = self._started()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self._given + self._limit - time.monotonic()) if self.fault else math.inf

    def give(self, fault: Fault) -> None:
        self.fault, self._given = fault, time.monotonic()
        with suppress(OSError):  # a process that died idle: its end of the connection reads as closed at once
            self.connection.send(fault.id)

    def take(self) -> FaultResult | None:
        """The answer that has come, or what the end of the process leaves to say; None for one that is ready now."""
        try:
            result: FaultResult | None = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            return self._lost(f"its process ended with exit code {self._process.exitcode}")
        self.fault, self.is_ready = None, True
        return result

    def give_up(self) -> FaultResult:
        return self._lost(f"took more than {self._limit:g} s")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()

    def _lost(self, remark: str) -> FaultResult:
        if self.fault is None:
            raise RuntimeError(f"a worker process could not start: {remark}")
        result = _lost(self.fault, remark, seconds=time.monotonic() - self._given)
        self.close()
        self.fault = None
        self.connection, self._process = self._started()
        return result

    def _started(self) -> tuple[Connection, SpawnProcess]:
        self.is_ready = False
        ours, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_serve, args=(theirs, self._bank, self._seed), daemon=True)
        process.start()
        theirs.close()
        return ours, process


def _serve(connection: Connection, bank: str, seed: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started us ends us
    torch.set_num_threads(1)
    faults = faults_of(bank)
    connection.send(None)
    with suppress(EOFError):
        while True:
            fault = faults[connection.recv()]
            started = time.monotonic()
            try:
                result = judge_fault(fault, seed=seed, bank=bank)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                remark = f"judging it broke: {type(error).__name__}: {error}".partition("\n")[0]
                result = _lost(fault, remark, seconds=time.monotonic() - started)
            connection.send(result)


def judge_fault(fault: Fault, *, seed: int, bank: str = BANK) -> FaultResult:
    """Its own claim at standard; should that one not catch it, all others in their order, on the quick cases."""
    started = time.perf_counter()
    others = [claim for claim in DECODER_CLAIMS if claim != fault.claim]
    remark, cases, seconds = "", 0, 0.0
    for profile, claims in ((PROFILE, [fault.claim]), (PROFILES["quick"], others)):
        stopwatch = _Stopwatch()
        target = Target(f"{bank}:{fault.id}", fault.make(), make=fault.make)
        session = quiet_session(target, profile=profile, seed=seed, watchdog=stopwatch, naming=True)
        for claim in claims:
            stopwatch.start()
            try:
                record = session.judge(claim, fault.subject)
            except Skipped as reason:
                remark = f"{claim} was not tested: {reason}" if claim == fault.claim else remark
            except Failed:
                failed = session.run.find(claim, fault.subject)
                assert failed is not None
                return FaultResult(
                    *(fault.id, fault.fault_class, fault.subtle, fault.claim),
                    caught_by=claim,
                    cases=cases + failed.num_cases + 1,
                    seconds=seconds + stopwatch.seconds_of(failed.num_cases + 1),
                    nodes=failed.shrunk_drafts,
                    **_namings(fault, session.evidence),
                    likely=failed.likely,
                    replay=failed.replay,
                    remark=remark,
                    seconds_total=time.perf_counter() - started,
                )
            else:
                remark = f"{claim} holds" if claim == fault.claim else remark
                cases, seconds = cases + record.num_cases, seconds + record.seconds
    return FaultResult(
        *(fault.id, fault.fault_class, fault.subtle, fault.claim),
        cases=cases,
        seconds=seconds,
        remark=remark,
        seconds_total=time.perf_counter() - started,
    )


class _Stopwatch(Watchdog):
    """Notes when each case begins: what comes after the failing one is making sure, reducing and naming."""

    def __init__(self) -> None:
        super().__init__(0, print)
        self._begun: list[float] = []

    def start(self) -> None:
        self._begun = []
        self._started = time.perf_counter()

    def note_case(self, replay: str) -> None:
        self._begun.append(time.perf_counter())

    def seconds_of(self, num_cases: int) -> float:
        """From the start to the end of so many cases."""
        ended = self._begun[num_cases] if num_cases < len(self._begun) else time.perf_counter()
        return ended - self._started


def _namings(fault: Fault, evidence: Evidence | None) -> dict[str, Any]:
    """evidence: what the session kept of the failure."""
    if evidence is None:
        return {}
    near_copies = evidence.near_copies(fault.id) if fault.id in faults_of(BANK) else frozenset({fault.id})
    return {
        "full": _naming(fault, evidence.rank()),
        "without_copies": _naming(fault, evidence.rank(without=near_copies)),
        "without_class": _naming(fault, evidence.rank(without=near_copies, ignore_classes={fault.fault_class})),
        "num_near_copies": len(near_copies),
    }


def _naming(fault: Fault, suspects: Sequence[Suspect]) -> Naming:
    if not suspects:
        return Naming()
    ranks = (rank for rank, one in enumerate(suspects, 1) if one.fault_class == fault.fault_class)
    return Naming(suspects[0].fault_class, suspects[0].fault, next(ranks, None))


def _lost(fault: Fault, remark: str, *, seconds: float) -> FaultResult:
    return FaultResult(
        *(fault.id, fault.fault_class, fault.subtle, fault.claim), remark=remark, is_lost=True, seconds_total=seconds
    )
