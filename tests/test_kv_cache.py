"""Every cache kind against a list of rows kept by hand. What a kind does beyond that has a file of its own."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specbench.reference import autoregressive
from specbench.reference.caches.cache import GARBAGE
from specbench.reference.decoder import Decoder
from specbench.reference.drafters.ngram import NGramDrafter
from specbench.reference.kv_cache import (
    CACHES,
    QUANTISED,
    CacheSpec,
    ContiguousCache,
    LayerSpec,
    PreallocatedCache,
    new_cache,
)
from specbench.reference.layouts import flatten_causal
from specbench.reference.model import LlamaConfig, round_trip, tiny_llama
from specbench.types import Taps

NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 2, 3, 4
SPEC = CacheSpec.uniform(num_layers=NUM_LAYERS, num_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
every_kind = pytest.mark.parametrize("kind", CACHES)
EXACT = [kind for kind in CACHES if kind not in QUANTISED]
CONFIG = LlamaConfig(
    vocab_size=11, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)


def row(number: int, layer: int, is_value: bool) -> Tensor:
    """The content of row `number`, different in every layer, head, dimension, and between keys and values: [Hkv, D]."""
    first = ((number * NUM_LAYERS + layer) * 2 + is_value) * NUM_KV_HEADS * HEAD_DIM
    return torch.arange(first, first + NUM_KV_HEADS * HEAD_DIM, dtype=torch.float64).view(NUM_KV_HEADS, HEAD_DIM)


def rows(numbers: list[int], layer: int, is_value: bool, kind: str = "") -> Tensor:
    """kind: as read back from such a cache, rounded by the oracle's own rounding where it is a quantised one."""
    if kind in QUANTISED:
        return round_trip(kind, rows(numbers, layer, is_value))
    if not numbers:
        return torch.empty(NUM_KV_HEADS, 0, HEAD_DIM, dtype=torch.float64)
    return torch.stack([row(number, layer, is_value) for number in numbers], dim=1)  # [Hkv, M, D]


def append(cache, numbers: list[int]) -> list[tuple[Tensor, Tensor]]:
    return [cache.append(layer, rows(numbers, layer, False), rows(numbers, layer, True)) for layer in range(NUM_LAYERS)]


def filled(kind: str, num_rows: int):
    cache = CACHES[kind](SPEC)
    append(cache, list(range(num_rows)))
    return cache


def assert_holds(cache, numbers: list[int], kind: str = "") -> None:
    assert cache.length == len(numbers)
    for layer in range(NUM_LAYERS):
        keys, values = cache.rows(layer)
        assert torch.equal(keys, rows(numbers, layer, False, kind)), f"keys of layer {layer}"
        assert torch.equal(values, rows(numbers, layer, True, kind)), f"values of layer {layer}"


@every_kind
def test_a_new_cache_is_empty(kind):
    assert_holds(CACHES[kind](SPEC), [], kind)


@every_kind
def test_appended_rows_stand_behind_the_others(kind):
    cache = filled(kind, 3)
    append(cache, [7])
    append(cache, [5, 6])
    assert_holds(cache, [0, 1, 2, 7, 5, 6], kind)


@every_kind
def test_append_returns_what_rows_returns(kind):
    cache = filled(kind, 3)
    for layer, (keys, values) in enumerate(append(cache, [8, 9])):
        assert torch.equal(keys, rows([0, 1, 2, 8, 9], layer, False, kind))
        assert torch.equal(values, rows([0, 1, 2, 8, 9], layer, True, kind))


# Rows 1, 2, 5 move to 0, 1, 2: a copy in place would read what it has overwritten if it ran backwards.
@every_kind
@pytest.mark.parametrize(
    ("prefix_len", "kept", "expected"),
    [
        (0, [1, 2, 5], [1, 2, 5]),
        (4, [0, 3, 4], [0, 1, 2, 3, 4, 7, 8]),
        (4, [1, 2, 5], [0, 1, 2, 3, 5, 6, 9]),
        (4, [5, 0], [0, 1, 2, 3, 9, 4]),
        (4, [2, 1, 0], [0, 1, 2, 3, 6, 5, 4]),
        (4, [1, 1], [0, 1, 2, 3, 5, 5]),
        (4, [0], [0, 1, 2, 3, 4]),
        (4, [], [0, 1, 2, 3]),
        (4, [0, 1, 2, 3, 4, 5], list(range(10))),
        (0, [], []),
        (10, [], list(range(10))),
    ],
    ids=str,
)
def test_commit_keeps_the_prefix_and_the_named_rows_in_their_order(kind, prefix_len, kept, expected):
    cache = filled(kind, 10)
    cache.commit(prefix_len, kept)
    assert_holds(cache, expected, kind)


@every_kind
@pytest.mark.parametrize("length", [0, 1, 9, 10])
def test_truncate_keeps_the_first_rows(kind, length):
    cache = filled(kind, 10)
    cache.truncate(length)
    assert_holds(cache, list(range(length)), kind)


