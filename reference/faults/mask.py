"""Masks of a flattened tree that show a row what it must not see, or hide what it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from specbench.reference.faults.fault import Fault
from specbench.steps import FlatTree, Steps
from specbench.tree import DraftTree

WORD = 32


def _with_mask(change: Callable[[DraftTree, FlatTree], Tensor]) -> Callable[[Steps], Steps]:
    """Plants a layout whose mask is `change(tree, flat)`."""

    def plant(steps: Steps) -> Steps:
        def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
            flat = steps.flatten(tree, prefix_len)
            return replace(flat, mask=change(tree, flat))

        return replace(steps, flatten=flatten)

    return plant


def _with_node_mask(build: Callable[[DraftTree], Tensor]) -> Callable[[Steps], Steps]:
    """Plants `build(tree)`, bool [N, N]. A layout with a row for each node of each path builds no such mask."""
    return _with_mask(lambda tree, flat: build(tree) if flat.num_rows == tree.num_nodes else flat.mask)


def _with_leak(leaks: Callable[[DraftTree, int, int], bool]) -> Callable[[Steps], Steps]:
    """Plants a mask with extra visibility wherever `leaks(tree, node, other_node)`."""

    def change(tree: DraftTree, flat: FlatTree) -> Tensor:
        mask = flat.mask.clone()
        for row, node in enumerate(flat.node_of_row.tolist()):
            for other_row, other in enumerate(flat.node_of_row.tolist()):
                if node != other and leaks(tree, node, other):
                    mask[row, other_row] = True
        return mask

    return _with_mask(change)


def _are_siblings(tree: DraftTree, node: int, other: int) -> bool:
    return min(node, other) > 0 and tree.parent_list[node] == tree.parent_list[other]


def _cousin(tree: DraftTree, node: int, other: int) -> bool:
    parent, other_parent = tree.parent_list[node], tree.parent_list[other]
    return other < node and parent != other_parent and _are_siblings(tree, parent, other_parent)


def _later_uncle(tree: DraftTree, node: int, other: int) -> bool:
    parent = tree.parent_list[node]
    return other > parent and _are_siblings(tree, parent, other)


def _nephew(tree: DraftTree, node: int, other: int) -> bool:
    other_parent = tree.parent_list[other]
    return other_parent != node and _are_siblings(tree, node, other_parent)


def _deepest_level(tree: DraftTree, node: int, other: int) -> bool:
    deepest = int(tree.depth.max())
    return int(tree.depth[node]) == deepest == int(tree.depth[other])


def _no_root(tree: DraftTree, flat: FlatTree) -> Tensor:
    mask = flat.mask.clone()
    root_rows = flat.node_of_row == 0
    mask[torch.outer(~root_rows, root_rows)] = False
    return mask


def _paths_joined(tree: DraftTree, flat: FlatTree) -> Tensor:
    return torch.ones_like(flat.mask).tril() if flat.num_rows > tree.num_nodes else flat.mask


def _drafts_hidden_from_themselves(tree: DraftTree, flat: FlatTree) -> Tensor:
    mask = flat.mask.clone()
    mask.diagonal()[flat.node_of_row > 0] = False
    return mask


def _causal(tree: DraftTree) -> Tensor:
    return torch.ones(tree.num_nodes, tree.num_nodes, dtype=torch.bool).tril()


def _columns_shifted(tree: DraftTree) -> Tensor:
    """The prefix's last column moves into the root's place."""
    return torch.nn.functional.pad(tree.ancestor_mask[:, :-1], (1, 0), value=True)


def _last_column_shown(tree: DraftTree) -> Tensor:
    """The row of node -1, where the root's parents would be, is that of the last node; all rows inherit the root's."""
    mask = tree.ancestor_mask.clone()
    mask[:, -1] = True
    return mask


def _ancestors_by(parent_of: Callable[[DraftTree], Sequence[int]]) -> Callable[[DraftTree], Tensor]:
    """The mask of a tree with other parents; entry 0 is not looked at, and a parent may stand behind its child."""

    def build(tree: DraftTree) -> Tensor:
        parents = parent_of(tree)
        mask = torch.eye(tree.num_nodes, dtype=torch.bool)
        for node in range(tree.num_nodes):
            ancestor = node
            while ancestor > 0:
                ancestor = parents[ancestor]
                mask[node, ancestor] = True
        return mask

    return build


def _parent_of_the_node_before(tree: DraftTree) -> Sequence[int]:
    return [-1, 0, *tree.parent_list[1:-1]]


def _first_node_with_the_parents_token(tree: DraftTree) -> Sequence[int]:
    return [-1, *(tree.token_list.index(tree.token_list[parent]) for parent in tree.parent_list[1:])]


def _levels(tree: DraftTree) -> list[list[int]]:
    depth = tree.depth.tolist()
    return [[node for node in range(tree.num_nodes) if depth[node] == level] for level in range(max(depth) + 1)]


def _first_of_the_level_above(tree: DraftTree) -> Sequence[int]:
    first = [level[0] for level in _levels(tree)]
    return [first[max(0, depth - 1)] for depth in tree.depth.tolist()]


def _same_rank_in_the_level_above(tree: DraftTree) -> Sequence[int]:
    parents = [0] * tree.num_nodes
    levels = _levels(tree)
    for above, level in pairwise(levels):
        for rank, node in enumerate(level):
            parents[node] = above[min(rank, len(above) - 1)]
    return parents


def _nodes_just_before(tree: DraftTree) -> Tensor:
    mask = torch.eye(tree.num_nodes, dtype=torch.bool)
    for node, depth in enumerate(tree.depth.tolist()):
        mask[node, node - depth : node] = True
    return mask


def _generations(num_generations: int) -> Callable[[DraftTree], Tensor]:
    """Ancestors up to so many generations back."""

    def build(tree: DraftTree) -> Tensor:
        mask = torch.eye(tree.num_nodes, dtype=torch.bool)
        for node in range(tree.num_nodes):
            mask[node, tree.path_to(node)[-1 - num_generations :]] = True
        return mask

    return build


def _in_depth_first_order(tree: DraftTree) -> Tensor:
    order: list[int] = []
    todo = [0]
    while todo:
        order.append(todo.pop())
        todo += reversed(tree.children(order[-1]))
    return tree.ancestor_mask[order][:, order]


def _one_word(tree: DraftTree) -> Tensor:
    """Node j is bit j mod 32 of a row's only word."""
    bits = torch.zeros(tree.num_nodes, WORD, dtype=torch.bool)
    for start in range(0, tree.num_nodes, WORD):
        part = tree.ancestor_mask[:, start : start + WORD]
        bits[:, : part.shape[1]] |= part
    return bits[:, torch.arange(tree.num_nodes) % WORD]


