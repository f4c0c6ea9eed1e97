"""What forwards and drafts cost on this machine, in seconds: for the report, and for a drafter that adapts to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

from specbench.protocols import LanguageModel, SeededCoins
from specbench.reference.drafters.adaptive import ARMS, Arm, Costs, draft_by, members_of
from specbench.reference.drafters.folders import states_of
from specbench.reference.layouts import flatten_causal
from specbench.types import GREEDY, TargetState

WIDTHS = (1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 16, 17, 33, 65)  # rows of a forward
CONTEXT, REPETITIONS = 128, 7


def forward_seconds(model: LanguageModel, tokens: Sequence[int], widths: Sequence[int] = WIDTHS) -> dict[int, float]:
    """Of one forward by its rows, behind CONTEXT rows of `tokens`, repeated as need be; widths in turn, the median of
    each."""
    text = [*tokens] * (1 + (CONTEXT + max(widths)) // len(tokens))
    cache = model.new_cache("preallocated")
    model.forward(flatten_causal(text[:CONTEXT], 0), cache)
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    settle = settling(model)
    for repetition in range(REPETITIONS + 1):
        for width in widths:
            flat = flatten_causal(text[CONTEXT : CONTEXT + width], CONTEXT)
            settle()
            start = time.perf_counter()
            model.forward(flat, cache)
            settle()
            if repetition:  # the first is a warm-up
                seconds[width].append(time.perf_counter() - start)
            cache.truncate(CONTEXT)
    return {width: median(some) for width, some in seconds.items()}


def arm_costs(
    model: Any, learned: Any, forward: Mapping[int, float], tokens: Sequence[int], *, arms: Sequence[Arm] = ARMS
) -> Costs:
    """Of the arms of an adaptive drafter over `learned`: each drafts REPETITIONS times behind a text that grows by two
    tokens a time, as it does in decoding."""
    longest = CONTEXT + 2 * (REPETITIONS + 1)
    text = ([*tokens] * (1 + longest // len(tokens)))[:longest]
    states = states_of(model, [*text, text[0]], None, layers=getattr(learned, "state_layers", ()))
    members = members_of(learned, arms)
    settle, drafting = settling(model), []
    for arm in arms:
        spent = [0.0]
        for repetition in range(REPETITIONS + 1 if arm.member else 0):
            context = text[: CONTEXT + 2 * repetition]
            state = TargetState(states[: len(context) - 1])
            settle()
            start = time.perf_counter()
            draft_by(members, arm, context, sampling=GREEDY, coins=SeededCoins(0), target_state=state)
            settle()
            if repetition:  # the first reads the whole text
                spent.append(time.perf_counter() - start)
        drafting.append(median(spent[1:] or spent))
    return Costs(forward, tuple(drafting))


def settling(model: Any) -> Callable[[], object]:
    """Waits for the device of a model, where it has one to wait for."""
    return torch.cuda.synchronize if torch.device(getattr(model, "device", "cpu")).type == "cuda" else _nothing


def _nothing() -> None:
    pass
