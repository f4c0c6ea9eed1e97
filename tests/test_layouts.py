"""Both layouts of a tree, written out by hand, and equal where it matters: logits, keys, values."""

from __future__ import annotations

import random

import pytest
import torch

from specbench.reference.layouts import LAYOUTS, flatten_causal, flatten_path_batch, flatten_tree_mask
from specbench.reference.model import LlamaConfig, tiny_llama
from specbench.tree import DraftTree, chain, root_only

CONFIG = LlamaConfig(
    vocab_size=19, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4
)
MODEL = tiny_llama(CONFIG, seed=0)
PREFIX = [3, 1, 4, 1, 5]

# 0 ─┬─ 1 ─┬─ 3
#    │     └─ 4
#    └─ 2 ── 5
SMALL = DraftTree.of([7, 3, 9, 4, 5, 4], [-1, 0, 0, 1, 1, 2])
# Two children, three grandchildren each, two leaves each; tokens repeat across branches.
PARENTS_232 = [-1, 0, 0, 1, 1, 1, 2, 2, 2, *(node for node in range(3, 9) for _ in range(2))]
TREE_232 = DraftTree.of([(5 * node + node // 4) % 19 for node in range(21)], PARENTS_232)


def random_tree(num_nodes: int, seed: int) -> DraftTree:
    generator = random.Random(seed)
    parents = [-1, *(generator.randrange(node) for node in range(1, num_nodes))]
    return DraftTree.of([generator.randrange(19) for _ in parents], parents)


TREES = {
    "root": root_only(7),
    "chain": chain([7, 3, 3, 7]),
    "star": DraftTree.of([7, 1, 2, 3], [-1, 0, 0, 0]),
    "small": SMALL,
    "2-3-2": TREE_232,
    "duplicates": DraftTree.of([7, 3, 3, 4, 4], [-1, 0, 0, 1, 2]),
    **{f"random{seed}": random_tree(24, seed) for seed in range(6)},
}
every_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
every_layout = pytest.mark.parametrize("flatten", LAYOUTS.values(), ids=LAYOUTS)


def test_tree_mask_gives_each_node_one_row():
    flat = flatten_tree_mask(SMALL, 10)
    assert flat.tokens.tolist() == [7, 3, 9, 4, 5, 4]
    assert flat.position_ids.tolist() == [10, 11, 11, 12, 12, 12]
    assert flat.node_of_row.tolist() == flat.row_of_node.tolist() == [0, 1, 2, 3, 4, 5]
    assert flat.mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 0, 0],
        [1, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_path_batch_writes_every_path_out_whole():
    """Paths 0-1-3, 0-1-4 and 0-2-5; nodes 0 and 1 are read off the first path that holds them."""
    flat = flatten_path_batch(SMALL, 10)
    assert flat.tokens.tolist() == [7, 3, 4, 7, 3, 5, 7, 9, 4]
    assert flat.position_ids.tolist() == [10, 11, 12] * 3
    assert flat.node_of_row.tolist() == [0, 1, 3, 0, 1, 4, 0, 2, 5]
    assert flat.row_of_node.tolist() == [0, 1, 7, 2, 5, 8]
    assert flat.mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 1, 1, 1],
    ]


def test_path_batch_of_a_2_3_2_tree_has_twelve_paths_of_four_rows():
    flat = flatten_path_batch(TREE_232, 5)
    assert flat.num_rows == 48 and flat.position_ids.tolist() == [5, 6, 7, 8] * 12
    assert flat.node_of_row.view(12, 4)[-1].tolist() == [0, 2, 8, 20]


def test_a_known_run_of_tokens_is_causal():
    flat = flatten_causal([7, 3, 7], 4)
    assert flat.tokens.tolist() == [7, 3, 7] and flat.position_ids.tolist() == [4, 5, 6]
    assert flat.mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@every_layout
def test_a_chain_is_laid_out_as_a_causal_run(flatten):
    flat, causal = flatten(chain([7, 3, 7]), 4), flatten_causal([7, 3, 7], 4)
    assert all(
        torch.equal(getattr(flat, name), getattr(causal, name))
        for name in ("tokens", "position_ids", "mask", "node_of_row", "row_of_node")
    )


@every_layout
@every_tree
def test_the_row_of_a_node_is_a_row_of_that_node(tree, flatten):
    flat = flatten(tree, 3)
    assert flat.node_of_row[flat.row_of_node].tolist() == list(range(tree.num_nodes))


@every_layout
@every_tree
def test_every_row_carries_its_nodes_token_and_position(tree, flatten):
    flat = flatten(tree, 3)
    nodes = flat.node_of_row.tolist()
    assert flat.tokens.tolist() == [tree.token_list[node] for node in nodes]
    assert flat.position_ids.tolist() == [3 + len(tree.path_to(node)) - 1 for node in nodes]


@every_layout
@every_tree
def test_every_row_sees_its_nodes_path_once_and_nothing_else(tree, flatten):
    flat = flatten(tree, 3)
    for row, node in enumerate(flat.node_of_row.tolist()):
        seen = flat.node_of_row[flat.mask[row]].tolist()
        assert seen == tree.path_to(node), f"row {row} of node {node}"


@every_layout
@every_tree
def test_logits_equal_plain_forwards_on_each_nodes_own_path(tree, flatten):
    cache = MODEL.new_cache()
    MODEL.forward(flatten_causal(PREFIX, 0), cache)
    flat = flatten(tree, len(PREFIX))
    actual = MODEL.forward(flat, cache)
    expected = torch.stack([MODEL.logits([*PREFIX, *tree.path_tokens(node)])[-1] for node in flat.node_of_row.tolist()])
    assert (actual - expected).abs().max() < 1e-9 * expected.std()


@every_tree
def test_both_layouts_leave_the_same_keys_and_values_for_every_node(tree):
    held = []
    for flatten in LAYOUTS.values():
        cache = MODEL.new_cache()
        MODEL.forward(flatten_causal(PREFIX, 0), cache)
        flat = flatten(tree, len(PREFIX))
        MODEL.forward(flat, cache)
        held.append([one[:, len(PREFIX) + flat.row_of_node] for layer in range(2) for one in cache.rows(layer)])
    assert all((one - other).abs().max() < 1e-9 * one.std() for one, other in zip(*held, strict=True))


def test_layouts_are_found_by_name():
    assert (LAYOUTS["tree_mask"], LAYOUTS["path_batch"]) == (flatten_tree_mask, flatten_path_batch)
