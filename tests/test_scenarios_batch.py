"""Scenario S4 of the catalogue of real faults, named after what it proves. Small, scripted, the same every time."""

from __future__ import annotations

import pytest
import torch

from specbench.banks import TinyBank
from specbench.cases import BATCH_LAYOUTS, BatchCase, BatchRequest, CommitRound
from specbench.checks.batch import check_join, check_solo, drafter_of
from specbench.claims import Violation
from specbench.clock import Clock
from specbench.loading import Target
from specbench.record import ClaimRecord
from specbench.reference.faults.bank import FAULTS
from specbench.reference.kv_cache import CACHES
from specbench.reference.target import ReferenceTarget
from specbench.subjects import Subject
from specbench.types import Request
from specbench.watchdog import Watchdog

CHAIN = (-1, 0, 1, 2)
ACCEPTS_ALL, ACCEPTS_ONE, ACCEPTS_NONE = (CommitRound((0, 1, 2, 3), CHAIN, node) for node in (3, 1, 0))
LAST_SIBLING = CommitRound((0, 4, 5, 6, 7), (-1, 0, 0, 0, 3), 4)  # off the first rows of the block
# Three prompts of unequal length. Accepted in turn: all, none, one; nothing is drafted; the last sibling's path, all.
# The second row ends first, so that the batch is condensed around it.
ROWS = (
    BatchRequest((3, 1, 4, 1, 5, 9, 2, 6, 5), 12, rounds=(ACCEPTS_ALL, ACCEPTS_NONE, ACCEPTS_ONE)),
    BatchRequest((5, 8), 3),
    BatchRequest((2, 7, 1), 11, rounds=(LAST_SIBLING, ACCEPTS_ALL)),
)
PAIR = ROWS[:2]


def subject_on(target: ReferenceTarget) -> Subject:
    bank = TinyBank("fp64", torch.float64)
    return Subject(Target("it", target), bank, clock=Clock(), watchdog=Watchdog(0, print))


@pytest.mark.parametrize("rows", [ROWS, PAIR], ids=["three", "two"])
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("layout", BATCH_LAYOUTS)
def test_rows_of_unequal_prompts_accepts_and_ends_each_equal_their_solo_run(
    layout: str, kind: str, rows: tuple[BatchRequest, ...]
) -> None:
    record = ClaimRecord("batch.solo", "tiny-fp64")
    check_solo(subject_on(ReferenceTarget()), BatchCase(cache=kind, rows=rows, batch_layout=layout), record)
    assert (record.num_tokens, record.num_differing) == (sum(row.max_new_tokens for row in rows), 0)


def test_the_scenario_accepts_what_it_scripts() -> None:
    """All, none, one, all, then no room to draft; plain steps; the last sibling and its child, all."""
    subject, case = subject_on(ReferenceTarget()), BatchCase(rows=ROWS)
    requests = [Request(row.prompt, row.max_new_tokens) for row in ROWS]
    generations = subject.open(case, drafter=drafter_of(subject, case, requests)).generate_batch(requests)
    assert [[len(one.path) for one in each.rounds] for each in generations] == ACCEPTED


ACCEPTED = [[3, 0, 1, 3, 0], [0, 0, 0], [2, 3, 2, 0]]

# Each of these is right on rows that are alike.
RAGGED_FAULTS = [
    "batch_minimum",
    "padding_accepted",
    "padding_visible",
    "first_rows_path",
    "stale_slots",
]


@pytest.mark.parametrize("fault", RAGGED_FAULTS)
def test_every_fault_of_raggedness_shows_in_the_scenario(fault: str) -> None:
    with pytest.raises(Violation):
        check_join(subject_on(FAULTS[fault].make()), BatchCase(rows=ROWS), ClaimRecord("batch.join", "tiny-fp64"))
