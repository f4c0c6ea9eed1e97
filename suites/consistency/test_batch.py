"""Several requests or several ranks at once: nothing that one row or rank does shows in another."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("verify.batch")
def test_a_tree_is_decided_in_a_batch_as_alone(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("batch.solo")
def test_every_row_of_a_batch_equals_its_solo_run(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("batch.join")
def test_rows_that_join_late_or_end_early_equal_their_solo_runs(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("ranks.agree")
def test_ranks_in_lock_step_choose_alike(judge: Callable[[], None]) -> None:
    judge()
