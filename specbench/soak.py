"""Many seeds of the quick cases in one process: a suite that cries wolf once in a thousand runs is found here.

Tiny models only, every claim on every column, a fresh session a seed. Nothing is drawn twice and nothing is kept.
"""

from __future__ import annotations

import random
import time

from specbench.claims import DECODER_CLAIMS
from specbench.judge import Failed, Skipped, quiet_session
from specbench.loading import Target
from specbench.profiles import PROFILES
from specbench.record import NOISE


def soak(target: Target, *, num_seeds: int, first_seed: int | None = None) -> int:
    """Prints a line a seed and the message of every failure; returns how many claims failed. first_seed: seeds count up
    from it; None draws them afresh."""
    num_failed = 0
    for number in range(num_seeds):
        seed = random.SystemRandom().randrange(2**32) if first_seed is None else first_seed + number
        started, failures, verdicts = time.perf_counter(), 0, {"holds": 0, "noise": 0, "not tested": 0}
        session = quiet_session(target, profile=PROFILES["quick"], seed=seed)
        for subject in session.subjects:
            for claim in DECODER_CLAIMS:
                try:
                    record = session.judge(claim, subject)
                    verdicts["noise" if record.verdict == NOISE else "holds"] += 1
                except Skipped:
                    verdicts["not tested"] += 1
                except Failed as failure:
                    failures += 1
                    print(f"\nseed {seed}: {failure}\n", flush=True)
        num_failed += failures
        cases = sum(one.num_cases for one in session.run.claims)
        counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items())
        seconds = time.perf_counter() - started
        print(
            f"{number + 1}/{num_seeds} seed {seed}: {cases} cases, {counted}, {failures} failed, {seconds:.0f} s",
            flush=True,
        )
    return num_failed
