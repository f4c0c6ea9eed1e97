"""Long prefixes and large trees."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("tree.long")
def test_thousands_of_tokens_and_hundreds_of_nodes_change_nothing(judge: Callable[[], None]) -> None:
    judge()
