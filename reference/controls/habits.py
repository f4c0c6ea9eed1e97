"""Habits of a loop that are nobody's business: prompts in small pieces, a last round that is not kept, rows that change
places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specbench.reference.batch import BatchRow, BatchSteps
from specbench.reference.controls.control import Control
from specbench.reference.decoder import Decoder
from specbench.reference.target import ReferenceTarget
from specbench.types import Round


class _InPieces(Decoder):
    def extend(self, tokens: Sequence[int]) -> None:
        start, length = 0, 1
        while start < max(len(tokens), 1):
            super().extend(tokens[start : start + length])
            start, length = start + length, 2 * length


class _LastRoundDropped(Decoder):
    """Whoever goes on has the tokens of that round computed again, as part of the text."""

    def round(self, context: list[int], **keywords: Any) -> tuple[Round, str | None]:
        num_cached = self.cache_len
        one, finish_reason = super().round(context, **keywords)
        if finish_reason is not None:
            self.truncate(num_cached)
        return one, finish_reason


def _changing_places(steps: BatchSteps) -> BatchSteps:
    def join(active: list[BatchRow], joining: list[BatchRow]) -> list[BatchRow]:
        return steps.join(joining, active)

    def condense(rows: list[BatchRow]) -> list[BatchRow]:
        return steps.condense(rows[::-1])

    return replace(steps, join=join, condense=condense)


CONTROLS = (
    Control(
        "prompt_in_pieces",
        "known tokens are cached in pieces of 1, 2, 4, 8 ...",
        "a row sees the rows before it, in the cache as in its own forward",
        lambda: ReferenceTarget(decoder=_InPieces),
    ),
    Control(
        "last_round_dropped",
        "when a text ends, the rows of its last round are dropped",
        "the output is there already, and a next turn is told the whole text",
        lambda: ReferenceTarget(decoder=_LastRoundDropped),
    ),
    Control(
        "rows_change_places",
        "rows that arrive stand before those that are there, and the order is turned round in every round",
        "each row brings its own cache, drafter and text along",
        lambda: ReferenceTarget(plant_batch=_changing_places),
    ),
)
