"""What the stamps of a timed decoder cost it: `python -m specbench.bench.overhead [MODEL]`, on a quiet machine.

The same decoder with stamps and without them decodes the same prompts in turn; the ratio of their times is given with
its interval. A stamp is two clock reads and an append, so that on a model of any size nothing should be seen.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from specbench.bench.metrics import Interval, geometric_interval
from specbench.bench.rows import Setting
from specbench.bench.sides import MAX_NODES, OwnSide, load_own, make_drafter
from specbench.models import DEFAULT_MODEL, fetched
from specbench.reference.decoder import Decoder
from specbench.reference.layouts import LAYOUTS
from specbench.reference.steps import STEPS

LOOKUP = Setting("lookup 4", drafter="lookup", gamma=4)
PROMPTS = tuple(tuple(range(first, first + 40)) for first in range(100, 900, 50))
NUM, REPETITIONS = 24, 5  # tokens; of which the quickest counts


def overhead(model: Any, prompts: Sequence[Sequence[int]], *, num: int = NUM, setting: Setting = LOOKUP) -> Interval:
    """Seconds with stamps / seconds without, by prompt, each the quickest of REPETITIONS; which of the two goes first
    changes from time to time."""
    timed = OwnSide(model, setting)
    steps = replace(STEPS, flatten=LAYOUTS[setting.layout])
    bare = Decoder(
        model,
        make_drafter(setting, model),
        steps=steps,
        cache=setting.cache,
        max_nodes=MAX_NODES,
        max_depth=max(1, setting.gamma),
    )
    timed.generate(prompts[0], num)  # warms both up: they run the same operators
    ratios = []
    for prompt in prompts:
        seconds = {True: math.inf, False: math.inf}
        for repetition in range(REPETITIONS):
            for has_stamps in (repetition % 2 == 0, repetition % 2 == 1):
                start = time.perf_counter()
                if has_stamps:
                    timed.generate(prompt, num)
                else:
                    bare.generate(list(prompt), max_new_tokens=num)
                seconds[has_stamps] = min(seconds[has_stamps], time.perf_counter() - start)
        ratios.append(seconds[True] / seconds[False])
    return geometric_interval(ratios)


if __name__ == "__main__":
    chosen = fetched(sys.argv[1] if len(sys.argv) > 1 else DEFAULT_MODEL)
    found = overhead(load_own(chosen.path, torch.bfloat16), PROMPTS)
    print(f"{chosen.label}, bf16, {torch.get_num_threads()} threads, {LOOKUP.name}, {NUM} tokens, {found.n} prompts")
    print(f"with stamps / without: {found.value:.4f} [{found.low:.4f}, {found.high:.4f}]")
