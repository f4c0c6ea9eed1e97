"""Right decoders before the suite, which must accuse none: every control on every tiny subject and claim, again and
again with other seeds, until enough cases have been judged.

Worker processes judge a few cells (claim and subject) of one control at a time. What is drawn depends on the seed
alone, not on who draws it when.
"""

from __future__ import annotations

import itertools
import json
import multiprocessing
import random
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path

from specbench.claims import DECODER_CLAIMS
from specbench.fixed import fixed_cases, sweep_cases
from specbench.judge import Failed, RunSession, Skipped, quiet_session
from specbench.loading import load_target
from specbench.profiles import PROFILES
from specbench.record import EQUAL, NOISE, NOT_TESTED
from specbench.reference.controls import registry
from specbench.subjects import Unavailable

PROFILE = PROFILES["quick"]
NUM_PARTS = 16  # of a pass over all cells: short tasks, so that the cores end together
NAMES: dict[str, str] = {one: f"{registry.__name__}:{one}" for one in registry.CONTROLS}


@dataclass(frozen=True)
class Accusation:
    """A claim that was found not to hold. message: the whole text of the failure, its replay in the last line."""

    claim: str
    subject: str
    replay: str
    message: str


@dataclass
class Outcome:
    """What judging a target, or a part of it, has come to. num_cases: drawn ones; num_fixed: those of a list, the same
    in every pass. claims: those that were judged on some subject. verdicts: cells by verdict, accused ones not among
    them."""

    num_cases: int = 0
    num_fixed: int = 0
    claims: set[str] = field(default_factory=set)
    verdicts: Counter[str] = field(default_factory=Counter)
    accusations: list[Accusation] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Outcome) -> None:
        self.num_cases += other.num_cases
        self.num_fixed += other.num_fixed
        self.claims |= other.claims
        self.verdicts += other.verdicts
        self.accusations += other.accusations
        self.seconds += other.seconds

    def __str__(self) -> str:
        verdicts = ", ".join(f"{self.verdicts[one]:4d} {one}" for one in (EQUAL, NOISE, NOT_TESTED))
        accused = f"{len(self.accusations)} accusation{'s' * (len(self.accusations) != 1)}"
        cases = f"{self.num_cases:6d} cases and {self.num_fixed:5d} fixed ones"
        return f"{cases}, {len(self.claims):2d} claims: {verdicts}; {accused}"


@dataclass(frozen=True)
class Task:
    """One part of the cells of a target. seed: the same for all parts of a pass. max_cases: no cell is begun beyond."""

    target: str
    seed: int
    part: int
    max_cases: int


def run(
    names: Mapping[str, str] = NAMES,
    *,
    num_cases: int,
    num_workers: int,
    seed: int | None = None,
    json_path: Path | None = None,
) -> int:
    """Prints every accusation in full and a line a target; returns how many accusations there are.

    names: what a line calls a target, and the target as `load_target` takes it. num_cases: drawn ones, over all of
    them, spread evenly. num_workers: processes; 1 works in this one. seed: None draws one.
    """
    started = time.perf_counter()
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    num_workers = min(num_workers, len(names))
    width = max(map(len, names))
    print(f"right decoders: {len(names)}, cases: {num_cases}, seed: {seed}, processes: {num_workers}", flush=True)

    def done(name: str, outcome: Outcome) -> None:
        for one in outcome.accusations:
            print(f"\n{name} is accused:\n{one.message}\n", flush=True)
        print(f"{name.ljust(width)}  {outcome}", flush=True)

    outcomes = judge_all(names, num_cases=num_cases, num_workers=num_workers, seed=seed, done=done)
    total = Outcome()
    for one in outcomes.values():
        total.add(one)
    print(f"{'total'.ljust(width)}  {total} ({time.perf_counter() - started:.0f} s)", flush=True)
    if json_path is not None:
        found = {name: _as_data(one) for name, one in outcomes.items()}
        data = {"schema": 1, "seed": seed, "targets": found, "total": _as_data(total)}
        json_path.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
    return len(total.accusations)