def _rows_swapped(steps: Steps) -> Steps:
    def flatten(tree: DraftTree, prefix_len: int) -> FlatTree:
        flat = steps.flatten(tree, prefix_len)
        order = list(range(tree.num_nodes))
        order[1:] = order[:0:-1]  # all nodes but the root, the last one first
        return replace(flat, row_of_node=flat.row_of_node[order])

    return replace(steps, flatten=flatten)


FAULTS = (
    Fault(
        "causal_mask",
        "mask-leak",
        "the flattened tree is masked as if it were a chain",
        "a second sibling: chains are right",
        "tree.mask",
        _with_node_mask(_causal),
        origin="PaddlePaddle/FastDeploy#3514",
        kin="causal_over_rows",
    ),
    Fault(
        "paths_joined",
        "mask-leak",
        "paths that are written out one after the other see those before them",
        "two paths, in a layout of whole paths",
        "tree.mask",
        _with_mask(_paths_joined),
        subtle="a layout of whole paths",
        kin="causal_over_rows",
    ),
    Fault(
        "future_leak",
        "mask-future",
        "a draft attends to the drafts after it on its own path",
        "any chain of two",
        "tree.mask",
        _with_leak(lambda tree, node, other: node in tree.path_to(other)),
    ),
    Fault(
        "columns_shifted",
        "mask-future",
        "the mask's columns stand one too far right: a row sees the node after each one that it should see",
        "any draft",
        "tree.mask",
        _with_node_mask(_columns_shifted),
    ),
    Fault(
        "root_inherits_last_row",
        "mask-future",
        "the root's parent, -1, is used as an index, so that every row sees the last node",
        "two drafts",
        "tree.mask",
        _with_node_mask(_last_column_shown),
    ),
    Fault(
        "sibling_leak",
        "mask-leak",
        "a draft attends to its earlier siblings",
        "two children of one node",
        "tree.mask",
        _with_leak(lambda tree, node, other: other < node and _are_siblings(tree, node, other)),
        origin="PaddlePaddle/FastDeploy#3514",
        kin="sibling_leak",
    ),
    Fault(
        "later_sibling_leak",
        "mask-leak",
        "a draft attends to its later siblings, whose rows stand behind its own",
        "two children of one node",
        "tree.mask",
        _with_leak(lambda tree, node, other: other > node and _are_siblings(tree, node, other)),
        kin="sibling_leak",
    ),
    Fault(
        "cousin_leak",
        "mask-leak",
        "a draft attends to earlier children of its parent's siblings, and to nothing else that is wrong",
        "two nodes with different parents at depth two",
        "tree.mask",
        _with_leak(_cousin),
        subtle="width at depth two",
    ),
    Fault(
        "uncle_leak",
        "mask-leak",
        "a draft attends to its parent's later siblings",
        "a child of a first sibling",
        "tree.mask",
        _with_leak(_later_uncle),
        subtle="width above the deepest level",
    ),
    Fault(
        "nephew_leak",
        "mask-leak",
        "a draft attends to its siblings' children",
        "a child of a sibling",
        "tree.mask",
        _with_leak(_nephew),
        subtle="width above the deepest level",
    ),
    Fault(
        "deepest_level_leak",
        "mask-leak",
        "the nodes of the deepest level attend to each other",
        "two nodes at the deepest level",
        "tree.mask",
        _with_leak(_deepest_level),
        subtle="width at the deepest level",
    ),
    Fault(
        "mask_by_token",
        "mask-leak",
        "a node's parent is looked up by its token, and the first node with that token is taken",
        "a token that stands in the tree twice, the second time with a child",
        "tree.mask",
        _with_node_mask(_ancestors_by(_first_node_with_the_parents_token)),
        subtle="the same token twice",
    ),
    Fault(
        "leftmost_ancestors",
        "mask-leak",
        "a node's ancestors are the first nodes of the levels above",
        "a child of a second sibling",
        "tree.mask",
        _with_node_mask(_ancestors_by(_first_of_the_level_above)),
        subtle="an ancestor off the leftmost path",
    ),
    Fault(
        "ancestors_by_rank",
        "mask-leak",
        "a node's parent is the node of the same rank in the level above",
        "a parent of another rank than its child",
        "tree.mask",
        _with_node_mask(_ancestors_by(_same_rank_in_the_level_above)),
        subtle="parents out of step with their children",
    ),
    Fault(
        "nodes_just_before",
        "mask-leak",
        "a node sees as many rows before its own as it is deep",
        "a parent that is not the node just before: chains are right",
        "tree.mask",
        _with_node_mask(_nodes_just_before),
    ),
    Fault(
        "mask_in_depth_first_order",
        "mask-leak",
        "the mask is built in depth-first order, the rows stand in another one",
        "nodes that are not in depth-first order",
        "tree.mask",
        _with_node_mask(_in_depth_first_order),
        subtle="breadth-first order, and a child of a first sibling",
    ),
    Fault(
        "mask_word_wraps",
        "mask-leak",
        "a row's ancestors are bits of one 32-bit word, in which node 32 stands on node 0's place again",
        "a tree of more than 32 nodes",
        "tree.mask",
        _with_node_mask(_one_word),
        subtle="more nodes than bits",
    ),
    Fault(
        "missing_ancestor",
        "mask-missing-ancestor",
        "drafts do not see the root",
        "any draft",
        "tree.mask",
        _with_mask(_no_root),
    ),
    Fault(
        "own_row_hidden",
        "mask-missing-ancestor",
        "a draft does not see itself",
        "any draft",
        "tree.mask",
        _with_mask(_drafts_hidden_from_themselves),
    ),
    Fault(
        "parents_shifted",
        "mask-missing-ancestor",
        "a node has the parent of the node before it",
        "two levels",
        "tree.mask",
        _with_node_mask(_ancestors_by(_parent_of_the_node_before)),
    ),
    Fault(
        "parent_only",
        "mask-missing-ancestor",
        "a node sees its parent and none of the nodes above it",
        "a draft at depth two",
        "tree.mask",
        _with_node_mask(_generations(1)),
        kin="generations",
    ),
    Fault(
        "two_generations",
        "mask-missing-ancestor",
        "a node sees its parent and grandparent and none of the nodes above them",
        "a draft at depth three",
        "tree.mask",
        _with_node_mask(_generations(2)),
        subtle="depth three",
        kin="generations",
    ),
    Fault(
        "rows_swapped",
        "tree-construction",
        "logits are handed back in another order than the nodes'",
        "two drafts with different rows",
        "tree.logits",
        _rows_swapped,
    ),
)
