"""A whole round, launch by launch and as one CUDA graph: seconds of the host's clock, from the call to the last result.

The model is the reference's own, random, of a small Llama's shape. That rounds are right is proven in `suites/kernels`;
here both ways of launching must emit the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.suites.benchmark.kernels.cells import AttentionCell, RoundCell
from specbench.suites.benchmark.kernels.clock import Call, Clock
from specbench.suites.benchmark.kernels.rows import OWN, Contender, NotHere, measured

DEEPEST = 8  # nodes of a path


class RoundTask:
    """round: with step, replay, capture, read, and the tensors between rounds (`kernels.round.Round`)."""

    kernel = "round"

    def __init__(self, cell: RoundCell, round_of: Callable[[Any, RoundCell], Any], device: str) -> None:
        self.cell, self.device = cell, device
        config = LlamaConfig(cell.V, cell.hidden, cell.inner, cell.L, cell.Hq, cell.Hkv, cell.D)
        self.round = round_of(tiny_llama(config, seed=0).to(torch.bfloat16, device), cell)
        generator = torch.Generator().manual_seed(cell.B)
        self.round.prefill(torch.randint(cell.V, (cell.B, cell.P + 1), generator=generator).tolist())
        self.round.tokens[:, 1:] = torch.randint(cell.V, (cell.B, cell.N - 1), generator=generator).to(device)
        self.round.parents.copy_(torch.tensor(AttentionCell(cell.P, cell.N, cell.B).parents))
        self._state = [(one, one.clone()) for one in (self.round.tokens, self.round.prefix_lens)]
        self.checked = "graph and launches emit the same"
        self._emitted: Any = None

    def reset(self) -> None:
        """As it was after the prefill."""
        for one, before in self._state:
            one.copy_(before)

    def wrong(self, answer: Any) -> str:
        if self._emitted is None:
            self._emitted = answer
        return "" if answer == self._emitted else f"emits {answer}, must emit {self._emitted}"


def _step(task: RoundTask) -> tuple[Call, Callable[[Any], Any]]:
    task.reset()
    return task.round.step, lambda result: task.round.read()


def _replay(task: RoundTask) -> tuple[Call, Callable[[Any], Any]]:
    if task.device == "cpu":
        raise NotHere("a CUDA graph needs a CUDA device")
    task.reset()
    task.round.capture()
    return task.round.replay, lambda result: task.round.read()


CONTENDERS = (Contender("launch by launch", OWN, _step), Contender("CUDA graph", OWN, _replay))


def fused_round(model: Any, cell: RoundCell) -> Any:
    from specbench.kernels.round import Round

    return Round(
        model, num_sequences=cell.B, max_nodes=cell.N, max_depth=DEEPEST, capacity=cell.P + 2 * cell.N + DEEPEST + 1
    )


def round_row(task: RoundTask, contender: Contender, clock: Clock | None, **how: Any) -> dict[str, Any]:
    """Each time from the same state, by the host's clock."""

    def once(call: Call) -> float:
        task.reset()
        assert clock is not None
        seconds = clock.wall(call)
        task.round.read()
        return seconds

    return measured(task, contender, clock, once=once, **how)
