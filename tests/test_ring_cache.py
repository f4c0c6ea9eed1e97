"""Sliding windows: what a ring keeps, what it gives up, and that a cut below it is paid by encoding the text again."""

from __future__ import annotations

import re

import pytest
import torch

from specbench.reference import autoregressive
from specbench.reference.caches.cache import LayerSpec
from specbench.reference.caches.ring import ROOM, RingCache
from specbench.reference.kv_cache import CacheSpec, RowsLost
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree, root_only

WINDOW = 4
SPEC = CacheSpec((LayerSpec(1, 2, 2, window=WINDOW), LayerSpec(1, 2, 2)))
CONFIG = LlamaConfig(
    vocab_size=13,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
    windows=(3, None, 5),
)


def append(cache: RingCache, numbers: list[int]) -> None:
    new = torch.tensor(numbers, dtype=torch.float64)[None, :, None].expand(1, len(numbers), 2)
    for layer in range(2):
        cache.append(layer, new, -new)


def held(cache: RingCache, layer: int) -> list[int]:
    keys, values = cache.rows(layer)
    assert torch.equal(keys, -values)
    return [int(one) for one in keys[0, :, 0]]


def stepped(num_rows: int) -> RingCache:
    """Rows 0..num_rows-1, one at a time."""
    cache = RingCache(SPEC)
    for number in range(num_rows):
        append(cache, [number])
    return cache


def test_a_layer_with_a_window_keeps_its_last_rows_and_one_without_keeps_all():
    cache = stepped(20)
    assert held(cache, 0) == list(range(20))[-(WINDOW - 1 + ROOM) :]
    assert held(cache, 1) == list(range(20))


def test_the_new_rows_of_a_block_see_what_the_window_needs_and_each_other():
    cache = stepped(20)
    append(cache, list(range(100, 110)))
    assert held(cache, 0) == [17, 18, 19, *range(100, 110)]


def test_a_long_block_makes_room_for_itself_and_gives_it_back():
    cache = stepped(20)
    before = cache.nbytes
    append(cache, list(range(100, 130)))
    grown = cache.nbytes
    cache.commit(20, [])
    append(cache, [20])
    # The layer without a window has one row more; the ring is as small as it was.
    assert grown > before and cache._rings[0].size == WINDOW - 1 + ROOM


def test_siblings_that_share_a_position_do_not_share_a_slot():
    """Rows 0 to 7 of a block may all stand at one position: the slot follows the row."""
    cache = stepped(3)
    append(cache, list(range(50, 58)))
    cache.commit(3, [6])
    assert held(cache, 0)[-1] == 56


def test_a_commit_reads_rows_before_it_overwrites_them():
    cache = stepped(9)
    append(cache, list(range(50, 56)))
    cache.commit(9, [1, 2, 5])
    assert held(cache, 0)[-6:] == [6, 7, 8, 51, 52, 55]


def test_a_cut_within_what_is_held_is_free():
    cache = stepped(20)
    cache.truncate(17)
    append(cache, [77])
    assert held(cache, 0)[-4:] == [14, 15, 16, 77] and cache.length == 18


def test_a_cut_below_the_ring_is_refused_and_changes_nothing():
    cache = stepped(20)
    message = "rows 9..12 have left the ring of a layer with window 4: encode the committed tokens again"
    with pytest.raises(RowsLost, match=f"^{re.escape(message)}$"):
        cache.truncate(12)
    assert held(cache, 0) == list(range(13, 20)) and cache.length == 20


def test_a_cut_to_nothing_needs_no_row():
    cache = stepped(20)
    cache.truncate(0)
    append(cache, [5])
    assert held(cache, 0) == [5]


def test_a_window_of_one_keeps_room_only():
    cache = RingCache(CacheSpec((LayerSpec(1, 2, 2, window=1), LayerSpec(1, 2, 2))))
    for number in range(9):
        append(cache, [number])
    assert held(cache, 0) == [5, 6, 7, 8]


@pytest.mark.parametrize("length", range(24))
def test_a_session_can_be_cut_back_to_any_length(length):
    """What the ring has let go is encoded again from the committed tokens."""
    model = tiny_llama(CONFIG, seed=0)
    session = TreeSession(model, cache="ring")
    text = [(7 * idx + idx * idx) % 13 for idx in range(24)]
    session.prefill(text[:12])
    for token in text[12:]:
        session.forward_tree(root_only(token))
        session.commit([])
    session.truncate(length)
    tree = DraftTree.of([3, 4, 5, 6], [-1, 0, 0, 2])
    expected = autoregressive.score_tree_naive(model, text[:length], tree)
    torch.testing.assert_close(session.forward_tree(tree), expected.logits, rtol=0, atol=1e-12)


def test_a_cut_across_commits_encodes_the_committed_path_again():
    """The tokens of rejected drafts are not part of the text."""
    model = tiny_llama(CONFIG, seed=0)
    session = TreeSession(model, cache="ring")
    session.prefill([1, 2])
    for root in (3, 6, 9):
        session.forward_tree(DraftTree.of([root, root + 1, root + 2, root + 3], [-1, 0, 0, 2]))
        session.commit([2, 3])
    session.truncate(6)
    expected = autoregressive.score_tree_naive(model, [1, 2, 3, 5, 6, 6], root_only(8))
    torch.testing.assert_close(session.forward_tree(root_only(8)), expected.logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_drafts", [1, 8, 40])
def test_kv_of_a_session_is_the_committed_end_while_a_forward_is_pending(num_drafts):
    session = TreeSession(tiny_llama(CONFIG, seed=0), cache="ring")
    session.prefill([idx % 13 for idx in range(15)])
    session.forward_tree(DraftTree.of([idx % 13 for idx in range(num_drafts + 1)], [-1, *[0] * num_drafts]))
    plain = TreeSession(tiny_llama(CONFIG, seed=0))
    plain.prefill([idx % 13 for idx in range(15)])
    for layer, window in enumerate((3, 15 + 1, 5)):
        for actual, expected in zip(session.kv(layer), plain.kv(layer), strict=True):
            assert actual.shape[1] >= window - 1
            torch.testing.assert_close(actual, expected[:, 15 - actual.shape[1] :], rtol=0, atol=1e-12)
