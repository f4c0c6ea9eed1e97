"""The cache between rounds: what a commit keeps and a rejection drops."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("kv.commit")
def test_a_commit_keeps_exactly_the_committed_tokens(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.rollback")
def test_nothing_rejected_stays_behind(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.machine")
def test_any_sequence_of_operations_leaves_the_committed_rows(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.dead_rows")
def test_nothing_dead_reaches_an_answer(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.fork")
def test_a_fork_and_its_origin_do_not_see_each_other(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.pages")
def test_pages_are_held_for_committed_rows_alone(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.chunked")
def test_a_prompt_in_pieces_builds_the_cache_of_a_whole_one(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.abort")
def test_an_aborted_round_leaves_no_trace(judge: Callable[[], None]) -> None:
    judge()
