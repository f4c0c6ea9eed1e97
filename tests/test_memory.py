"""reference.memory: the formulas agree with bytes counted during the real forward, and the counter counts."""

from __future__ import annotations

import gc
from itertools import product

import pytest
import torch

from specbench.reference.layouts import flatten_tree_mask
from specbench.reference.memory import LiveBytes, verify_bytes
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.tree import DraftTree
from specbench.types import Taps

CONFIGS = {
    "grouped, wide feed-forward": LlamaConfig(64, 64, 512, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16),
    "large vocabulary": LlamaConfig(8000, 32, 48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16),
    "many heads": LlamaConfig(31, 32, 48, num_layers=2, num_heads=8, num_kv_heads=8, head_dim=8),
    "one layer": LlamaConfig(31, 32, 48, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8),
    "window": LlamaConfig(31, 32, 48, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, windows=(8, 8)),
}
SIZES = [(nodes, prefix) for nodes, prefix in product((1, 16, 64, 200), (0, 100, 1000)) if nodes > 1 or prefix]
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


def counted(
    config: LlamaConfig, *, num_nodes: int, prefix_len: int, dtype: torch.dtype, taps: bool = False
) -> LiveBytes:
    """A forward of a binary tree behind a prefix, its peak counted from what was held before it."""
    model = tiny_llama(config, seed=0).to(dtype)
    tree = DraftTree.of([0] * num_nodes, [-1] + [(node - 1) // 2 for node in range(1, num_nodes)])
    with LiveBytes() as live:
        cache = model.new_cache("contiguous")
        rows = torch.zeros(config.num_kv_heads, prefix_len, config.head_dim, dtype=dtype)
        for layer in range(config.num_layers):
            cache.append(layer, rows, rows)
        flat = flatten_tree_mask(tree, prefix_len)
        before = live.restart()
        model.forward(flat, cache, taps=Taps() if taps else None)
        live.peak -= before
    return live


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_formula_is_within_ten_percent_of_what_is_counted(name: str, dtype: str) -> None:
    """Over trees and prefixes of all sizes; a single row behind nothing is bytes, and left out."""
    ratios = {}
    for num_nodes, prefix_len in SIZES:
        sizes = {"num_nodes": num_nodes, "prefix_len": prefix_len, "dtype": DTYPES[dtype]}
        ratios[num_nodes, prefix_len] = verify_bytes(CONFIGS[name], **sizes).peak / counted(CONFIGS[name], **sizes).peak
    assert {size: ratio for size, ratio in ratios.items() if not 0.9 <= ratio <= 1.1} == {}


@pytest.mark.parametrize(
    ("name", "num_nodes", "prefix_len", "moment"),
    [
        ("grouped, wide feed-forward", 16, 0, "feed_forward"),
        ("large vocabulary", 64, 0, "logits"),
        ("many heads", 64, 1000, "attention"),
    ],
)
def test_each_moment_is_the_worst_somewhere(name: str, num_nodes: int, prefix_len: int, moment: str) -> None:
    """Otherwise the grid above would not judge all terms of the formula."""
    memory = verify_bytes(CONFIGS[name], num_nodes=num_nodes, prefix_len=prefix_len, dtype=torch.float64)
    assert memory.peak == memory.cache + getattr(memory, moment)


def test_no_mask_over_the_prefix_is_ever_made() -> None:
    """Masks stay N x N, however long the prefix."""
    live = counted(CONFIGS["many heads"], num_nodes=64, prefix_len=1000, dtype=torch.float64)
    assert live.largest[torch.bool] == 64 * 64


def test_taps_do_make_the_mask_over_the_prefix() -> None:
    """The counter sees such a mask where there is one."""
    live = counted(CONFIGS["many heads"], num_nodes=64, prefix_len=1000, dtype=torch.float64, taps=True)
    assert live.largest[torch.bool] >= 64 * 1064


def test_a_tensor_counts_while_it_lives() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(10, dtype=torch.float64)
        dropped = torch.zeros(100, dtype=torch.float64)
        del dropped
        gc.collect()
        seen = (live.peak, live.now, len(kept))
    assert seen == (880, 80, 10)


def test_views_and_writes_in_place_count_once() -> None:
    with LiveBytes() as live:
        kept = torch.zeros(10, dtype=torch.float64)
        kept.view(2, 5).add_(1.0)
    assert (live.peak, kept[0].item()) == (80, 1.0)


def test_what_was_there_before_is_not_counted() -> None:
    old = torch.zeros(10, dtype=torch.float64)
    with LiveBytes() as live:
        old.view(2, 5).mul_(2.0)
    assert live.peak == 0