@every_kind
def test_rows_appended_after_a_truncation_replace_the_dropped_ones(kind):
    cache = filled(kind, 10)
    cache.truncate(2)
    append(cache, [20, 21])
    assert_holds(cache, [0, 1, 20, 21], kind)


@every_kind
@pytest.mark.parametrize("seed", range(20))
def test_any_history_of_calls_equals_the_same_history_of_a_list(kind, seed):
    generator = random.Random(seed)
    cache, expected, number = CACHES[kind](SPEC), [], 0
    for _ in range(30):
        call = generator.choice(["append", "append", "commit", "truncate"])
        if call == "append":
            new = list(range(number, number + generator.randrange(0, 6)))
            number += len(new)
            append(cache, new)
            expected += new
        elif call == "commit":
            prefix_len = generator.randint(0, len(expected))
            behind = expected[prefix_len:]
            kept = [generator.randrange(len(behind)) for _ in range(generator.randint(0, len(behind)))]
            cache.commit(prefix_len, kept)
            expected = expected[:prefix_len] + [behind[one] for one in kept]
        else:
            length = generator.randint(0, len(expected))
            cache.truncate(length)
            expected = expected[:length]
        assert_holds(cache, expected, kind)


@every_kind
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda cache: cache.commit(7, []), "prefix_len = 7 must be between 0 and the cache length 6"),
        (lambda cache: cache.commit(-1, []), "prefix_len = -1 must be between 0 and the cache length 6"),
        (lambda cache: cache.commit(4, [0, 2]), "rows[1] = 2 must be >= 0 and < 2 (rows behind the prefix)"),
        (lambda cache: cache.commit(4, [-1]), "rows[0] = -1 must be >= 0 and < 2 (rows behind the prefix)"),
        (lambda cache: cache.truncate(7), "length = 7 must be between 0 and the cache length 6"),
        (lambda cache: cache.truncate(-1), "length = -1 must be between 0 and the cache length 6"),
    ],
    ids=["prefix-beyond", "prefix-negative", "row-beyond", "row-negative", "length-beyond", "length-negative"],
)
def test_an_impossible_call_is_refused_and_changes_nothing(kind, call, message):
    cache = filled(kind, 6)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(cache)
    assert_holds(cache, list(range(6)), kind)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_a_contiguous_cache_holds_the_bytes_of_its_rows(num_rows):
    """Two layers, keys and values, 3 heads of 4 fp64 numbers a row: 2 x 2 x 3 x 4 x 8 bytes."""
    assert filled("contiguous", num_rows).nbytes == num_rows * 384


@pytest.mark.parametrize("drop", [lambda cache: cache.commit(1, [2]), lambda cache: cache.truncate(2)])
def test_a_contiguous_cache_gives_back_what_is_dropped(drop):
    """A view would keep the storage of all rows alive behind an honest-looking count."""
    cache = filled("contiguous", 6)
    drop(cache)
    held = sum(one.untyped_storage().nbytes() for layer in range(NUM_LAYERS) for one in cache.rows(layer))
    assert cache.nbytes == held == 2 * 384


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_a_preallocated_cache_holds_its_capacity_whatever_is_in_it(num_rows):
    cache = PreallocatedCache(SPEC, capacity=10)
    append(cache, list(range(num_rows)))
    assert cache.nbytes == 10 * 384


def test_a_preallocated_cache_takes_rows_up_to_its_capacity():
    cache = PreallocatedCache(SPEC, capacity=5)
    append(cache, [0, 1, 2])
    append(cache, [3, 4])
    assert_holds(cache, [0, 1, 2, 3, 4])


def test_a_preallocated_cache_refuses_a_row_beyond_its_capacity_and_stays_as_it_was():
    cache = PreallocatedCache(SPEC, capacity=5)
    append(cache, [0, 1, 2])
    with pytest.raises(ValueError, match=r"^cache rows 3\.\.5 exceed capacity 5: give a larger `capacity`$"):
        append(cache, [3, 4, 5])
    assert_holds(cache, [0, 1, 2])


def test_dead_rows_of_a_preallocated_cache_hold_garbage_not_zeros():
    """Zeros would forgive a reader who looks past the length."""
    cache = PreallocatedCache(SPEC, capacity=5)
    append(cache, [1, 2])
    cache.truncate(1)
    for part in (part for parts in cache._parts for part in parts):
        assert (part[:, 1:] != 0).all() and (part[:, 2:] == GARBAGE).all()


@every_kind
@pytest.mark.parametrize("garbage", [1e4, float("nan"), float("inf")])
def test_poison_in_storage_that_holds_no_row_is_never_visible_to_a_forward(kind, garbage):
    model = tiny_llama(replace(CONFIG, windows=(3, None)), seed=0)
    clean, dirty = model.new_cache(kind), model.new_cache(kind)
    for cache in (clean, dirty):
        model.forward(flatten_causal([1, 2, 3, 4, 5, 6], 0), cache)
        cache.truncate(5)
    dirty.poison(garbage)
    logits = [model.forward(flatten_causal([7, 8], 5), cache) for cache in (clean, dirty)]
    assert torch.equal(*logits)


