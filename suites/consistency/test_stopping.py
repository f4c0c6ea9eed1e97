"""Where an output ends, what a later turn finds, and what changes logits before a token is picked."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("stop.eos")
def test_the_first_end_token_ends_the_output(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("stop.max_tokens")
def test_the_token_limit_holds_inside_an_accepted_run(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("stop.sequences")
def test_a_stop_sequence_ends_the_output_across_rounds(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("stop.min_tokens")
def test_no_end_comes_before_the_least_length(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("stop.every_index")
def test_end_and_limit_hold_at_every_index(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("stop.resume")
def test_a_turn_goes_on_from_where_the_last_one_was_stopped(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("processors.penalties")
def test_penalties_follow_each_rows_own_history(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("processors.bad_words")
def test_forbidden_sequences_are_never_said(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("processors.grammar")
def test_each_row_is_judged_in_its_own_grammar_state(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("processors.history")
def test_a_processor_sees_every_row_once_with_its_history(judge: Callable[[], None]) -> None:
    judge()
