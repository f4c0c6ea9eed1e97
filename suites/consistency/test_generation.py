"""Acceptance and whole generations: the walk, the tokens, progress, cost, and the lossy threshold rule."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("greedy.walk")
def test_a_draft_is_judged_by_its_parents_row(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("greedy.lossless")
def test_the_output_is_plain_decodings(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("greedy.repeatable")
def test_the_same_request_gets_the_same_answer(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("progress")
def test_every_round_emits_a_token(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("cost.rows")
def test_a_round_forwards_its_nodes_and_root_only(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("threshold.consistency")
def test_threshold_acceptance_does_what_it_says(judge: Callable[[], None]) -> None:
    judge()
