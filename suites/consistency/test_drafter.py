"""The drafter alone, a decoder that drafts for itself, and what is said of acceptance."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("drafter.tree")
def test_a_draft_is_a_tree_below_the_last_token(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("drafter.budget")
def test_a_draft_keeps_to_its_budget(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("drafter.law")
def test_drafts_are_drawn_from_the_law_they_name(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("drafter.no_peeking")
def test_a_draft_depends_on_its_context_alone(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("drafter.deterministic")
def test_the_same_question_has_the_same_draft(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("drafter.state")
def test_a_used_drafter_drafts_like_a_fresh_one(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("drafter.self_draft")
def test_a_target_accepts_its_own_drafts(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("metrics.acceptance")
def test_the_rounds_add_up_to_the_output(judge: Callable[[], None]) -> None:
    judge()
