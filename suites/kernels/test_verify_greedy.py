"""`kernels.verify_greedy` against `reference.verify.greedy_walk`."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from specbench.kernels.verify_greedy import verify_greedy
from specbench.suites.kernels.cases import GreedyCase, greedy_cases
from specbench.suites.kernels.comparisons import asked_walk, tells_nan, told_walk, walks_rightly
from specbench.suites.kernels.drawing import drawn
from specbench.tree import DraftTree


@drawn(600)
@given(case=greedy_cases())
def test_the_walk_follows_the_lowest_id_among_the_maxima(case: GreedyCase) -> None:
    assert walks_rightly(verify_greedy, case)


@pytest.mark.parametrize("vocab_size", [32_000, 128_256, 262_144])
@pytest.mark.parametrize("place", ["first", "last", "both", "middle"])
def test_the_winner_of_a_large_vocabulary(vocab_size: int, place: str) -> None:
    winners = {"first": [0], "last": [vocab_size - 1], "both": [vocab_size - 1, 0], "middle": [vocab_size // 2 + 1]}
    logits = torch.full((2, vocab_size), -3.0, dtype=torch.bfloat16)
    logits[:, winners[place]] = 2.0
    result = asked_walk(verify_greedy, [DraftTree.of([0, min(winners[place])], [-1, 0])], logits)
    assert told_walk(result, 0) == ((1,), min(winners[place]))


def test_rows_need_not_lie_side_by_side() -> None:
    wide = torch.zeros(3, 40)
    wide[:, 21:] = 99.0  # columns that are no tokens, as padding of a vocabulary is
    wide[0, 5], wide[1, 6], wide[2, 7] = 1.0, 1.0, 1.0
    assert told_walk(asked_walk(verify_greedy, [DraftTree.of([0, 5, 6], [-1, 0, 1])], wide[:, :20]), 0) == ((1, 2), 7)


@pytest.mark.parametrize("row", [0, 1, 2])
def test_nan_ends_the_walk_there(row: int) -> None:
    assert tells_nan(verify_greedy, row)


def test_minus_infinity_everywhere_is_a_tie_of_all() -> None:
    logits = torch.full((1, 5000), -torch.inf)
    assert told_walk(asked_walk(verify_greedy, [DraftTree.of([0], [-1])], logits, max_depth=3), 0) == ((), 0)


def test_a_walk_ends_at_the_largest_depth() -> None:
    logits = torch.zeros(4, 7)
    result = asked_walk(verify_greedy, [DraftTree.of([0, 0, 0, 0], [-1, 0, 1, 2])], logits, max_depth=2)
    assert told_walk(result, 0) == ((1, 2), 0)
