"""Temperatures above 0: the law of what is emitted, exact where it can be gone through, by evidence elsewhere."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("greedy.temperature_zero")
def test_temperature_zero_is_greedy_whatever_the_coins(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.exact")
def test_a_round_emits_the_law_of_the_target(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.params")
def test_a_round_emits_the_law_under_sampling_parameters(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.support")
def test_no_token_of_probability_zero_is_emitted(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.acceptance_bound")
def test_no_more_is_accepted_than_a_lossless_rule_can(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.q")
def test_own_drafts_and_own_verifier_emit_the_law_of_the_target(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.joint")
def test_sampled_texts_follow_the_joint_law(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.rows")
def test_rows_of_a_sampled_batch_are_independent_and_right(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.accepted")
def test_sampled_generations_keep_no_more_than_a_lossless_rule_can(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("law.seed")
def test_a_seed_decides_the_text(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("sampler.law")
def test_a_sampler_draws_from_the_law_that_is_asked_for(judge: Callable[[], None]) -> None:
    judge()