@every_kind
def test_poison_leaves_the_rows_alone(kind):
    cache = filled(kind, 6)
    cache.truncate(5)
    cache.poison(float("nan"))
    assert_holds(cache, [0, 1, 2, 3, 4], kind)


@every_kind
def test_a_fork_and_its_origin_go_their_own_ways(kind):
    cache = filled(kind, 6)
    twin = cache.fork()
    append(cache, [10, 11])
    append(twin, [20])
    cache.commit(3, [4, 3])
    twin.commit(5, [1])
    third = twin.fork()
    third.truncate(2)
    append(third, [30])
    assert_holds(cache, [0, 1, 2, 11, 10], kind)
    assert_holds(twin, [0, 1, 2, 3, 4, 20], kind)
    assert_holds(third, [0, 1, 30], kind)


@every_kind
def test_poison_in_a_fork_does_not_reach_its_origin(kind):
    """Of the pages that both hold, one's dead rows are the other's live ones."""
    cache = filled(kind, 6)
    twin = cache.fork()
    twin.truncate(1)
    twin.poison(float("nan"))
    assert_holds(cache, [0, 1, 2, 3, 4, 5], kind)


@every_kind
def test_layers_may_have_heads_and_sizes_of_their_own(kind):
    layers = (LayerSpec(2, 4, 6), LayerSpec(1, 8, 2), LayerSpec(3, 2, 2, is_state=True))
    cache = CACHES[kind](CacheSpec(layers))
    new = [
        (torch.ones(one.num_heads, 3, one.key_dim).double(), torch.ones(one.num_heads, 3, one.value_dim).double())
        for one in layers
    ]
    for layer, (k, v) in enumerate(new):
        cache.append(layer, k, v)
    cache.commit(1, [1])
    for layer, (k, v) in enumerate(new):
        torch.testing.assert_close(cache.rows(layer), (k[:, :2], v[:, :2]))


@pytest.mark.parametrize("windows", [(), (3, 3), (4, None)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_kinds_that_store_rows_as_they_are_decode_alike(seed, windows):
    """Logits of every forward, not only tokens: a kind changes where rows lie and nothing else.

    Bit for bit, but for a ring that has let rows go: its products are shorter, so they are summed in another order.
    """
    model = tiny_llama(replace(CONFIG, windows=windows), seed=seed)
    seen = {}
    for kind in EXACT:
        decoder = Decoder(model, NGramDrafter(gamma=3, width=3), cache=kind)
        logits = []
        forward_tree = decoder.forward_tree

        def recording(tree, *, taps=None, forward_tree=forward_tree, logits=logits):
            logits.append(forward_tree(tree, taps=taps))
            return logits[-1]

        decoder.forward_tree = recording
        generation = decoder.generate([1, 2, 1, 2, 1], max_new_tokens=30)
        seen[kind] = (generation, torch.cat(logits))
    first, first_logits = seen["contiguous"]
    for kind, (generation, logits) in seen.items():
        assert generation == first
        torch.testing.assert_close(logits, first_logits, rtol=0, atol=1e-12 if kind == "ring" and windows else 0)
    assert first.tokens == autoregressive.generate(model, [1, 2, 1, 2, 1], max_new_tokens=30).tokens


@every_kind
def test_a_cache_filled_by_a_forward_has_the_rows_of_its_taps(kind):
    model, taps = tiny_llama(CONFIG, seed=0), Taps()
    cache = model.new_cache(kind)
    model.forward(flatten_causal([1, 2, 3], 0), cache, taps=taps)
    for layer, tap in enumerate(taps.layers):
        keys, values = cache.rows(layer)
        assert torch.equal(keys, tap.k) and torch.equal(values, tap.v)


def test_cache_kinds_are_found_by_name():
    assert (CACHES["contiguous"], CACHES["preallocated"]) == (ContiguousCache, PreallocatedCache)


def test_an_unknown_kind_is_refused_with_the_known_ones():
    message = f"cache kind 'paged' is unknown: choose one of {', '.join(sorted(CACHES))}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        new_cache("paged", SPEC)


# Two layers, 3 heads, keys and values of 4 numbers: 48 numbers a row, or 12 times 4 codes of a byte and a scale of 8.
@pytest.mark.parametrize(
    ("kind", "num_bytes"), [(kind, 48 * 8) for kind in EXACT] + [(kind, 12 * (4 + 8)) for kind in QUANTISED], ids=str
)
def test_a_row_takes_the_bytes_of_its_numbers(kind, num_bytes):
    assert filled(kind, 5).row_nbytes == num_bytes
