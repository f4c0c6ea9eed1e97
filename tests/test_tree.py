"""DraftTree: what it refuses, and what it derives from tokens and parents."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import torch

from specbench.tree import DraftTree, chain, root_only

# 0 ─┬─ 1 ─┬─ 3
#    │     └─ 4 ── 6
#    └─ 2 ── 5
PARENTS = [-1, 0, 0, 1, 1, 2, 4]
TOKENS = [7, 3, 9, 4, 5, 4, 1]
TREE = DraftTree.of(TOKENS, PARENTS)
MASK = [
    [1, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0],
    [1, 0, 1, 0, 0, 0, 0],
    [1, 1, 0, 1, 0, 0, 0],
    [1, 1, 0, 0, 1, 0, 0],
    [1, 0, 1, 0, 0, 1, 0],
    [1, 1, 0, 0, 1, 0, 1],
]


def random_parents(num_nodes: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [-1, *(generator.randrange(node) for node in range(1, num_nodes))]


# ---- what is refused


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "tokens is empty: a tree has at least its root, the last committed token"),
        ([1, 2], [-1], "parents has 1 entries, must match tokens (2)"),
        ([1], [-1, 0], "parents has 2 entries, must match tokens (1)"),
        ([1, 2], [0, 0], "parents[0] = 0 must be -1 (node 0 is the root)"),
        ([1, 2, 3], [-1, 0, -1], "parents[2] = -1 must be >= 0 (only node 0 is a root)"),
        ([1, 2, 3], [-1, 0, -7], "parents[2] = -7 must be >= 0 (only node 0 is a root)"),
        ([1, 2, 3, 4, 5, 6], [-1, 0, 1, 5, 0, 0], "parents[3] = 5 must be < 3 (parents precede children)"),
        ([1, 2, 3, 4], [-1, 0, 1, 3], "parents[3] = 3 must be < 3 (parents precede children)"),
        ([-1], [-1], "tokens[0] = -1 must be >= 0 (a token id)"),
        ([4, 4, -2], [-1, 0, 0], "tokens[2] = -2 must be >= 0 (a token id)"),
    ],
)
def test_a_malformed_tree_is_refused_by_argument_value_and_expectation(tokens, parents, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DraftTree.of(tokens, parents)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (torch.tensor([[1, 2]]), "tokens has shape [1, 2], must be one-dimensional [N]"),
        (torch.tensor(1), "tokens has shape [], must be one-dimensional [N]"),
        (torch.tensor([1.0, 2.0]), "tokens has dtype torch.float32, must hold integers"),
        ([1.5, 2.0], "tokens has dtype torch.float32, must hold integers"),
        (torch.tensor([True, False]), "tokens has dtype torch.bool, must hold integers"),
    ],
)
def test_tokens_that_are_no_vector_of_integers_are_refused(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DraftTree(values, [-1, 0])


def test_an_unknown_proposal_is_refused_with_the_list_of_known_ones():
    message = "proposal = 'greedy' must be one of deterministic, iid, without_replacement"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DraftTree([1], [-1], proposal="greedy")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("draft_probs", "message"),
    [
        (torch.ones(2), "draft_probs has shape [2], must be [2, V]"),
        (torch.ones(3, 5), "draft_probs has shape [3, 5], must be [2, V]"),
        (torch.ones(2, 5, dtype=torch.int64), "draft_probs has dtype torch.int64, must be a floating type"),
        (torch.ones(2, 4), "tokens[1] = 4 must be < 4 (columns of draft_probs)"),
    ],
)
def test_draft_probs_that_do_not_fit_the_tree_are_refused(draft_probs, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        DraftTree([9, 4], [-1, 0], draft_probs)


def test_the_root_may_lie_outside_the_draft_vocabulary():
    """A reduced draft vocabulary: the root was not drawn from q, so q needs no column for it."""
    assert DraftTree([9, 4], [-1, 0], torch.full((2, 5), 0.2)).draft_probs.shape == (2, 5)


@pytest.mark.parametrize(
    "values", [[7, 3], (7, 3), torch.tensor([7, 3], dtype=torch.int32), np.array([7, 3], dtype=np.uint8)]
)
def test_tokens_of_any_integer_kind_are_stored_as_int64_on_the_cpu(values):
    tree = DraftTree(values, [-1, 0])
    assert (tree.tokens.dtype, tree.tokens.device.type, tree.tokens.tolist()) == (torch.int64, "cpu", [7, 3])


def test_a_tree_does_not_change_with_the_tensor_it_was_made_from():
    tokens = torch.tensor([7, 3])
    tree = DraftTree(tokens, [-1, 0])
    tokens[1] = 5
    assert tree.tokens.tolist() == tree.token_list == [7, 3]


def test_fields_of_a_tree_cannot_be_assigned():
    with pytest.raises(AttributeError):
        TREE.tokens = torch.tensor([1])  # type: ignore[misc]


# ---- what is derived


def test_ancestor_mask_is_the_one_written_by_hand():
    assert TREE.ancestor_mask.int().tolist() == MASK and TREE.ancestor_mask.dtype == torch.bool


def test_tree_mask_lets_every_node_see_the_whole_prefix():
    assert TREE.tree_mask(2).int().tolist() == [[1, 1, *row] for row in MASK]


def test_tree_mask_without_a_prefix_is_the_ancestor_mask():
    assert torch.equal(TREE.tree_mask(0), TREE.ancestor_mask)


def test_depth_counts_the_edges_from_the_root():
    assert TREE.depth.tolist() == [0, 1, 1, 2, 2, 2, 3]


def test_positions_are_prefix_plus_depth_so_siblings_share_one():
    assert TREE.position_ids(10).tolist() == [10, 11, 11, 12, 12, 12, 13]


def test_children_come_in_index_order():
    assert [TREE.children(node) for node in range(7)] == [[1, 2], [3, 4], [5], [], [6], [], []]


def test_leaves_are_the_nodes_without_children():
    assert TREE.leaves() == [3, 5, 6]


def test_paths_run_from_the_root_to_each_leaf():
    assert TREE.paths() == [[0, 1, 3], [0, 2, 5], [0, 1, 4, 6]]


def test_path_to_a_node_and_its_tokens_include_both_ends():
    assert (TREE.path_to(6), TREE.path_tokens(6)) == ([0, 1, 4, 6], [7, 3, 5, 1])


def test_path_to_the_root_is_the_root():
    assert (TREE.path_to(0), TREE.path_tokens(0)) == ([0], [7])


def test_num_drafts_does_not_count_the_root():
    assert (TREE.num_nodes, TREE.num_drafts) == (7, 6)


@pytest.mark.parametrize("path", [[], [1], [2], [1, 3], [1, 4, 6], [2, 5]])
def test_a_run_from_a_child_of_the_root_downwards_is_a_path(path):
    assert TREE.is_path(path)


@pytest.mark.parametrize(
    "path", [[0], [0, 1], [3], [1, 5], [1, 6], [4, 1], [1, 1], [1, 2], [7], [-1], [1, 4, 7]], ids=str
)
def test_anything_else_is_no_path(path):
    assert not TREE.is_path(path)


def test_with_token_changes_one_token_and_keeps_the_shape():
    changed = TREE.with_token(5, 8)
    assert (changed.token_list, changed.parent_list) == ([7, 3, 9, 4, 5, 8, 1], PARENTS)


def test_with_token_leaves_the_original_alone():
    TREE.with_token(5, 8)
    assert TREE.token_list == TOKENS


def test_with_token_drops_probabilities_that_no_longer_describe_the_tree():
    tree = DraftTree([0, 1], [-1, 0], torch.full((2, 2), 0.5), "iid").with_token(1, 0)
    assert (tree.draft_probs, tree.proposal) == (None, "deterministic")


def test_a_chain_has_width_one():
    tree = chain([5, 6, 7, 5])
    assert (tree.token_list, tree.parent_list) == ([5, 6, 7, 5], [-1, 0, 1, 2])


def test_the_mask_of_a_chain_is_causal():
    assert chain([5, 6, 7]).ancestor_mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


def test_a_chain_of_one_token_is_the_root_alone():
    assert chain([5]) == root_only(5)


def test_the_root_alone_is_a_whole_tree():
    tree = root_only(5)
    assert (tree.num_drafts, tree.ancestor_mask.tolist(), tree.depth.tolist()) == (0, [[True]], [0])
    assert (tree.paths(), tree.leaves(), tree.children(0)) == ([[0]], [0], [])


def test_the_mask_of_a_star_shows_each_leaf_the_root_and_itself():
    star = DraftTree.of([1, 2, 2, 3], [-1, 0, 0, 0])
    assert star.ancestor_mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize("seed", range(4))
def test_ancestor_mask_of_1024_random_nodes_equals_walking_up_the_parents(seed):
    parents = random_parents(1024, seed)
    expected = torch.zeros(1024, 1024, dtype=torch.bool)
    for node in range(1024):
        ancestor = node
        while ancestor != -1:
            expected[node, ancestor] = True
            ancestor = parents[ancestor]
    assert torch.equal(DraftTree.of([0] * 1024, parents).ancestor_mask, expected)


@pytest.mark.parametrize("seed", range(4))
def test_depth_of_random_nodes_is_the_number_of_ancestors(seed):
    tree = DraftTree.of([0] * 200, random_parents(200, seed))
    assert tree.depth.tolist() == (tree.ancestor_mask.sum(dim=1) - 1).tolist()


@pytest.mark.parametrize("seed", range(4))
def test_every_random_path_to_a_node_is_a_path(seed):
    tree = DraftTree.of([0] * 100, random_parents(100, seed))
    assert all(tree.is_path(tree.path_to(node)[1:]) for node in range(100))


# ---- equality


def test_trees_with_equal_tokens_and_parents_are_equal_and_hash_alike():
    assert len({DraftTree.of(TOKENS, PARENTS), DraftTree(torch.tensor(TOKENS), torch.tensor(PARENTS))}) == 1


HALVES = torch.full((2, 2), 0.5)


@pytest.mark.parametrize(
    "other",
    [
        DraftTree.of([0, 0], [-1, 0]),
        DraftTree.of([0, 1, 1], [-1, 0, 0]),
        DraftTree.of([0, 1, 1], [-1, 0, 1]),
        DraftTree([0, 1], [-1, 0], HALVES),
        DraftTree([0, 1], [-1, 0], proposal="iid"),
    ],
    ids=["tokens", "length", "parents", "draft_probs", "proposal"],
)
def test_trees_that_differ_in_one_field_are_unequal(other):
    assert DraftTree.of([0, 1], [-1, 0]) != other


def test_draft_probs_are_compared_by_value():
    tree = DraftTree([0, 1], [-1, 0], HALVES)
    assert tree == DraftTree([0, 1], [-1, 0], HALVES.clone()) and tree != DraftTree([0, 1], [-1, 0], HALVES * 1.5)


def test_a_tree_is_unequal_to_other_things():
    assert TREE != TOKENS


# ---- drawing


def test_a_tree_draws_as_written_by_hand():
    expected = """\
7
├─ 3
│  ├─ 4
│  └─ 5
│     └─ 1
└─ 9
   └─ 4"""
    assert TREE.draw() == expected


def test_notes_stand_in_one_column():
    expected = """\
7             root
├─ 3          accepted
│  ├─ 4
│  └─ 5       rejected
│     └─ 1
└─ 9
   └─ 4       x"""
    assert TREE.draw({0: "root", 1: "accepted", 4: "rejected", 5: "x"}) == expected


def test_a_note_beside_a_deep_node_keeps_its_distance():
    """It was once glued to the token: `└─ 5accepted`."""
    assert chain([1, 2, 3, 4, 5, 6]).draw({5: "accepted"}).splitlines()[5] == "            └─ 6 accepted"


def test_the_root_draws_alone():
    assert root_only(12).draw() == "12"


def test_a_chain_of_1024_nodes_draws_without_recursion():
    assert chain(range(1024)).draw().splitlines()[1023] == " " * 3 * 1022 + "└─ 1023"