def judge_all(
    names: Mapping[str, str],
    *,
    num_cases: int,
    num_workers: int,
    seed: int,
    done: Callable[[str, Outcome], None] = lambda name, outcome: None,
) -> dict[str, Outcome]:
    """Outcomes by name. done: told of each as soon as that target has its share of the cases."""
    judging = {name: _Judging(name, target, seed, -(-num_cases // len(names))) for name, target in names.items()}
    if num_workers == 1:
        for name, one in judging.items():
            while (task := one.next_task()) is not None:
                one.outcome.add(judge(task))
            done(name, one.outcome)
    else:
        waiting, running = list(judging), dict[Future[Outcome], str]()
        with ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn")) as pool:
            while waiting or running:
                while waiting and len(running) < num_workers:
                    name = waiting.pop(0)
                    if (task := judging[name].next_task()) is None:
                        done(name, judging[name].outcome)
                    else:
                        running[pool.submit(judge, task)] = name
                for ended in wait(running, return_when=FIRST_COMPLETED).done:
                    name = running.pop(ended)
                    judging[name].outcome.add(ended.result())
                    waiting.insert(0, name)
    return {name: one.outcome for name, one in judging.items()}


class _Judging:
    """Hands out the tasks of a target, one at a time, until its share of cases is judged or a whole pass held none."""

    def __init__(self, name: str, target: str, seed: int, share: int) -> None:
        self.outcome = Outcome()
        self._target = target
        self._share = share
        self._parts = self._passes(name, seed)

    def next_task(self) -> Task | None:
        left = self._share - self.outcome.num_cases
        part = next(self._parts, None) if left > 0 else None
        return None if part is None else Task(self._target, *part, max_cases=left)

    def _passes(self, name: str, seed: int) -> Iterator[tuple[int, int]]:
        num_before = -1
        for number in itertools.count():
            if self.outcome.num_cases == num_before:
                return
            num_before = self.outcome.num_cases
            own = zlib.crc32(f"{seed} {name} {number}".encode())
            yield from ((own, part) for part in range(NUM_PARTS))


def judge(task: Task) -> Outcome:
    """In a worker. Which cells make a part is drawn by the seed, so that a short run has some of every kind."""
    started, outcome = time.perf_counter(), Outcome()
    session = _session(task.target, task.seed)
    cells = [(claim, subject) for subject in session.subjects for claim in DECODER_CLAIMS]
    random.Random(task.seed).shuffle(cells)
    for claim, subject in cells[task.part :: NUM_PARTS]:
        if outcome.num_cases >= task.max_cases:
            break
        try:
            verdict = session.judge(claim, subject).verdict
            outcome.verdicts[verdict] += 1
            outcome.claims.add(claim)
        except Skipped:
            outcome.verdicts[NOT_TESTED] += 1
        except Failed as failure:
            outcome.accusations.append(Accusation(claim, subject, session.run.claims[-1].replay, str(failure)))
            outcome.claims.add(claim)
        num_judged, num_fixed = session.run.claims[-1].num_cases, _num_fixed(session, claim, subject)
        outcome.num_cases += max(0, num_judged - num_fixed)
        outcome.num_fixed += min(num_judged, num_fixed)
    outcome.seconds = time.perf_counter() - started
    return outcome


def _num_fixed(session: RunSession, claim: str, subject: str) -> int:
    column = session.subjects[subject]
    if isinstance(column, Unavailable):
        return 0
    return len([*(fixed_cases(claim, column, PROFILE) or []), *sweep_cases(claim, column, PROFILE)])


@lru_cache(maxsize=1)
def _session(target: str, seed: int) -> RunSession:
    """Kept for the next part of the same pass."""
    return quiet_session(load_target(target), profile=PROFILE, seed=seed)


def _as_data(outcome: Outcome) -> dict[str, object]:
    return {**asdict(outcome), "claims": sorted(outcome.claims), "verdicts": dict(outcome.verdicts)}
