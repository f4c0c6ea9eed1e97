"""The cache between rounds: what a commit keeps and a rejection drops."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("kv.commit")
def test_a_commit_keeps_exactly_the_committed_tokens(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("kv.rollback")
def test_nothing_rejected_stays_behind(judge: Callable[[], None]) -> None:
    judge()
