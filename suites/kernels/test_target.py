"""The claims about a tree-attention kernel, of whoever wrote it: `pytest suites/kernels --target ./mine.py:attention`.

Without a target this file is left out (`conftest`), and our own kernels are tested.
"""

from collections.abc import Callable

import pytest


@pytest.mark.claim("attention.out")
def test_every_row_averages_over_its_prefix_and_its_path(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.batch")
def test_a_sequence_of_a_batch_gets_what_it_gets_alone(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.any_order")
def test_parents_may_stand_behind_their_children(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.unused_rows")
def test_a_row_without_a_node_gets_zeros(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.paged")
def test_rows_are_found_in_their_pages(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.window")
def test_the_window_is_counted_by_depth(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.soft_cap")
def test_scores_are_capped(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.alibi")
def test_slopes_count_depth(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.quantised")
def test_codes_are_read_with_their_scales(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.strides")
def test_numbers_are_read_where_their_strides_say(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.dead_memory")
def test_dead_memory_is_not_read(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("attention.lse")
def test_the_lse_is_that_of_the_scores(judge: Callable[[], None]) -> None:
    judge()
