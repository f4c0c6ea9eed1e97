"""One verification forward over a tree: what each row sees, where it stands, and what comes out."""

from collections.abc import Callable

import pytest


@pytest.mark.claim("tree.mask")
def test_a_row_sees_the_prefix_and_its_own_path(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("tree.positions")
def test_a_row_stands_at_prefix_length_plus_depth(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("tree.attention_weights")
def test_attention_mass_lies_on_the_path_only(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("tree.layers")
def test_every_layer_computes_what_plain_decoding_computes(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("tree.logits")
def test_every_node_has_the_logits_of_its_own_path(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("tree.noninterference")
def test_a_token_off_the_path_moves_no_bit(judge: Callable[[], None]) -> None:
    judge()


@pytest.mark.claim("tree.sensitivity")
def test_a_token_on_the_path_moves_logits_as_plain_decoding_does(judge: Callable[[], None]) -> None:
    judge()
