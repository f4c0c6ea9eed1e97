"""Pages: who holds how many, what a fork shares and when it stops, and that order in the pool means nothing."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from specbench.reference.caches.paged import PagedCache, PagePool
from specbench.reference.kv_cache import CacheSpec
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.reference.session import TreeSession
from specbench.tree import DraftTree, root_only

SPEC = CacheSpec.uniform(num_layers=2, num_heads=1, head_dim=2)
CONFIG = LlamaConfig(
    vocab_size=11, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
every_size = pytest.mark.parametrize("page_size", [1, 4, 16])


def append(cache: PagedCache, num_rows: int) -> None:
    first = cache.length
    new = torch.arange(first, first + num_rows, dtype=torch.float64)[None, :, None].expand(1, num_rows, 2)
    for layer in range(2):
        cache.append(layer, new, -new)


def pages(num_rows: int, page_size: int) -> int:
    return -(-num_rows // page_size)


@every_size
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 5, 15, 16, 17, 33])
def test_a_sequence_holds_the_pages_of_its_rows(page_size, num_rows):
    cache = PagedCache(SPEC, page_size=page_size)
    append(cache, num_rows)
    assert cache.pages_in_use == pages(num_rows, page_size)


# A cut to one row below, at and above the edge of a page.
@every_size
@pytest.mark.parametrize("delta", [-1, 0, 1])
def test_a_cut_gives_back_the_pages_behind_it(page_size, delta):
    cache = PagedCache(SPEC, page_size=page_size)
    append(cache, 3 * page_size)
    cache.truncate(2 * page_size + delta)
    assert cache.pages_in_use == pages(2 * page_size + delta, page_size)


@every_size
def test_a_commit_gives_back_the_pages_of_rejected_rows(page_size):
    cache = PagedCache(SPEC, page_size=page_size)
    append(cache, 40)
    cache.commit(5, [0, 30, 34])
    assert cache.pages_in_use == pages(8, page_size)


def test_a_fork_holds_no_page_of_its_own_until_somebody_writes():
    cache = PagedCache(SPEC, page_size=4)
    append(cache, 6)
    twin = cache.fork()
    shared = cache.pages_in_use
    append(twin, 1)  # row 6, in the half-filled page
    written = cache.pages_in_use
    append(cache, 1)  # the other one is now its only holder and needs no copy
    assert (shared, written, cache.pages_in_use) == (2, 3, 3)


def test_the_last_holder_gives_a_shared_page_back():
    cache = PagedCache(SPEC, page_size=4)
    append(cache, 8)
    twin, third = cache.fork(), cache.fork()
    in_use = []
    for one in (twin, cache, third):
        one.truncate(0)
        in_use.append(third.pages_in_use)
    assert in_use == [2, 2, 0]


@every_size
@pytest.mark.parametrize("seed", range(10))
def test_any_history_of_forks_keeps_the_balance(page_size, seed):
    """Reference counts are what the tables say, and every page is either held or free."""
    generator = random.Random(seed)
    family = [PagedCache(SPEC, page_size=page_size)]
    for _ in range(60):
        one = generator.choice(family)
        call = generator.choice(["append", "append", "commit", "truncate", "fork"])
        if call == "append":
            append(one, generator.randrange(0, 2 * page_size + 3))
        elif call == "commit":
            prefix_len = generator.randint(0, one.length)
            num_behind = one.length - prefix_len
            one.commit(prefix_len, [generator.randrange(num_behind) for _ in range(generator.randint(0, num_behind))])
        elif call == "truncate":
            one.truncate(generator.randint(0, one.length))
        elif len(family) < 5:
            family.append(one.fork())
        pool = one._pool
        named = [page for cache in family for page in cache._table]
        assert [named.count(page) for page in range(len(pool.references))] == pool.references
        assert sorted([*pool._free, *set(named)]) == list(range(len(pool.references)))
        assert all(len(cache._table) == pages(cache.length, page_size) for cache in family)


def test_pages_are_handed_out_in_no_order():
    """A table whose next page is the last one plus one would forgive whoever counts slots instead of looking up."""
    pool = PagePool(SPEC, page_size=4, num_pages=16)
    order = [pool.allocate() for _ in range(16)]
    assert sorted(order) == list(range(16))
    assert sum(second == first + 1 for first, second in itertools.pairwise(order)) <= 3


def test_a_page_is_not_released_twice():
    pool = PagePool(SPEC, page_size=4)
    page = pool.allocate()
    pool.release(page)
    with pytest.raises(ValueError, match=rf"^page {page} is free and cannot be released again$"):
        pool.release(page)


@every_size
def test_a_session_shares_pages_with_its_fork_and_both_decode_as_alone(page_size):
    model = tiny_llama(CONFIG, seed=0)
    session = TreeSession(model, cache=f"paged_{page_size}")
    session.prefill([1, 2, 3, 4, 5])
    twin = session.fork()
    shared = session.pages_in_use
    tree = DraftTree.of([6, 7, 8, 9], [-1, 0, 0, 2])
    session.forward_tree(tree)
    session.commit([2, 3])
    twin.forward_tree(tree)
    twin.commit([1])
    alone = []
    for tokens in ([1, 2, 3, 4, 5, 6, 8, 9], [1, 2, 3, 4, 5, 6, 7]):
        other = TreeSession(model)
        other.prefill(tokens)
        alone.append(other.forward_tree(root_only(10)))
    assert shared == pages(5, page_size)
    for one, expected in zip((session, twin), alone, strict=True):
        torch.testing.assert_close(one.forward_tree(root_only(10)), expected, rtol=0, atol=1e-12)


@every_size
def test_a_session_that_is_reset_holds_no_page(page_size):
    session = TreeSession(tiny_llama(CONFIG, seed=0), cache=f"paged_{page_size}")
    session.prefill([1, 2, 3])
    session.forward_tree(DraftTree.of([4, 5, 6], [-1, 0, 0]))
    session.reset()
    assert (session.pages_in_use, session.page_size) == (0, page_size)
